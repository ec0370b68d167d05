"""What is refused, in which words and with which status, before a stream starts; and the small calls."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from random_checkpoint import random_checkpoint
from router_fake_manager import CONFIG
from router_fake_model import reply
from router_fakes import Rig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from latentpool.errors import CheckpointError, ConfigError, NotServedError, RequestError
from latentpool.geometry import Geometry
from latentpool.receipts import receipt
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2
from services.router.requests import Limits, read_generate
from services.router.service import Router, RouterSettings
from services.router.statuses import status
from services.router.text import Texts

pytestmark = pytest.mark.timeout(30)

GEOMETRY = Geometry.from_config(json.loads(CONFIG.read_text()))


def byte_tokenizer(directory: Path) -> Path:
    """One token a byte, and two special tokens at the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters[:250])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>"])
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize(
    ("prompt", "sampling", "kind", "words"),
    [
        ([], Sampling(), RequestError, "the prompt is empty: send text or token_ids with at least one token"),
        ("", Sampling(), RequestError, "this checkpoint is served without a tokenizer (no tokenizer.json): send token_ids"),
        ([1, 256], Sampling(), RequestError, "token_ids[1] = 256: ids of this model are 0 to 255"),
        ([2**32 - 1], Sampling(), RequestError, "token_ids[0] = 4294967295: ids of this model are 0 to 255"),
        ([1, 2, 245], Sampling(), RequestError, "token_ids[2] = 245: an image or video token, and this build serves text only"),
        ([1], Sampling(temperature=-0.5), RequestError, "temperature = -0.5: a finite number from 0 (greedy) to 100"),
        ([1], Sampling(temperature=float("nan")), RequestError, "temperature = nan: a finite number"),
        ([1], Sampling(top_k=1025), RequestError, "top_k = 1025: 0 (all) to 1024"),
        ([1], Sampling(max_tokens=0), RequestError, "max_tokens = 0: at least 1; leave it out for as many as fit"),
        ([1], Sampling(top_p=0.0), RequestError, "top_p = 0.0: above 0 and at most 1 (all)"),
        ([1], Sampling(min_p=float("inf")), RequestError, "min_p = inf: 0 (all) to 1"),
        ([1], Sampling(log_probs=21), RequestError, "log_probs = 21: 0 to 20 likeliest tokens; leave it out for none"),
        ([1], Sampling(stop=("x",) * 17), RequestError, "stop = 17 strings: at most 16"),
        (
            [1],
            Sampling(stop=("x",)),
            RequestError,
            "stop: this checkpoint is served without a tokenizer (no tokenizer.json), so a reply has no text",
        ),
        ([1], Sampling(stop_token_ids=(3, 256)), RequestError, "stop_token_ids = 256: ids of this model are 0 to 255"),
        (
            [1] * 1000,
            Sampling(max_tokens=25),
            NotServedError,
            "a prompt of 1000 tokens and max_tokens = 25 make 1025 tokens: this group serves --context 1024",
        ),
        (
            [1] * 1024,
            Sampling(),
            NotServedError,
            "a prompt of 1024 tokens leaves no room for a reply: this group serves --context 1024",
        ),
    ],
)
async def test_what_is_not_allowed_is_refused_by_name(prompt, sampling, kind, words) -> None:
    async with Rig(1) as rig:
        await rig.client.wait_ready(10)
        with pytest.raises(kind, match=re.escape(words)) as raised:
            await anext(rig.client.generate(prompt, sampling))
        assert type(raised.value) is kind
        assert rig.manager.admits == []


@pytest.mark.parametrize(
    ("decode_from", "words"), [(0, "decode_from = 0: 1 to 3, the number of tokens"), (4, "decode_from = 4: 1 to 3")]
)
async def test_a_score_outside_its_tokens_is_refused(decode_from: int, words: str) -> None:
    async with Rig(1) as rig:
        await rig.client.wait_ready(10)
        with pytest.raises(RequestError, match=words):
            await anext(rig.client.score([1, 2, 3], decode_from=decode_from))
        with pytest.raises(NotServedError, match="1025 tokens to score: this group serves --context 1024"):
            await anext(rig.client.score([1] * 1025))


