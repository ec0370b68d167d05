"""A full queue: refused at once and cheaply, before a stream starts, with numbers and when to try again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from router_fakes import Rig
from test_router_requests import byte_tokenizer

from latentpool.errors import BusyError
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2
from services.router.handlers import Handlers
from services.router.text import Texts
from services.router.turnover import Turnover

pytestmark = pytest.mark.timeout(30)

LONG = Sampling(max_tokens=800, ignore_eos=True)


async def fill(rig: Rig, waiting: int) -> list[asyncio.Task]:
    """One conversation that runs and does not get on, and some that wait."""
    rig.gates(False)

    async def run() -> None:
        async for _ in rig.client.generate([1, 2, 3], LONG):
            pass

    tasks: list[asyncio.Task] = []
    book = rig.router._group._loop.book
    while len(tasks) < waiting + 1:
        tasks.append(asyncio.create_task(run()))
        await rig.until(lambda: len(book.queue) + len(book.seated) == len(tasks), "not queued")
    return tasks


async def leave(rig: Rig, tasks: list[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    rig.gates(True)


async def test_a_refused_request_costs_no_tokenisation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read: list[int] = []
    encode = Texts.encode

    async def watched(self: Texts, text: str) -> list[int]:
        read.append(len(text))
        return await encode(self, text)

    monkeypatch.setattr(Texts, "encode", watched)
    async with Rig(1, lanes=1, max_waiting=2, model=byte_tokenizer(tmp_path / "small")) as rig:
        await rig.client.wait_ready(10)
        tasks = await fill(rig, 2)
        text = "a" * ((16 << 20) - 64)
        with pytest.raises(BusyError, match="2 conversations wait already, and --max-waiting is 2") as busy:
            await anext(rig.client.generate(text, LONG))
        assert busy.value.numbers == {"waiting": 2, "max_waiting": 2, "retry_seconds": 1.0}
        with pytest.raises(BusyError):
            await anext(rig.client.score(text))
        assert read == []
        await leave(rig, tasks)


async def test_requests_that_are_being_read_take_their_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Many long texts at once: no more are tokenised than could wait."""
    reading, go_on = 0, asyncio.Event()
    encode = Texts.encode

    async def slow(self: Texts, text: str) -> list[int]:
        nonlocal reading
        reading += 1
        await go_on.wait()
        return await encode(self, text)

    monkeypatch.setattr(Texts, "encode", slow)
    async with Rig(1, lanes=1, max_waiting=2, model=byte_tokenizer(tmp_path / "small")) as rig:
        await rig.client.wait_ready(10)

        async def one() -> str:
            try:
                events = [e async for e in rig.client.generate("abc", Sampling(max_tokens=2, ignore_eos=True))]
            except BusyError as error:
                return str(error)
            return type(events[-1]).__name__

        tasks = [asyncio.create_task(one()) for _ in range(10)]
        await rig.until(lambda: sum(task.done() for task in tasks) == 7, "places for other than a lane and two that wait")
        assert reading == 3
        go_on.set()
        told = await asyncio.gather(*tasks)
        assert sorted(told)[-3:] == ["Completion"] * 3
        assert all("3 conversations wait already, and --max-waiting is 2" in text for text in sorted(told)[:7])


async def test_a_place_is_given_back_when_reading_fails() -> None:
    async with Rig(1, lanes=1, max_waiting=0) as rig:
        await rig.client.wait_ready(10)
        for _ in range(3):
            with pytest.raises(Exception, match="the prompt is empty"):
                await anext(rig.client.generate([], LONG))
        events = [e async for e in rig.client.generate([1], Sampling(max_tokens=1, ignore_eos=True))]
        assert isinstance(events[-1], router_pb2.Completion)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Handlers]:
    """Handlers as they are made."""
    made: list[Handlers] = []
    init = Handlers.__init__

    def watched(self: Handlers, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(Handlers, "__init__", watched)
    return made


async def test_replies_and_scores_teach_how_long_a_lane_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    taught: list[float] = []
    monkeypatch.setattr(Turnover, "learn", lambda _self, seconds: taught.append(seconds))
    async with Rig(1) as rig:
        await rig.client.wait_ready(10)
        async for event in rig.client.generate([1, 2], Sampling(max_tokens=3, ignore_eos=True)):
            last = event
        assert taught == [pytest.approx(last.timings.total_seconds - last.timings.queued_seconds)]
        [_ async for _ in rig.client.score([1, 2])]
        assert len(taught) == 2
        assert min(taught) > 0


async def test_the_refusal_is_a_status_without_any_message(made: list[Handlers]) -> None:
    async with Rig(1, lanes=1, max_waiting=1) as rig, grpc.aio.insecure_channel(rig.router.address) as channel:
        await rig.client.wait_ready(10)
        made[0]._turnover.learn(17.5)
        tasks = await fill(rig, 1)
        request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[1]))
        call = channel.unary_stream("/latentpool.v1.Router/Generate")(request.SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        info, quota, retry = error_details_pb2.ErrorInfo(), error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
        for packed in rpc_status.from_call(raised.value).details:
            for kind in (info, quota, retry):
                packed.Unpack(kind)
        assert dict(info.metadata) == {"waiting": "1", "max_waiting": "1"}
        assert (info.reason, info.domain) == ("BUSY", "latentpool")
        assert quota.violations[0].description == raised.value.details()
        assert retry.retry_delay.seconds == 18  # one conversation of 17.5 s has to end
        await leave(rig, tasks)


async def test_progress_of_those_that_wait_and_fill_is_told() -> None:
    async with Rig(1, lanes=1, chunk_rows=64) as rig:
        await rig.client.wait_ready(10)
        tasks = await fill(rig, 2)
        seen: list = []

        async def watch() -> None:
            async for event in rig.client.generate(list(range(200)), Sampling(max_tokens=1, ignore_eos=True)):
                seen.append(event)  # noqa: PERF401 - seen while it runs

        watching = asyncio.create_task(watch())
        await rig.until(lambda: seen, "no event while it waits")
        for task, ahead in ((tasks[1], 1), (tasks[2], 0)):
            task.cancel()
            await rig.until(lambda ahead=ahead: seen[-1].ahead == ahead, f"{ahead} ahead is not told")
        await leave(rig, tasks)
        await watching
        assert [e.ahead for e in seen if isinstance(e, router_pb2.Waiting)][:3] == [2, 1, 0]
        done = [e.tokens_done for e in seen if isinstance(e, router_pb2.Filling)]
        assert done == sorted(done)
        assert done[-1] == 200
        assert {e.tokens_total for e in seen if isinstance(e, router_pb2.Filling)} == {200}


@pytest.mark.parametrize(
    ("seconds", "waiting", "lanes", "delay"),
    [
        ([], 100, 2, 1),  # nothing is known yet
        ([10.0], 1, 1, 10),
        ([10.0], 8, 1, 10),
        ([10.0], 16, 2, 10),
        ([10.0], 32, 2, 20),
        ([0.01], 256, 8, 1),
        ([600.0], 256, 1, 60),
        ([10.0, 20.0], 1, 1, 12),  # a fifth of the way to the last
    ],
)
def test_the_delay_follows_what_waits(seconds: list[float], waiting: int, lanes: int, delay: int) -> None:
    turnover = Turnover()
    for one in seconds:
        turnover.learn(one)
    assert turnover.delay(waiting, lanes) == delay
