"""Kept states between fakes: what a prompt goes on from changes no reply, and what is granted is kept or forgotten, once. The
fakes see every rule that a round breaks; leaving a Rig evicts all states and asserts that every page came back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest
from router_fake_model import reply
from router_fakes import Rig
from test_router_carries import best, best_of, find, park, stop_at, two_in_flight
from test_router_ends import chunks, start
from test_router_many import longer

from latentpool.client import Client
from latentpool.errors import LatentPoolError
from latentpool.v1 import pool_manager_pb2, router_pb2

pytestmark = pytest.mark.timeout(60)

HISTORY, REWIND = pool_manager_pb2.MARK_HISTORY, pool_manager_pb2.MARK_REWIND
SHARED, REPLY = pool_manager_pb2.MARK_SHARED, pool_manager_pb2.MARK_REPLY
PROMPT = [i * 7 % 240 for i in range(700)]


def kept(rig: Rig) -> list[tuple[int, int]]:
    return sorted((granted.at, granted.mark) for granted in rig.manager.kept.states.values() if granted.kept)


async def said(rig: Rig, prompt: list[int], count: int = 5, client: Client | None = None, **options: Any) -> router_pb2.Usage:
    """What a reply cost, which is the one of a prompt computed afresh."""
    events = [event async for event in (client or rig.client).generate(prompt, longer(count), **options)]
    assert chunks(events) == reply(prompt, count)
    return events[-1].usage


# ---- keeping ----------------------------------------------------------------------------------------------------------


async def test_a_prompt_goes_on_from_the_end_of_an_earlier_one() -> None:
    async with Rig(2, keep_from=64, chunk_rows=256) as rig:
        await rig.client.wait_ready(10)
        first = await said(rig, PROMPT[:400])
        assert (first.cached_tokens, first.cached_from) == (0, 0)
        assert kept(rig) == [(384, HISTORY)]
        task, events = start(rig, PROMPT[:650], longer(5))
        await task
        assert chunks(events) == reply(PROMPT[:650], 5)
        usage = events[-1].usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.cached_from) == (650, 384, HISTORY)
        filling = [event.tokens_done for event in events if isinstance(event, router_pb2.Filling)]
        assert filling[0] >= 384
        assert filling[-1] == 650
        assert kept(rig) == [(384, HISTORY), (640, HISTORY)]
        counters = rig.loop.counters
        assert (counters.keeps, counters.resumes, counters.resumed_tokens) == (2, 1, 384)
        assert counters.prompt_rows == 400 + 650 - 384


async def test_an_edited_message_goes_on_from_just_before_it() -> None:
    async with Rig(2, keep_from=64, chunk_rows=256) as rig:
        await rig.client.wait_ready(10)
        await said(rig, PROMPT[:600], rewind=300)
        assert rig.manager.kept.asks == [(1, 256, REWIND), (1, 576, HISTORY)]
        edited = await said(rig, PROMPT[:300] + PROMPT[100:350], rewind=300)
        assert (edited.cached_tokens, edited.cached_from) == (256, REWIND)


async def test_where_prompts_part_is_kept_when_it_is_seen_to_be() -> None:
    async with Rig(2, keep_from=64, chunk_rows=256) as rig:
        await rig.client.wait_ready(10)
        system = PROMPT[:300]
        usages = [await said(rig, system + PROMPT[i : i + 280]) for i in (1, 100, 200)]
        assert [usage.cached_tokens for usage in usages] == [0, 0, 256]
        assert usages[2].cached_from == SHARED
        assert rig.manager.kept.asks == [(1, 576, HISTORY), (2, 256, SHARED), (2, 576, HISTORY), (3, 576, HISTORY)]


async def test_what_is_too_near_is_kept_where_the_better_place_is_refused() -> None:
    async with Rig(2, keep_from=64, chunk_rows=256) as rig:
        await rig.client.wait_ready(10)
        rig.manager.kept.grants = lambda _name, at: at != 448
        await said(rig, PROMPT[:600], rewind=500)
        assert rig.manager.kept.asks == [(1, 448, REWIND), (1, 576, HISTORY)]
        assert kept(rig) == [(576, HISTORY)]
        rig.manager.kept.grants = lambda _name, _at: True
        other = PROMPT[3:]
        await said(rig, other[:600], rewind=500)
        assert rig.manager.kept.asks[2:] == [(2, 448, REWIND)]


async def test_callers_with_different_tokens_share_nothing() -> None:
    async with Rig(2, keep_from=64) as rig:
        await rig.client.wait_ready(10)
        async with Client(rig.router.address, "one") as one, Client(rig.router.address, "two") as two:
            assert (await said(rig, PROMPT[:400])).cached_tokens == 0
            assert (await said(rig, PROMPT[:400], client=one)).cached_tokens == 0
            assert (await said(rig, PROMPT[:400], client=two)).cached_tokens == 0
            for client in (rig.client, one, two):
                assert (await said(rig, PROMPT[:400], client=client)).cached_tokens == 384
        assert len({admit.blocks for admit in rig.manager.admits}) == 3


@pytest.mark.parametrize("keep_from", [0, 640])
async def test_nothing_is_kept_that_is_shorter_than_is_kept(keep_from: int) -> None:
    async with Rig(2, keep_from=keep_from, keep_replies=False) as rig:
        await rig.client.wait_ready(10)
        await said(rig, PROMPT[:640], rewind=400)
        assert rig.manager.kept.asks == []
        assert bool(rig.manager.admits[0].blocks) == bool(keep_from)
        await said(rig, PROMPT[:641])
        assert rig.manager.kept.asks == ([(2, 640, HISTORY)] if keep_from else [])


async def test_a_score_neither_keeps_nor_resumes() -> None:
    async with Rig(2, keep_from=64) as rig:
        await rig.client.wait_ready(10)
        await said(rig, PROMPT[:400])
        scored = [event async for event in rig.client.score(PROMPT[:400], decode_from=300)]
        assert best(scored) == best_of(PROMPT[:400])
        assert (scored[-1].usage.cached_tokens, rig.manager.admits[-1].blocks) == (0, b"")


async def test_others_go_on_while_a_question_is_not_answered() -> None:
    async with Rig(2, keep_from=64, chunk_rows=64, keep_replies=False) as rig:
        await rig.client.wait_ready(10)
        other, events = start(rig, PROMPT[:50], longer(900))
        await rig.until(lambda: chunks(events), "the other does not run")
        rig.manager.kept.late = []
        task, mine = start(rig, PROMPT[:400], longer(5), rewind=200)
        for at in (128 + 64, 384):  # 200 is 192; it is kept, and 384 would be too near were it not refused
            rig.manager.kept.grants = lambda _name, at: False
            await rig.until(lambda: rig.manager.kept.late, "it does not ask")
            count = len(chunks(events))
            await rig.until(lambda count=count: len(chunks(events)) > count + 20, "the other stands")
            c = find(rig, 2)
            assert c is not None
            assert (c.sent, c.keeping.ask is not None) == (at, True)
            rig.manager.answer_keep(*rig.manager.kept.late.pop())
        await task
        assert chunks(mine) == reply(PROMPT[:400], 5)
        other.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await other


# ---- what may come between -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "park"])
@pytest.mark.parametrize("stage", ["asked", "granted"])
async def test_a_state_for_one_that_leaves_before_it_is_kept_is_given_back(stage: str, how: str) -> None:
    async with Rig(2, keep_from=64, chunk_rows=64) as rig:
        await rig.client.wait_ready(10)
        rig.manager.kept.late = []
        client = Client(rig.router.address)
        events: list[Any] = []

        async def consume() -> None:
            async for event in client.generate(PROMPT[:400], longer(5), rewind=130):
                events.append(event)  # noqa: PERF401 - seen while it runs

        task = asyncio.create_task(consume())
        await rig.until(lambda: rig.manager.kept.late, "it does not ask")
        key, ask = rig.manager.kept.late.pop()
        c = find(rig, 1)
        assert c is not None
        rig.gates(False)
        other, _ = start(rig, PROMPT[:20], longer(900))
        await two_in_flight(rig)  # of the other: nothing is composed
        if stage == "granted":
            rig.manager.answer_keep(key, ask)
            await rig.until(lambda: c.keeping.ask is not None and c.keeping.ask.state, "it is not granted")
        rig.manager.kept.late = None
        if how == "cancel":
            task.cancel()
            await rig.until(lambda: find(rig, 1) is None, "the router keeps it")
        else:
            park(rig, 1)
            await rig.until(lambda: c.phase.value == "parked", "it is not parked")
        if stage == "asked":
            rig.manager.answer_keep(key, ask)
        rig.gates(True)
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await client.close()
        other.cancel()
        await rig.until(rig.at_rest, "not freed")
        assert "never kept" in rig.manager.kept.ended.values()
        if how == "park":
            assert chunks(events) == reply(PROMPT[:400], 5)
            assert (events[-1].usage.parked, events[-1].usage.cached_tokens) == (1, 0)


STAGES = {
    "admitted": lambda c: c.runs and not c.bound,
    "resuming": lambda c: c.bound and not c.answered,
    "the chunk behind": lambda c: 384 < c.sent < c.prompt_rows,
    "decoding": lambda c: c.generated,
}


@pytest.mark.parametrize("how", ["cancel", "park", "carry", "resume again", "evict"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("page_rows", [64, 256])
async def test_whatever_follows_a_resume(stage: str, how: str, page_rows: int) -> None:
    async with Rig(2, keep_from=64, chunk_rows=64, split=True, pages=80, page_rows=page_rows, lanes=3) as rig:
        await rig.client.wait_ready(10)
        await said(rig, PROMPT[:400])
        client = Client(rig.router.address)
        events: list[Any] = []

        async def consume() -> None:
            async for event in client.generate(PROMPT[:630], longer(40)):
                events.append(event)  # noqa: PERF401 - seen while it runs

        other, _ = start(rig, PROMPT[:20], longer(900))
        await rig.until(lambda: find(rig, 2) is not None and find(rig, 2).generated, "the other does not run")
        task = asyncio.create_task(consume())
        c = await stop_at(rig, 3, STAGES[stage])
        assert c.keeping.at == 384
        if stage == "admitted":
            assert rig.manager.kept.evictable() == []
        again = None
        if how == "cancel":
            task.cancel()
            await rig.until(lambda: find(rig, 3) is None, "the router keeps it")
        elif how == "park":
            park(rig, 3)
        elif how == "carry":
            rig.manager.carry(3)
        elif how == "resume again":
            again = asyncio.create_task(said(rig, PROMPT[:500]))
        else:
            rig.manager.evict(rig.manager.kept.evictable())
        rig.gates(True)
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await client.close()
        if again is not None:
            assert (await again).cached_tokens == 384
        if how != "cancel":
            assert chunks(events) == reply(PROMPT[:630], 40)
            usage = events[-1].usage
            assert (usage.cached_tokens, usage.parked, usage.carried) == (384, how == "park", how == "carry")
        other.cancel()
        with contextlib.suppress(asyncio.CancelledError, LatentPoolError):
            await other


@pytest.mark.parametrize("page_rows", [64, 256])
@pytest.mark.parametrize("late", [False, True])
async def test_a_state_is_carried_to_where_there_is_room_before_anything_is_run_behind_it(page_rows: int, late: bool) -> None:
    async with Rig(3, keep_from=64, split=True, pages=90, page_rows=page_rows, chunk_rows=64) as rig:
        await rig.client.wait_ready(10)
        await said(rig, PROMPT[:400])
        rig.manager.carries_resumed = True
        manager, held = rig.manager, []
        if late:  # the order comes when it has resumed already
            order = manager.order
            manager.order = lambda **orders: held.append(orders)
        task, events = start(rig, PROMPT[:650], longer(5))
        if late:
            await rig.until(lambda: rig.loop.counters.resumes, "it does not resume")
            await rig.until(lambda: not rig.loop._workers.in_flight, "rounds are in flight")
            c = find(rig, 2)
            assert c is not None
            assert (c.sent, c.asked_rows, c.owner) == (384, 0, 0)
            manager.order = order
            manager.order(**held.pop())
        await task
        assert chunks(events) == reply(PROMPT[:650], 5)
        usage = events[-1].usage
        assert (usage.cached_tokens, usage.carried, events[-1].owner) == (384, 1, 1)
        assert kept(rig) == [(384, HISTORY), (640, HISTORY)]


async def test_one_that_comes_back_goes_on_from_its_own_prompt() -> None:
    async with Rig(2, keep_from=64, chunk_rows=128) as rig:
        await rig.client.wait_ready(10)
        task, events = start(rig, PROMPT[:400], longer(200))
        await stop_at(rig, 1, lambda c: len(c.generated) > 40)
        park(rig, 1)
        rig.gates(True)
        await task
        assert chunks(events) == reply(PROMPT[:400], 200)
        usage = events[-1].usage
        assert (usage.parked, usage.cached_tokens) == (1, 0)  # nothing was there when it came
        counters = rig.loop.counters
        assert (counters.resumes, counters.prompt_rows) == (1, 400 + 16)
        assert counters.replayed_tokens > 40


async def test_the_manager_is_told_how_far_conversations_are() -> None:
    async with Rig(2) as rig:
        for worker in rig.workers:
            worker.pause = 0.002
        await rig.client.wait_ready(10)
        started = asyncio.get_running_loop().time()
        await said(rig, PROMPT[:100], 500)
        took = asyncio.get_running_loop().time() - started
        told = [progress for report in rig.manager.reports for progress in report.progress]
        assert 0 < len(rig.manager.reports) <= took / 0.5 + 1
        assert [progress.rows for progress in told] == sorted(progress.rows for progress in told)
        assert told[-1].decoding


# ---- all of it --------------------------------------------------------------------------------------------------------


async def disturb(rig: Rig, random: np.random.Generator) -> None:
    """Evictions, parks and carries every few rounds."""
    manager, counters, due = rig.manager, rig.loop.counters, 0
    while True:
        await asyncio.sleep(0.001)
        if counters.rounds < due:
            continue
        due = counters.rounds + int(random.integers(1, 12))
        stay = [n for n, lease in manager.pages.leases.items() if n not in manager.told | manager.idle and not lease.moving]
        states = manager.kept.evictable()
        if states and random.random() < 0.3:
            manager.evict([int(random.choice(states))])
        elif stay and random.random() < 0.2:
            park(rig, int(random.choice(stay)))
        elif stay and manager.owners > 1:
            name = int(random.choice(stay))
            owner = int(random.choice([owner for owner in range(manager.owners) if owner != manager.pages.leases[name].owner]))
            asks = manager.kept.unanswered.keys() | {g.conversation for g in manager.kept.states.values() if not g.kept}
            if name not in asks and manager.pages.spare(owner) >= len(manager.pages.leases[name].pages):
                manager.carry(name, owner)


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 9))])
async def test_a_crowd_of_chats_gets_the_replies_it_would_get_afresh(seed: int) -> None:
    """Chats of several turns, some of which begin alike, some edited, some cancelled, while everything is moved and evicted."""
    random = np.random.default_rng(seed)
    world, split = int(random.integers(1, 4)), bool(seed % 2)
    rows, page_rows = int(random.choice([64, 128, 512])), int(random.choice([64, 128]))
    pages = world * (3200 if split else 6400) // page_rows // (1 if split else world)
    async with Rig(
        world, lanes=4, pages=pages, split=split, lends=2, chunk_rows=rows, page_rows=page_rows, keep_from=64
    ) as rig:
        for worker in rig.workers:
            worker.pause, worker.breaks = 0.001, 0.003
        rig.manager.carries_resumed = split and world > 1
        rig.manager.kept.grants = lambda name, at: (name + at // 64) % 7 > 0
        await rig.client.wait_ready(10)
        cached = 0

        async def chat(i: int) -> None:
            nonlocal cached
            history = PROMPT[:200] if i % 3 else random.integers(0, 240, 150).tolist()
            for turn in range(3):
                message = random.integers(0, 240, int(random.integers(10, 120))).tolist()
                prompt, count = history + message, int(random.integers(1, 60))
                leaves = float(random.random()) * 0.5 if (i + turn) % 5 == 1 else None
                await asyncio.sleep(random.random() * 0.3)
                got: list[Any] = []
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(leaves):
                        async for event in rig.client.generate(prompt, longer(count), rewind=len(history)):
                            got.append(event)  # noqa: PERF401 - kept when it is cut short
                want = reply(prompt, count)
                assert chunks(got) == want[: len(chunks(got))]
                if got and isinstance(got[-1], router_pb2.Completion):
                    assert chunks(got) == want
                    cached += got[-1].usage.cached_tokens
                    history = prompt + [token for token in want if token < 240]  # else it is said again in other words

        disturbance = asyncio.create_task(disturb(rig, np.random.default_rng(seed + 100)))
        try:
            await asyncio.gather(*(chat(i) for i in range(10)))
        finally:
            disturbance.cancel()
        for worker in rig.workers:
            worker.breaks = 0.0
        counters = rig.loop.counters
        assert min(counters.keeps, counters.resumes, counters.forgets, counters.parked) > 0
        assert cached > 0