async def test_a_request_id_is_at_most_128_characters() -> None:
    async with Rig(1) as rig:
        await rig.client.wait_ready(10)
        with pytest.raises(RequestError, match="request_id has 129 characters: at most 128"):
            await anext(rig.client.generate([1], request_id="x" * 129))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\x12\x02\xff\xfe", "a string of the GenerateRequest is not valid UTF-8: send text as UTF-8, or token_ids"),
        (b"\x12\x7f", "the bytes sent are not a GenerateRequest: "),
    ],
)
async def test_bytes_that_are_no_request_get_a_clear_status(raw: bytes, words: str) -> None:
    async with Rig(1) as rig, grpc.aio.insecure_channel(rig.router.address) as channel:
        await rig.client.wait_ready(10)
        call = channel.unary_stream("/latentpool.v1.Router/Generate")(raw)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in raised.value.details()


async def test_statuses_carry_details_for_programs() -> None:
    async with Rig(1, lanes=1, max_waiting=0) as rig, grpc.aio.insecure_channel(rig.router.address) as channel:
        await rig.client.wait_ready(10)

        async def details(request: router_pb2.GenerateRequest) -> tuple[grpc.StatusCode, dict]:
            call = channel.unary_stream(
                "/latentpool.v1.Router/Generate", request_serializer=router_pb2.GenerateRequest.SerializeToString
            )(request)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            status = rpc_status.from_call(raised.value)
            found = {}
            for kind in ("ErrorInfo", "BadRequest", "QuotaFailure", "RetryInfo"):
                for packed in status.details:
                    message = getattr(error_details_pb2, kind)()
                    if packed.Unpack(message):
                        found[kind] = message
            return raised.value.code(), found

        ids = router_pb2.TokenIds(ids=[1] * 1000)
        code, found = await details(router_pb2.GenerateRequest(token_ids=ids, sampling=Sampling(top_k=5000).to_proto()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert found["BadRequest"].field_violations[0].field == "sampling.top_k"
        code, found = await details(router_pb2.GenerateRequest(token_ids=ids, sampling=Sampling(max_tokens=25).to_proto()))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        numbers = {"prompt_tokens": "1000", "max_tokens": "25", "context": "1024"}
        assert dict(found["ErrorInfo"].metadata) == numbers
        rig.gates(False)
        running = rig.client.generate([1, 2], Sampling(max_tokens=3, ignore_eos=True))
        first = asyncio.ensure_future(anext(running))
        await rig.until(lambda: not rig.router._group._loop.book.lane_free, "no lane taken")
        code, found = await details(router_pb2.GenerateRequest(token_ids=ids))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert found["RetryInfo"].retry_delay.seconds == 1
        assert "0 conversations wait already" in found["QuotaFailure"].violations[0].description
        rig.gates(True)
        await first
        await running.aclose()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (router_pb2.GenerateRequest(sampling=Sampling(top_p=2.0).to_proto()), "sampling.top_p"),
        (router_pb2.GenerateRequest(sampling=Sampling(min_p=-0.1).to_proto()), "sampling.min_p"),
        (router_pb2.GenerateRequest(sampling=Sampling(log_probs=99).to_proto()), "sampling.log_probs"),
        (router_pb2.GenerateRequest(sampling=Sampling(stop=("a", "")).to_proto()), "sampling.stop[1]"),
        (router_pb2.GenerateRequest(sampling=Sampling(stop=("é" * 129,)).to_proto()), "sampling.stop[0]"),
        (router_pb2.GenerateRequest(sampling=Sampling(stop=("a",)).to_proto()), "sampling.stop"),  # no tokenizer
        (router_pb2.GenerateRequest(priority=7), "priority"),
        (router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[1 << 20])), "token_ids.ids"),
    ],
)
async def test_a_refusal_names_the_field(request_: router_pb2.GenerateRequest, field: str) -> None:
    limits = Limits(1000, GEOMETRY)
    with pytest.raises(RequestError) as raised:
        await read_generate(request_, limits, Texts(None))
    assert raised.value.field == field
    found = {}
    for packed in rpc_status.from_call(_Ended(status(raised.value))).details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest):
            if packed.Unpack(message := kind()):
                found[kind] = message
    assert found[error_details_pb2.BadRequest].field_violations[0].field == field
    assert found[error_details_pb2.ErrorInfo].reason == "BAD_REQUEST"


