"""Idle conversations, which compute replies as prompts: what they keep is resumed, and they give way to everybody. The fakes
see an idle chunk that runs while others are there."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from router_fake_model import reply
from router_fakes import Rig
from test_router_carries import find, stop_at
from test_router_ends import chunks, start
from test_router_kept import HISTORY, PROMPT, REPLY, kept, said
from test_router_many import longer

from latentpool.v1 import pool_manager_pb2, router_pb2
from services.router.delivery import Mailbox

pytestmark = pytest.mark.timeout(60)


def talkative(length: int, count: int) -> list[int]:
    """A prompt whose reply may be part of the next prompt: no token of it is an image's."""
    return next(prompt for i in range(700) if max(reply(prompt := [(i + j * 11) % 240 for j in range(length)], count)) < 240)


CHATTY = talkative(300, 24)


def idle_of(rig: Rig) -> list[Any]:
    return rig.loop.book.idlers()


async def idles(rig: Rig, prompt: list[int], count: int) -> Any:
    """The idle conversation behind a reply, stopped in the middle of its fill. It is watched for from before the reply on:
    the idle fill may be over before a client on a busy machine has read how the reply ended."""
    stopped = asyncio.create_task(stop_at(rig, 2, lambda c: c.idle and c.sent > 64))
    await said(rig, prompt, count)
    c = await stopped
    assert c.sent < c.prompt_rows
    return c


