"""Every way a conversation or the group can end frees everything: leaving a Rig asserts that lanes and pages came back."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest
from router_fake_model import reply
from router_fakes import Rig

from latentpool.client import Client
from latentpool.errors import BusyError, EpochError, HandshakeError, LatentPoolError, NotServedError
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2
from services.router import delivery

pytestmark = pytest.mark.timeout(30)

LONG = Sampling(max_tokens=800, ignore_eos=True)
PROMPT = list(range(100))


def start(rig: Rig, prompt=PROMPT, sampling: Sampling = LONG, **options) -> tuple[asyncio.Task, list]:
    """A request that runs in a task; the events so far."""
    events: list = []

    async def run() -> None:
        async for event in rig.client.generate(prompt, sampling, **options):
            events.append(event)  # noqa: PERF401 - seen while it runs

    return asyncio.create_task(run()), events


def chunks(events) -> list[int]:
    return [t for e in events if isinstance(e, router_pb2.Chunk) for t in e.token_ids]


# ---- one conversation ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "deadline", "disconnect"])
@pytest.mark.parametrize("stage", ["waiting", "waiting for pages", "filling", "decoding"])
async def test_a_client_that_goes_away_frees_everything(stage: str, how: str) -> None:
    async with Rig(2, lanes=1 if stage == "waiting" else 2, pages=8) as rig:
        await rig.client.wait_ready(10)
        other = None
        if stage.startswith("waiting"):
            other, said = start(rig, list(range(200)) + list(range(200)), Sampling(max_tokens=80, ignore_eos=True))
            await rig.until(lambda: chunks(said), "the other does not run")
        if stage != "decoding":
            rig.gates(False)
        client = Client(rig.router.address)
        events: list = []

        async def consume() -> None:
            async for event in client.generate(PROMPT, LONG, timeout=0.4 if how == "deadline" else None):
                events.append(event)  # noqa: PERF401 - seen while it runs

        task = asyncio.create_task(consume())
        book = rig.loop.book
        reached = {
            "waiting": lambda: any(isinstance(e, router_pb2.Waiting) for e in events),
            "waiting for pages": lambda: any(isinstance(e, router_pb2.Waiting) and "pages" in e.reason for e in events),
            "filling": lambda: any(c.bound for c in book.seated.values()),
            "decoding": lambda: len(chunks(events)) > 3,
        }[stage]
        await rig.until(reached, f"not {stage}")
        seated = len(book.seated) + len(book.queue)
        if how == "cancel":
            task.cancel()
        elif how == "disconnect":
            await client.close()
        await rig.until(lambda: len(book.seated) + len(book.queue) < seated, "the router keeps it", 2.0)
        rig.gates(True)
        with contextlib.suppress(asyncio.CancelledError, LatentPoolError):
            await task
        await client.close()
        if other is not None:
            await other
            assert chunks(said) == reply(list(range(200)) * 2, 80)


async def test_a_freed_lane_rests_until_its_round_is_answered() -> None:
    async with Rig(1, lanes=1) as rig:
        await rig.client.wait_ready(10)
        first, events = start(rig)
        await rig.until(lambda: chunks(events), "no token")
        second, said = start(rig, PROMPT, Sampling(max_tokens=4, ignore_eos=True))
        await rig.until(lambda: said, "the second does not wait")
        first.cancel()
        await second
        assert chunks(said) == reply(PROMPT, 4)
        kinds = [op.WhichOneof("operation") for round_ in rig.workers[0].rounds for op in round_.operations]
        assert kinds.index("free") < len(kinds) - kinds[::-1].index("bind")  # freed before it is bound again
        conversation, fence = rig.manager.finished[0]
        freed = next(r.seq for r in rig.workers[0].rounds if any(o.HasField("free") for o in r.operations))
        assert (conversation, fence) == (1, freed)


async def test_a_reader_that_stops_pauses_only_its_own_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "LIMIT_BYTES", 256)
    small = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with Rig(1, lanes=2, context=20_000, pages=700) as rig:
        await rig.client.wait_ready(10)
        channel = grpc.aio.insecure_channel(rig.router.address, options=small)
        call = channel.unary_stream(
            "/latentpool.v1.Router/Generate",
            request_serializer=router_pb2.GenerateRequest.SerializeToString,
            response_deserializer=router_pb2.GenerateResponse.FromString,
        )(router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=PROMPT), sampling=Sampling(ignore_eos=True).to_proto()))
        book = rig.loop.book
        await rig.until(lambda: any(c.mailbox.full for c in book.seated.values()), "its mailbox never fills", 15)
        (stuck,) = [c for c in book.seated.values() if c.mailbox.full]
        before = len(stuck.generated)
        other, said = start(rig, PROMPT[:50], Sampling(max_tokens=40, ignore_eos=True))
        await other
        assert chunks(said) == reply(PROMPT[:50], 40)
        assert len(stuck.generated) == before
        assert stuck.mailbox.bytes <= 256 + 2 * delivery.TOKEN_BYTES  # of the rounds that were in flight
        assert rig.loop.counters.mailbox_stalls == 1
        got: list[int] = []
        while len(got) < before + 300:  # it reads again, and goes on where it was
            message = await call.read()
            if message.HasField("chunk"):
                assert message.chunk.first_index == len(got)
                got += message.chunk.token_ids
        assert got == reply(PROMPT, len(got))
        await rig.until(lambda: any(c.mailbox.full for c in book.seated.values()), "its mailbox never fills again", 15)
        call.cancel()  # while the handler is blocked in a write
        await rig.until(lambda: not book.seated, "a blocked write keeps its lane", 2.0)
        await channel.close()


# ---- queues ---------------------------------------------------------------------------------------------------------


async def test_conversations_queue_for_lanes_in_order() -> None:
    async with Rig(2, lanes=2) as rig:
        await rig.client.wait_ready(10)
        prompts = [list(range(i, i + 70 + i)) for i in range(6)]
        runs = []
        for i, prompt in enumerate(prompts):
            runs.append(start(rig, prompt, Sampling(max_tokens=30 + i, ignore_eos=True), request_id=f"r{i}"))
            await rig.until(lambda i=i: len(rig.manager.admits) + len(rig.loop.book.queue) > i, "lost")
        await asyncio.gather(*(task for task, _ in runs))
        for i, (_, events) in enumerate(runs):
            assert chunks(events) == reply(prompts[i], 30 + i)
        assert [admit.request_id for admit in rig.manager.admits] == [f"r{i}" for i in range(6)]
        waits = [e for e in runs[5][1] if isinstance(e, router_pb2.Waiting)]
        assert waits[0].reason == "all 2 lanes are busy"
        assert [w.ahead for w in waits] == sorted((w.ahead for w in waits), reverse=True)
        shared = [op.decode.lanes for r in rig.workers[0].rounds for op in r.operations if op.HasField("decode")]
        assert max(map(len, shared)) == 2  # one operation for both


async def test_too_many_waiting_is_busy_and_says_when_to_retry() -> None:
    async with Rig(1, lanes=1, max_waiting=2) as rig:
        await rig.client.wait_ready(10)
        rig.gates(False)
        runs = [start(rig) for _ in range(3)]
        await rig.until(lambda: len(rig.loop.book.queue) == 2, "not queued")
        with pytest.raises(BusyError, match="2 conversations wait already, and --max-waiting is 2: try again later"):
            await anext(rig.client.generate(PROMPT, LONG))
        for task, _ in runs:
            task.cancel()
        rig.gates(True)


async def test_what_the_pool_can_never_hold_is_refused_in_the_managers_words() -> None:
    async with Rig(1, lanes=1) as rig:
        rig.manager.largest = 50
        await rig.client.wait_ready(10)
        with pytest.raises(NotServedError, match="100 tokens are more than the pool's"):
            await anext(rig.client.generate(PROMPT, LONG))
        task, events = start(rig, PROMPT[:20], Sampling(max_tokens=2, ignore_eos=True))
        await task
        assert chunks(events) == reply(PROMPT[:20], 2)


# ---- the group ends ---------------------------------------------------------------------------------------------------


async def test_a_differing_digest_stops_tokens_and_is_reported() -> None:
    async with Rig(3) as rig:
        await rig.client.wait_ready(10)
        task, events = start(rig)
        await rig.until(lambda: chunks(events), "no token")
        at = rig.workers[1].corrupt = len(rig.workers[1].rounds) + 3
        words = rf"round {at}, operation 1 \(decode\): rank 1 computed other bits than ranks 0, 2"
        with pytest.raises(EpochError, match=words):
            await task
        assert chunks(events) == reply(PROMPT, len(chunks(events)))
        decodes = sum(any(o.HasField("decode") for o in r.operations) for r in rig.workers[0].rounds[: at - 1])
        assert len(chunks(events)) == 1 + decodes  # the prompt's token, and one of each round before
        error = await rig.router.ended()
        assert isinstance(error, EpochError)
        assert rig.manager.mismatches == [str(error)]


async def test_a_worker_stream_that_stays_broken_ends_all_streams_with_the_reason() -> None:
    async with Rig(2, lanes=1, dead_after=0.3) as rig:
        await rig.client.wait_ready(10)
        running, events = start(rig)
        await rig.until(lambda: chunks(events), "no token")
        waiting, _ = start(rig)
        await rig.until(lambda: len(rig.loop.book.queue) == 1, "not queued")
        rig.workers[1].fail = "the engine of rank 1 is gone"
        for task in (running, waiting):
            with pytest.raises(EpochError, match=r"rank 1 at .* broke: the engine of rank 1 is gone"):
                await task
        assert "the engine of rank 1 is gone" in str(await rig.router.ended())
        with pytest.raises(EpochError, match=r"does not serve now: .*the engine of rank 1 is gone"):
            await rig.client.get_model()


async def test_a_worker_that_refuses_the_stream_ends_the_epoch_at_once() -> None:
    async with Rig(2) as rig:
        await rig.client.wait_ready(10)
        task, events = start(rig)
        await rig.until(lambda: chunks(events), "no token")
        rig.workers[1].refuse_openings = 1
        rig.workers[1].breaks = 1.0
        with pytest.raises(EpochError, match=r"rank 1 at .* broke: no such term yet"):
            await task
        assert "no such term yet" in str(await rig.router.ended())


async def test_the_manager_ends_an_epoch_whose_stream_is_broken() -> None:
    async with Rig(2) as rig:
        await rig.client.wait_ready(10)
        task, events = start(rig)
        await rig.until(lambda: chunks(events), "no token")
        rig.workers[1].fail = "shutting down"
        await asyncio.sleep(0.1)
        assert not task.done()
        rig.manager.end("rank 1: its engine was killed")
        with pytest.raises(EpochError, match="rank 1: its engine was killed"):
            await task


async def test_the_managers_reason_ends_all_streams() -> None:
    async with Rig(2) as rig:
        await rig.client.wait_ready(10)
        task, events = start(rig)
        await rig.until(lambda: chunks(events), "no token")
        rig.manager.end("rank 1 was silent for 30 s")
        with pytest.raises(EpochError, match="rank 1 was silent for 30 s"):
            await task
        assert str(await rig.router.ended()) == "rank 1 was silent for 30 s"


async def test_an_orderly_end_of_the_group_is_no_failure_of_the_router() -> None:
    async with Rig(2) as rig:
        await rig.client.wait_ready(10)
        task, events = start(rig)
        await rig.until(lambda: chunks(events), "no token")
        rig.manager.end("stopped by its operator", orderly=True)
        with pytest.raises(EpochError, match="the group was stopped"):
            await task
        assert await rig.router.ended() is None


async def test_stopping_the_router_ends_streams() -> None:
    async with Rig(2) as rig:
        await rig.client.wait_ready(10)
        task, events = start(rig)
        await rig.until(lambda: chunks(events), "no token")
        await rig.router.stop()
        with pytest.raises(EpochError, match="the router is stopping"):
            await task


async def test_a_second_router_is_refused_in_the_managers_words() -> None:
    rig = Rig(1)
    rig.manager.refuse = "router a:1 serves this group: stop it, or start with --take-over"
    async with rig:
        error = await asyncio.wait_for(rig.router.ended(), 10)
        assert isinstance(error, HandshakeError)
        assert str(error) == rig.manager.refuse
        with pytest.raises(EpochError, match="--take-over"):
            await rig.client.get_model()


async def test_a_wrong_secret_is_refused() -> None:
    async with Rig(1, secret=b"another") as rig:
        error = await asyncio.wait_for(rig.router.ended(), 10)
        assert isinstance(error, HandshakeError)
        assert "secret" in str(error)


async def test_the_router_waits_for_a_manager_and_fronts_that_come_later() -> None:
    rig = Rig(1)
    rig.workers[0].refuse_openings = 2
    address = "127.0.0.1:1"
    async with rig:
        await rig.client.wait_ready(10)  # the front's first refusals did not matter
        from services.router.service import Router, RouterSettings

        lonely = Router(RouterSettings(manager=address))
        await lonely.start()
        try:
            async with Client(lonely.address) as client:
                with pytest.raises(EpochError, match=f"does not serve now: it waits for the pool manager at {address}"):
                    await client.get_model()
                assert not lonely._task.done()
        finally:
            await lonely.stop()


async def test_stopping_is_not_lost_when_there_is_work_at_the_same_moment() -> None:
    async with Rig(1) as rig:
        await rig.client.wait_ready(10)
        await asyncio.sleep(0.05)  # the loop rests
        rig.loop.wake.set()
        async with asyncio.timeout(5):
            await rig.router.stop()