class _Ended:
    """A call that ended with a status."""

    def __init__(self, ended: grpc.Status) -> None:
        self.code, self.details = lambda: ended.code, lambda: ended.details
        self.trailing_metadata = lambda: ended.trailing_metadata


@pytest.mark.parametrize(
    ("priority", "background"),
    [(router_pb2.PRIORITY_UNSPECIFIED, False), (router_pb2.PRIORITY_FOREGROUND, False), (router_pb2.PRIORITY_BACKGROUND, True)],
)
async def test_what_is_accepted_says_all_that_the_loop_needs(priority: int, background: bool) -> None:
    texts = Texts(random_checkpoint())
    try:
        ids = router_pb2.TokenIds(ids=[1, 2])
        asked = Sampling(top_p=0.5, min_p=0.25, log_probs=0, stop=("bc", "é"))
        request = router_pb2.GenerateRequest(token_ids=ids, priority=priority, sampling=asked.to_proto())
        accepted = await read_generate(request, Limits(1000, GEOMETRY), texts)
        assert (accepted.background, accepted.sampling) == (background, asked)
        assert [accepted.stop_finder.push(token) for token in "abé".encode()] == [None, None, None, "é"]
        request.sampling.ClearField("stop")
        accepted = await read_generate(request, Limits(1000, GEOMETRY), texts)
        assert accepted.stop_finder is None
        assert not accepted.stops
    finally:
        texts.close()


# ---- text -------------------------------------------------------------------------------------------------------------


async def test_text_goes_in_and_comes_out(tmp_path: Path) -> None:
    async with Rig(2, model=byte_tokenizer(tmp_path / "small")) as rig:
        model = await rig.client.wait_ready(10)
        assert model.name == "small"
        assert model.has_tokenizer
        prompt = await rig.client.tokenize("Hello, wörld")
        assert len(prompt) == 13
        events = [e async for e in rig.client.generate("Hello, wörld", Sampling(max_tokens=60, ignore_eos=True))]
        said = reply(prompt, 60)
        chunks = [e for e in events if isinstance(e, router_pb2.Chunk)]
        assert [t for c in chunks for t in c.token_ids] == said
        tokenizer = Tokenizer.from_file(str(tmp_path / "small" / "tokenizer.json"))
        assert "".join(c.text for c in chunks) == tokenizer.decode(said)


@pytest.mark.parametrize("chars", [1, 2, 3])
async def test_a_stop_string_ends_the_reply_and_is_not_told(tmp_path: Path, chars: int) -> None:
    async with Rig(2, model=byte_tokenizer(tmp_path / "small")) as rig:
        await rig.client.wait_ready(10)
        prompt = list(range(40))
        said = reply(prompt, 120)
        tokenizer = Tokenizer.from_file(str(tmp_path / "small" / "tokenizer.json"))
        whole = tokenizer.decode(said)
        readable = [i for i in range(20, len(whole) - chars) if "\ufffd" not in whole[i : i + chars]]
        stop = whole[readable[0] : readable[0] + chars]
        until = next(n for n in range(1, 121) if stop in tokenizer.decode(said[:n]))
        sampling = Sampling(stop=("no such text", stop), ignore_eos=True)
        events = [e async for e in rig.client.generate(prompt, sampling)]
        chunks = [e for e in events if isinstance(e, router_pb2.Chunk)]
        assert [t for c in chunks for t in c.token_ids] == said[:until]
        assert "".join(c.text for c in chunks) == whole[: whole.index(stop)]
        completion = events[-1]
        assert (completion.finish_reason, completion.stop) == (router_pb2.FINISH_REASON_STOP, stop)
        assert completion.usage.generated_tokens == until
        assert completion.receipt.sha256 == receipt(prompt, said[:until])


