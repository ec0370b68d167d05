"""Refusals and ends of a group over real streams: every text that a person meets."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from manager_fakes import GIB, MakePlace, Worker, config, identity

from latentpool import handshake
from latentpool.errors import ConfigError, DigestMismatchError, EpochError, LinkError, PlanRefusedError, SetupError
from latentpool.v1 import pool_admin_pb2 as admin_pb
from latentpool.v1 import pool_manager_pb2 as pb

FAILED = grpc.StatusCode.FAILED_PRECONDITION


async def refused(worker: Worker, rank: int, who: pb.Identity | None = None, secret: bytes = b"") -> tuple[Any, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.hello(rank, who, secret)
    return caught.value.code(), caught.value.details() or ""


# ---- joining -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"build": "0.2.0"}, ["build 0.2.0 on rank 1, 0.1.0 on rank 0", "install the same release"]),
        ({"checkpoint_digest": "bad"}, ["checkpoint digest bad on rank 1, c0ffee on rank 0", "same checkpoint"]),
        ({"dtype": "f32"}, ["compute dtype f32 on rank 1, bf16 on rank 0", "--dtype"]),
        ({"kv_dtype": "f32"}, ["cache dtype f32 on rank 1, bf16 on rank 0", "--kv-cache"]),
        ({"numerics_digest": "dead"}, ["numerics digest dead on rank 1, beef on rank 0", "equal bits"]),
        ({"page_rows": 64}, ["page rows 64 on rank 1, 512 on rank 0", "--page-rows"]),
        ({"drafts": False}, ["drafts off on rank 1, on on rank 0", "--no-drafts"]),
        ({"transport": "ucx"}, ["transport ucx on rank 1, inproc on rank 0", "--transport"]),
        ({"config_json": config(kv_lora_rank=256)}, ["geometry: latent 256 on rank 1, 512 on rank 0", "same model"]),
        ({"world": 3}, ["rank 1 was started for 3 ranks, this group has 2"]),
        ({"build": "0.2.0", "dtype": "f32"}, ["build 0.2.0 on rank 1", "compute dtype f32 on rank 1"]),
    ],
)
async def test_a_worker_that_does_not_match_is_refused_in_words(
    place: MakePlace, changes: dict[str, Any], words: list[str]
) -> None:
    here = await place()
    await here.join(0)
    code, details = await refused(await here.worker(), 1, identity(**changes))
    assert code is FAILED
    for word in words:
        assert word in details
    await here.join(1)  # the right one still may


async def test_the_layout_of_config_json_does_not_matter(place: MakePlace) -> None:
    here = await place()
    await here.join(0)
    await (await here.worker()).hello(1, identity(config_json=config(attention_dropout=0.5)))


async def test_two_workers_of_one_rank(place: MakePlace) -> None:
    here = await place()
    await here.join(1)
    assert await refused(await here.worker(), 1) == (
        FAILED,
        "rank 1 has joined already, from host1 (127.0.0.1:9001): give the worker on host1 (127.0.0.1:9001) another --rank",
    )


async def test_a_rank_outside_the_group(place: MakePlace) -> None:
    here = await place()
    assert await refused(await here.worker(), 2) == (FAILED, "rank 2 is not in this group of 2: its ranks are 0 to 1")


async def test_a_config_that_is_not_served(place: MakePlace) -> None:
    here = await place()
    code, details = await refused(await here.worker(), 0, identity(config_json=config(qk_rope_head_dim=64)))
    assert code is FAILED
    assert "qk_rope_head_dim" in details


async def test_wrong_secret(place: MakePlace) -> None:
    here = await place(secret=b"right")
    code, details = await refused(await here.worker(), 0, secret=b"wrong")
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert details == "rank 0 on host0 does not know this group's secret: give every member of the group the same --secret-file"
    router = await here.router()
    await router.open(secret=b"wrong")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.get()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await (await here.worker()).hello(0, secret=b"right")


async def test_another_ranks_proof_is_not_taken(place: MakePlace) -> None:
    """The proof covers the rank: a hello cannot be changed on its way."""
    here = await place()
    worker = await here.worker()
    challenge = (await worker.get()).challenge
    mac = handshake.prove(b"", "worker", challenge.nonce, b"n" * 32, b"0")
    await worker.say(hello=pb.Hello(rank=1, identity=identity(), nonce=b"n" * 32, mac=mac))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.get()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_stream_that_never_says_hello(place: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.pool_manager.stream._HELLO_DEADLINE", 0.1)
    here = await place()
    for peer in (await here.worker(), await here.router()):
        await peer.get()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.get()
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "no hello in 0.1 s")


async def test_messages_out_of_turn(place: MakePlace) -> None:
    here = await place()
    worker = await here.worker()
    await worker.get()
    await worker.say(ready=pb.Ready())
    with pytest.raises(grpc.aio.AioRpcError, match="first message is its hello"):
        await worker.get()
    router = await here.router()
    await router.open()
    await router.say(finish=pb.Finish(conversation=1))
    with pytest.raises(grpc.aio.AioRpcError, match="requests come after the term is granted"):
        await router.get()


# ---- the end of an epoch -------------------------------------------------------------------------------------------


async def check_ended(here: Any, workers: list[Worker], router: Any, kind: type[Exception], text: str) -> None:
    error = await here.ended()
    assert type(error) is kind
    assert str(error) == text
    for worker in workers:
        message = await worker.get()
        assert (message.stop.reason, message.stop.orderly) == (text, False)
        assert await worker.get() is None
    if router is not None:
        gone = (await router.get()).epoch_ended
        assert (gone.epoch, gone.reason) == (1, text)
        assert await router.get() is None
    ranks = await (await here.admin()).GetRanks(admin_pb.GetRanksRequest())
    assert ranks.group_state == text
    late = await here.worker()
    code, details = await refused(late, 0)
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, f"this group has ended: {text}")


async def test_a_plan_that_does_not_fit_stops_everyone(place: MakePlace) -> None:
    here = await place(context=None, parallel=8)
    workers = await here.join(0, 1, room=13 * GIB)
    error = await here.ended()
    assert isinstance(error, PlanRefusedError)
    assert str(error).startswith("--parallel 8 needs ")
    await check_ended(here, workers, None, PlanRefusedError, str(error))


async def test_a_context_above_the_models_stops_everyone(place: MakePlace) -> None:
    """At the first hello, before anybody loads a shard."""
    here = await place(context=2 << 20)
    worker = await here.worker()
    await worker.hello(0)
    await check_ended(here, [worker], None, ConfigError, "--context 2097152: the model serves 1 to 1048576 tokens")


async def test_a_worker_that_never_joins(place: MakePlace) -> None:
    here = await place(world=3, join_timeout=0.2)
    workers = await here.join(0, 2, who=identity(world=3))
    await check_ended(here, workers, None, SetupError, "rank 1 has not joined in 0.2 s (joined: 0, 2)")


async def test_a_worker_whose_engine_fails(place: MakePlace) -> None:
    here = await place()
    workers, router = await here.serving()
    await workers[1].say(failed=pb.Failed(message="the engine was killed"))
    await check_ended(here, workers, router, EpochError, "rank 1: the engine was killed")


async def test_a_worker_whose_checkpoint_is_bad(place: MakePlace) -> None:
    here = await place()
    loading = await here.worker()
    await loading.hello(0)
    await loading.say(failed=pb.Failed(message="model.norm.weight is missing"))
    await check_ended(here, [loading], None, SetupError, "rank 0: model.norm.weight is missing")


async def test_a_link_that_fails_names_both_ends(place: MakePlace) -> None:
    here = await place()
    workers, router = await here.serving()
    await workers[1].say(failed=pb.Failed(message="endpoint reset", peer=0))
    await check_ended(here, workers, router, LinkError, "rank 1: endpoint reset (its link to rank 0)")


@pytest.mark.parametrize("first", [0, 1])
async def test_the_cause_of_a_broken_link_is_told_whoever_speaks_first(place: MakePlace, first: int) -> None:
    """Rank 1 fails and drops its links; rank 0 sees only that, and leaves."""
    here = await place()
    workers, router = await here.serving()
    for rank in (first, 1 - first):
        if rank == 0:
            await workers[0].say(failed=pb.Failed(message="rank 1 dropped its links", peer=1))
        else:
            await workers[1].say(failed=pb.Failed(message="out of memory"))
        if rank == 0 and first == 0:
            await workers[0].leave()
    await check_ended(here, workers[1:], router, EpochError, "rank 1: out of memory")


async def test_a_link_that_both_ends_lost_is_not_a_rank_that_has_gone(place: MakePlace) -> None:
    here = await place()
    workers, router = await here.serving()
    for rank in range(2):
        await workers[rank].say(failed=pb.Failed(message="endpoint reset", peer=1 - rank))
        await workers[rank].leave()
    error = await here.ended()
    assert isinstance(error, LinkError)
    assert str(error) in {f"rank {rank}: endpoint reset (its link to rank {1 - rank})" for rank in range(2)}
    assert (await router.get()).epoch_ended.reason == str(error)


@pytest.mark.parametrize("orderly", [True, False])
async def test_a_worker_whose_stream_ends(place: MakePlace, orderly: bool) -> None:
    here = await place()
    workers, router = await here.serving()
    if orderly:
        await workers[0].leave()
    else:
        workers[0].vanish()
    text = "rank 0 on host0 has gone: its stream to the pool manager ended"
    await check_ended(here, workers[1:], router, EpochError, text)


async def test_a_worker_that_falls_silent(place: MakePlace) -> None:
    here = await place(dead_after=0.4)
    workers, router = await here.serving()
    beating = asyncio.create_task(beat(workers[0]))
    try:
        text = "rank 1 on host1 has been silent for 0.4 s (--dead-after)"
        error = await here.ended()
        assert str(error) == text
        assert isinstance(error, EpochError)
        assert (await router.get()).epoch_ended.reason == text
        assert (await workers[1].get()).stop.reason == text
    finally:
        beating.cancel()


async def beat(worker: Worker) -> None:
    while not worker.call.done():
        await worker.say(heartbeat=pb.Heartbeat())
        await asyncio.sleep(0.05)


async def test_digests_that_differ(place: MakePlace) -> None:
    here = await place()
    workers, router = await here.serving()
    text = "round 7, operation 2 (prompt): rank 1 computed other bits than ranks 0, 2"
    await router.say(mismatch=pb.ReportMismatch(message=text))
    await check_ended(here, workers, router, DigestMismatchError, text)


async def test_the_end_reaches_a_router_that_waits_for_its_term(place: MakePlace) -> None:
    here = await place()
    router = await here.router()
    await router.open()
    workers = await here.join(0)
    workers[0].vanish()
    gone = (await router.get()).epoch_ended
    assert gone.reason == "rank 0 on host0 has gone: its stream to the pool manager ended"


# ---- a second router -------------------------------------------------------------------------------------------------


async def test_a_second_router_is_refused_by_name(place: MakePlace) -> None:
    here = await place()
    _, router = await here.serving()
    second = await here.router()
    await second.open(name="host2:77")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await second.get()
    assert caught.value.code() is FAILED
    assert caught.value.details() == ("router r1 serves this group (term 1): stop it, or start host2:77 with --take-over")
    assert (await router.admit(1, 0, prompt=1)).HasField("admitted")


async def test_take_over_ends_the_old_session_and_frees_its_leases(place: MakePlace) -> None:
    here = await place()
    workers, router = await here.serving()
    await router.admit(1, 0, prompt=5000)
    second = await here.router()
    await second.open(name="r2", take_over=True)
    granted = (await second.get()).granted
    assert (granted.term, granted.epoch) == (2, 1)
    terms = [(await worker.get()).term for worker in workers]
    assert [(term.term, term.key) for term in terms] == [(2, granted.round_key)] * 2
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.get()
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.ABORTED, "router r2 took over from r1")
    assert (await second.admit(1, 0, prompt=5000)).admitted.pages[0] == 0
    ranks = await (await here.admin()).GetRanks(admin_pb.GetRanksRequest())
    assert (ranks.router, ranks.term) == ("r2", 2)