async def ends(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


# ---- what they keep -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
async def test_the_next_turn_goes_on_from_the_end_of_the_reply(split: bool) -> None:
    async with Rig(2, keep_from=64, chunk_rows=64, split=split, pages=60, lends=2) as rig:
        await rig.client.wait_ready(10)
        rig.manager.kept.grants = lambda _name, at: at != 256  # the prompt's own end, or the reply's would be too near
        await said(rig, CHATTY, 24)
        await rig.until(lambda: kept(rig) == [(320, REPLY)], "the reply is not kept")
        history = CHATTY + reply(CHATTY, 24)
        usage = await said(rig, history + PROMPT[:100], rewind=len(history))
        assert (usage.cached_tokens, usage.cached_from) == (320, REPLY)
        counters = rig.loop.counters
        assert (counters.idle_fills, counters.idle_dropped) == (1, 0)
        idle = rig.manager.admits[1]
        assert (idle.idle, idle.prompt_tokens, idle.max_tokens, len(idle.blocks)) == (True, 324, 0, 16 * 5)


async def test_it_goes_on_from_what_the_fill_kept_and_keeps_a_whole_last_block_too() -> None:
    async with Rig(2, keep_from=64, chunk_rows=128) as rig:
        await rig.client.wait_ready(10)
        await said(rig, PROMPT[:300], 340)
        await rig.until(lambda: len(kept(rig)) == 2, "the reply is not kept")
        assert kept(rig) == [(256, HISTORY), (640, REPLY)]
        assert rig.manager.admits[1].prompt_tokens == 641  # 640 were said: behind the last block one is left
        assert rig.loop.counters.prompt_rows == 300 + 640 - 256


@pytest.mark.parametrize(
    ("prompt", "count", "settings"),
    [(300, 200, {}), (40, 200, {"keep_from": 256}), (300, 300, {"keep_replies": False}), (300, 300, {"keep_from": 0})],
)
async def test_no_reply_is_kept_that_is_short_or_not_to_be_kept(prompt: int, count: int, settings: dict[str, Any]) -> None:
    async with Rig(2, **({"keep_from": 64} | settings)) as rig:
        await rig.client.wait_ready(10)
        await said(rig, PROMPT[:prompt], count)
        await rig.until(rig.at_rest, "not freed")
        assert [admit.idle for admit in rig.manager.admits] == [False]
        assert rig.loop.counters.idle_dropped == 0


async def test_a_reply_that_was_cancelled_is_not_computed_again() -> None:
    async with Rig(2, keep_from=64) as rig:
        await rig.client.wait_ready(10)
        task, events = start(rig, PROMPT[:300], longer(600))
        await rig.until(lambda: len(chunks(events)) > 400, "it does not run")
        await ends(task)
        await rig.until(rig.at_rest, "not freed")
        assert [admit.idle for admit in rig.manager.admits] == [False]


# ---- how they give way -----------------------------------------------------------------------------------------------


async def test_the_one_lane_is_given_to_who_comes_at_once_and_nobody_is_told_to_wait() -> None:
    async with Rig(2, lanes=1, keep_from=64, chunk_rows=64, max_waiting=0) as rig:
        await rig.client.wait_ready(10)
        await idles(rig, PROMPT[:300], 400)
        task, events = start(rig, PROMPT[50:150], longer(5))  # the queue takes nobody but who has a lane
        await rig.until(lambda: rig.loop.counters.idle_dropped, "it keeps its lane")
        assert idle_of(rig) == []
        rig.gates(True)
        await task
        assert chunks(events) == reply(PROMPT[50:150], 5)
        assert not [event for event in events if isinstance(event, router_pb2.Waiting)]
        assert rig.loop.counters.idle_fills == 0


async def test_nobody_runs_beside_one_that_is_idle_and_it_ends_what_it_began() -> None:
    async with Rig(2, lanes=2, keep_from=64, chunk_rows=64) as rig:
        await rig.client.wait_ready(10)
        idle = await idles(rig, PROMPT[:300], 400)
        task, events = start(rig, PROMPT[50:150], longer(100))
        await rig.until(lambda: len(rig.manager.admits) == 3, "it is not admitted")
        before = idle.sent
        rig.gates(True)
        await rig.until(lambda: len(chunks(events)) > 50, "it does not run")
        assert idle.sent == before
        await task
        assert chunks(events) == reply(PROMPT[50:150], 100)
        await rig.until(lambda: (640, REPLY) in kept(rig), "the reply is not kept")
        counters = rig.loop.counters
        assert (counters.idle_fills, counters.idle_dropped) == (1, 0)


async def test_rounds_of_idle_conversations_are_short_and_do_not_run_ahead() -> None:
    async with Rig(2, keep_from=64, chunk_rows=512) as rig:
        await rig.client.wait_ready(10)
        rig.loop._composer.pace.seconds_a_row = 0.001  # 150 rows fit in the gap between a stream's tokens
        rig.manager.kept.grants = lambda _name, at: at > 256
        await said(rig, PROMPT[:300], 400)
        rig.loop._composer.pace.seconds_a_row = 0.001
        await rig.until(lambda: kept(rig) == [(640, REPLY)], "the reply is not kept")
        lanes: dict[int, int] = {}
        sizes = []
        for round_ in rig.workers[0].rounds:
            for operation in round_.operations:
                if operation.HasField("bind"):
                    lanes[operation.bind.lane] = operation.bind.conversation
                if operation.HasField("prompt") and lanes[operation.prompt.lane] == 2:
                    sizes.append(len(operation.prompt.tokens))
                    assert round_.acknowledged_seq == round_.seq - 1
        assert max(sizes) <= 192
        assert sum(sizes) == 640


async def test_it_is_not_begun_while_others_run_and_no_more_wait_than_there_are_lanes() -> None:
    async with Rig(2, lanes=2, keep_from=64, pages=60) as rig:
        for worker in rig.workers:
            worker.pause = 0.001
        await rig.client.wait_ready(10)
        other, events = start(rig, PROMPT[:20], longer(1000))
        await rig.until(lambda: chunks(events), "the other does not run")
        for i in range(3):
            await said(rig, PROMPT[i : i + 300], 215)
        assert not other.done()
        assert [c.tokens[0] for c in idle_of(rig)] == [PROMPT[1], PROMPT[2]]
        assert not any(admit.idle for admit in rig.manager.admits)
        assert rig.loop.counters.idle_dropped == 1
        await ends(other)
        await rig.until(lambda: rig.loop.counters.idle_fills == 2, "they are not begun")


async def test_the_next_turn_takes_its_place() -> None:
    async with Rig(2, lanes=2, keep_from=64, chunk_rows=64) as rig:
        await rig.client.wait_ready(10)
        rig.manager.kept.grants = lambda _name, at: at != 256
        await idles(rig, CHATTY, 24)
        history = CHATTY + reply(CHATTY, 24)
        task, events = start(rig, history + PROMPT[:300], longer(5))
        await rig.until(lambda: rig.loop.counters.idle_dropped, "both compute the same")
        rig.gates(True)
        await task
        assert chunks(events) == reply(history + PROMPT[:300], 5)


@pytest.mark.parametrize("how", ["parked", "recalled", "moved"])
async def test_what_the_manager_does_to_it_ends_it(how: str) -> None:
    async with Rig(2, lanes=2, keep_from=64, chunk_rows=64, split=True, pages=60) as rig:
        await rig.client.wait_ready(10)
        await idles(rig, PROMPT[:300], 400)
        manager = rig.manager
        if how == "parked":
            manager.told.add(2)
            manager.out.put_nowait(pool_manager_pb2.SessionResponse(extended=pool_manager_pb2.Extended(park=[2])))
        elif how == "recalled":
            manager.order(recall=[2])
        else:
            manager.carry(2)
        await rig.until(lambda: not idle_of(rig), "it goes on")
        rig.gates(True)
        await rig.until(rig.at_rest, "not freed")
        assert [admit.returning for admit in manager.admits] == [False, False]
        assert (rig.loop.counters.idle_dropped, rig.loop.counters.parked, rig.loop.counters.carries) == (1, 0, 0)


async def test_one_that_can_never_get_pages_ends() -> None:
    async with Rig(2, lanes=2, keep_from=64, pages=12, context=2000) as rig:
        await rig.client.wait_ready(10)
        rig.manager.kept.grants = lambda _name, _at: False
        rig.manager.largest = 500
        await said(rig, PROMPT[:300], 350)
        await rig.until(lambda: rig.loop.counters.idle_dropped, "it waits")
        assert len(rig.manager.finished) == 1


@pytest.mark.parametrize("wanted", [False, True])
async def test_one_that_gets_no_pages_now_waits_for_them_until_somebody_wants_its_lane(wanted: bool) -> None:
    async with Rig(2, lanes=1, keep_from=64, pages=12, context=2000) as rig:
        await rig.client.wait_ready(10)
        rig.manager.kept.grants = lambda _name, _at: False
        rig.manager.pages.free = rig.manager.pages.free[:11]  # one page is missing, and nobody has it
        rig.manager.pages.fenced.append((1 << 60, [11]))
        await said(rig, PROMPT[:300], 350)
        await rig.until(lambda: any(admit.idle for admit in rig.manager.admits), "it is not asked for")
        assert not rig.loop.counters.idle_dropped
        if wanted:
            await said(rig, PROMPT[:20], 5)
            assert rig.loop.counters.idle_dropped == 1
        rig.manager.pages.fenced = [one for one in rig.manager.pages.fenced if one[0] < 1 << 60]
        rig.manager.pages.free = sorted({*rig.manager.pages.free, 11})
        if not wanted:
            rig.loop.leave(next(c for c in rig.loop.book.seated.values() if c.idle))  # the fake admits nobody by itself
            await rig.until(rig.at_rest, "not freed")


async def test_one_that_may_not_be_kept_ends() -> None:
    async with Rig(2, keep_from=64, chunk_rows=128) as rig:
        await rig.client.wait_ready(10)
        rig.manager.kept.grants = lambda _name, at: at < 640
        await said(rig, PROMPT[:300], 400)
        await rig.until(lambda: rig.loop.counters.idle_dropped, "it stands")
        assert rig.manager.kept.asks[-1] == (2, 640, REPLY)


class Full(Mailbox):
    full = True


async def test_a_client_that_does_not_read_leaves_time_to_it() -> None:
    async with Rig(2, lanes=2, keep_from=64, chunk_rows=64, pages=60) as rig:
        rig.stalls = True
        await rig.client.wait_ready(10)
        other, events = start(rig, PROMPT[:20], longer(900))
        await rig.until(lambda: chunks(events), "the other does not run")
        await said(rig, PROMPT[:300], 400)
        c = find(rig, 1)
        assert c is not None
        assert not c.stalled
        assert not any(admit.idle for admit in rig.manager.admits)
        c.mailbox.__class__ = Full
        await rig.until(lambda: c.stalled and rig.loop.counters.idle_fills, "it is not begun")
        c.mailbox.__class__ = Mailbox
        rig.loop.wake.set()
        await other
        assert chunks(events) == reply(PROMPT[:20], 900)