async def test_text_held_back_is_told_at_the_end(tmp_path: Path) -> None:
    async with Rig(1, model=byte_tokenizer(tmp_path / "small")) as rig:
        await rig.client.wait_ready(10)
        said = reply(list(range(40)), 60)
        tokenizer = Tokenizer.from_file(str(tmp_path / "small" / "tokenizer.json"))
        whole = tokenizer.decode(said)
        stop = whole[-3:].replace("\ufffd", "") + "\x00 never"
        events = [e async for e in rig.client.generate(list(range(40)), Sampling(stop=(stop,), max_tokens=60, ignore_eos=True))]
        assert "".join(e.text for e in events if isinstance(e, router_pb2.Chunk)) == whole
        assert (events[-1].finish_reason, events[-1].stop) == (router_pb2.FINISH_REASON_LENGTH, "")


async def test_a_stop_token_is_counted_and_signed_but_not_said(tmp_path: Path) -> None:
    async with Rig(1, model=byte_tokenizer(tmp_path / "small")) as rig:
        await rig.client.wait_ready(10)
        prompt = list(range(40))
        said = reply(prompt, 40)
        stop = next(t for i, t in enumerate(said) if i > 3 and t < 250 and t not in said[:i])
        until = said.index(stop) + 1
        sampling = Sampling(stop_token_ids=(stop,), ignore_eos=True)
        events = [e async for e in rig.client.generate(prompt, sampling)]
        chunks = [e for e in events if isinstance(e, router_pb2.Chunk)]
        assert [t for c in chunks for t in c.token_ids] == said[:until]
        tokenizer = Tokenizer.from_file(str(tmp_path / "small" / "tokenizer.json"))
        assert "".join(c.text for c in chunks) == tokenizer.decode(said[: until - 1])
        assert events[-1].finish_reason == router_pb2.FINISH_REASON_STOP
        assert events[-1].usage.generated_tokens == until
        assert events[-1].receipt.sha256 == receipt(prompt, said[:until])


async def test_the_models_own_end_stops_unless_told_otherwise() -> None:
    def with_end() -> list[int]:
        for first in range(240):
            said = reply([first], 60)
            ends = [i for i, t in enumerate(said) if t in (253, 254, 255)]
            if ends and ends[0] < 50:
                return [first]
        raise AssertionError

    prompt = with_end()
    said = reply(prompt, 60)
    end = next(i for i, t in enumerate(said) if t in (253, 254, 255))
    async with Rig(1) as rig:
        await rig.client.wait_ready(10)
        events = [e async for e in rig.client.generate(prompt, Sampling(max_tokens=60))]
        assert events[-1].finish_reason == router_pb2.FINISH_REASON_STOP
        assert events[-1].usage.generated_tokens == end + 1
        events = [e async for e in rig.client.generate(prompt, Sampling(max_tokens=60, ignore_eos=True))]
        assert events[-1].finish_reason == router_pb2.FINISH_REASON_LENGTH
        assert events[-1].usage.generated_tokens == 60


async def test_an_unstated_length_ends_at_the_context_and_pages_follow() -> None:
    async with Rig(2, context=512, pages=9) as rig:
        await rig.client.wait_ready(10)
        events = [e async for e in rig.client.generate([5, 6, 7], Sampling(ignore_eos=True))]
        assert events[-1].usage.generated_tokens == 509
        assert [t for e in events if isinstance(e, router_pb2.Chunk) for t in e.token_ids] == reply([5, 6, 7], 509)


async def test_sampling_reaches_the_workers_and_a_seed_is_drawn_and_reported() -> None:
    async with Rig(2) as rig:
        await rig.client.wait_ready(10)
        stated = Sampling(temperature=0.7, top_k=12, top_p=0.5, min_p=0.25, seed=2**64 - 1, max_tokens=1)
        events = [e async for e in rig.client.generate([1, 2], stated)]
        assert events[-1].seed == 2**64 - 1
        drawn = [[e async for e in rig.client.generate([1, 2], Sampling(max_tokens=1))][-1].seed for _ in range(2)]
        assert drawn[0] != drawn[1]
        for worker in rig.workers:
            bind = worker.binds[0]
            assert (bind.temperature, bind.top_k, bind.top_p, bind.min_p, bind.seed) == (0.7, 12, 0.5, 0.25, 2**64 - 1)
            assert (worker.binds[1].top_p, worker.binds[1].min_p) == (1.0, 0.0)
            assert [b.seed for b in worker.binds[1:]] == drawn


async def test_chunks_of_prompts_are_blocks_and_progress_is_told() -> None:
    async with Rig(2, chunk_rows=128, context=2048) as rig:
        await rig.client.wait_ready(10)
        events = [e async for e in rig.client.generate(list(range(200)) * 2, Sampling(max_tokens=2, ignore_eos=True))]
        filling = [e for e in events if isinstance(e, router_pb2.Filling)]
        assert filling[-1] == router_pb2.Filling(tokens_done=400, tokens_total=400)
        starts = [o.prompt.start for r in rig.workers[0].rounds for o in r.operations if o.HasField("prompt")]
        assert starts == [0, 128, 256, 384]


# ---- small calls ------------------------------------------------------------------------------------------------------


async def test_get_model_says_what_is_served() -> None:
    async with Rig(3, lanes=2, context=1024) as rig:
        model = await rig.client.wait_ready(10)
        assert (model.vocab_size, model.context, model.world, model.lanes) == (256, 1024, 3, 2)
        assert (model.dtype, model.kv_dtype, model.checkpoint_digest, model.numerics_digest) == ("f32", "f32", "c", "n")
        assert not model.has_tokenizer
        assert list(model.eos_token_ids) == [253, 254, 255]


async def test_health_follows_rounds_and_reflection_names_the_service() -> None:
    async with Rig(1) as rig, grpc.aio.insecure_channel(rig.router.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        await rig.client.wait_ready(10)
        for service in ("", "latentpool.v1.Router"):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == 1
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await listing.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = [s.name for s in (await listing.read()).list_services_response.service]
        assert "latentpool.v1.Router" in names
        listing.cancel()
        rig.manager.end("over")
        await rig.router.ended()
        assert (await health.Check(health_pb2.HealthCheckRequest(service=""))).status == 2


async def test_health_waits_for_an_answer_of_all_ranks() -> None:
    rig = Rig(2)
    rig.workers[1].gate.clear()
    async with rig, grpc.aio.insecure_channel(rig.router.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        await rig.until(lambda: rig.workers[0].answered == 1, "rank 0 has not answered the first ping")
        assert (await health.Check(health_pb2.HealthCheckRequest(service=""))).status == 2
        rig.gates(True)
        await rig.client.wait_ready(10)


async def test_a_taken_port_and_a_bad_tokenizer_are_the_operators_fault(tmp_path: Path) -> None:
    async with Rig(1) as rig:
        await rig.client.wait_ready(10)
        second = Router(RouterSettings(manager=rig.manager.address, bind=rig.router.address))
        with pytest.raises(ConfigError, match=f"cannot listen on {rig.router.address}"):
            await second.start()
        await second.stop()
        (tmp_path / "tokenizer.json").write_text(json.dumps({"version": 1}))
        third = Router(RouterSettings(manager=rig.manager.address, model=tmp_path))
        with pytest.raises(CheckpointError, match=r"tokenizer.json: cannot be read as a tokenizer"):
            await third.start()
        await third.stop()
        with pytest.raises(ConfigError, match="set --secret-file"):
            await Router(RouterSettings(manager="10.0.0.1:5")).start()
