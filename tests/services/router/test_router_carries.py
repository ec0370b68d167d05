"""Owners, lent pages and carries between fakes: whatever is ordered and whenever, replies are those of a conversation alone,
and every page comes back once."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest
from router_fake_model import reply
from router_fakes import Rig
from test_router_ends import chunks, start
from test_router_many import every_turn, longer

from latentpool.client import Client
from latentpool.errors import EpochError, LatentPoolError
from latentpool.v1 import pool_manager_pb2, router_pb2
from services.router import delivery
from services.router.conversations import Conversation

pytestmark = pytest.mark.timeout(60)

PROMPT = [i * 7 % 240 for i in range(300)]


def best(events: list[Any]) -> list[int]:
    return [b for part in events if isinstance(part, router_pb2.ScoredRows) for b in part.best_ids]


def best_of(prompt: list[int]) -> list[int]:
    return [reply(prompt[: n + 1], 1)[0] for n in range(len(prompt))]


def find(rig: Rig, id_: int) -> Conversation | None:
    return next((c for c in rig.loop.book if c.id == id_), None)


async def stop_at(rig: Rig, id_: int, reached: Any) -> Conversation:
    """Stops all rounds in the turn in which the conversation is there."""
    await every_turn(rig, lambda: (c := find(rig, id_)) is not None and reached(c))
    c = find(rig, id_)
    assert c is not None
    return c


async def two_in_flight(rig: Rig) -> None:
    """With all rounds stopped: nothing more is sent before they go on."""
    workers = rig.loop._workers

    def stands() -> bool:  # one rank may have answered the first of the two already
        slowest = min(worker.answered for worker in rig.workers)
        return workers.in_flight == 2 and workers.seq - slowest == 2 and all(worker.held for worker in rig.workers)

    await rig.until(stands, "rounds do not stand still")


# ---- borrowing ------------------------------------------------------------------------------------------------------


async def test_usage_counts_what_was_borrowed_and_what_was_fetched() -> None:
    async with Rig(3, pages=60, split=True, lends=2, chunk_rows=192) as rig:
        await rig.client.wait_ready(10)
        task, events = start(rig, PROMPT, longer(20))
        await task
        assert chunks(events) == reply(PROMPT, 20)
        usage = events[-1].usage
        assert (usage.borrowed_tokens, usage.fetched_tokens, usage.carried) == (128, 172, 0)
        counters = rig.loop.counters
        assert (counters.borrowed_chunks, counters.fetched_chunks, counters.recalls) == (1, 1, 0)
        assert len(rig.manager.released) == 1
        second, said = start(rig, PROMPT[:100], longer(1))
        await second
        assert (said[-1].usage.borrowed_tokens, said[-1].usage.fetched_tokens) == (100, 0)
        assert len(rig.manager.released) == 2


async def test_a_group_that_is_not_split_counts_neither() -> None:
    async with Rig(2) as rig:
        await rig.client.wait_ready(10)
        task, events = start(rig, PROMPT, longer(20))
        await task
        usage = events[-1].usage
        assert (usage.borrowed_tokens, usage.fetched_tokens, events[-1].owner) == (0, 0, 0)
        assert rig.loop.counters.borrowed_chunks == rig.loop.counters.fetched_chunks == 0


async def test_a_recall_in_the_middle_of_a_fill_turns_it_to_fetching() -> None:
    async with Rig(2, split=True, lends=5, chunk_rows=64) as rig:
        await rig.client.wait_ready(10)
        task, events = start(rig, PROMPT, longer(20))
        c = await stop_at(rig, 1, lambda c: c.sent >= 64)
        before = c.sent
        rig.manager.order(recall=[1])
        rig.gates(True)
        await task
        assert chunks(events) == reply(PROMPT, 20)
        usage = events[-1].usage
        assert before <= usage.borrowed_tokens <= before + 128  # what was composed before the order came
        assert usage.borrowed_tokens + usage.fetched_tokens == 300
        assert usage.fetched_tokens > 0
        assert rig.loop.counters.recalls == 1


async def test_one_who_waits_gets_the_pages_that_were_lent() -> None:
    async with Rig(2, split=True, pages=20, lends=5, chunk_rows=64) as rig:
        await rig.client.wait_ready(10)
        first, events = start(rig, PROMPT, longer(200))
        await stop_at(rig, 1, lambda c: c.sent >= 64)  # 6 pages of rank 0, and 5 of rank 1
        rig.manager.lends = 0
        second, said = start(rig, PROMPT[5:], longer(10))  # 6 pages
        await rig.until(lambda: any(isinstance(e, router_pb2.Waiting) and "pages" in e.reason for e in said), "it runs")
        assert [list(orders.recall) for orders in rig.manager.ordered] == [[1]]
        rig.gates(True)
        await second
        assert find(rig, 1) is not None  # the second did not wait for the first one's end
        await first
        assert chunks(events) == reply(PROMPT, 200)
        assert chunks(said) == reply(PROMPT[5:], 10)
        assert (events[-1].owner, said[-1].owner) == (0, 1)
        assert rig.loop.counters.recalls == 1


# ---- carries ----------------------------------------------------------------------------------------------------------


STAGES = {
    "bound, nothing sent": lambda c: c.bound and not c.sent,
    "filling": lambda c: c.bound and c.sent >= 128 and not c.borrowed,
    "borrowing": lambda c: c.sent >= 64 and c.borrowed,
    "decoding": lambda c: len(c.generated) > 10,
    "replaying": lambda c: c.runs and c.parked and 70 < c.sent < c.replay_rows,
    "filling again": lambda c: c.runs and c.parked and c.sent == 64,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("more", [0, 2])
async def test_a_carry_changes_no_reply_whenever_it_comes(stage: str, more: int) -> None:
    lends = 4 if stage == "borrowing" else 0
    async with Rig(2, split=True, pages=80, lends=lends, chunk_rows=64) as rig:
        for worker in rig.workers:
            worker.pause = 0.001
        await rig.client.wait_ready(10)
        rig.gates(False)  # until both are there, the first one first
        runs = [start(rig, PROMPT, longer(150))]
        await rig.until(lambda: find(rig, 1) is not None, "it does not come")
        runs.append(start(rig, PROMPT[:230], longer(150)))
        await rig.until(lambda: find(rig, 2) is not None, "the second does not come")
        rig.gates(True)
        if stage in ("replaying", "filling again"):
            await stop_at(rig, 2, lambda c: len(c.generated) > 40)
            park(rig, 2)
            rig.gates(True)
        c = await stop_at(rig, 2, STAGES[stage])
        if stage == "borrowing":
            await two_in_flight(rig)
        rig.manager.carry(2, more=more)
        owner = 1 - c.owner
        rig.gates(True)
        await asyncio.gather(*(task for task, _ in runs))
        assert chunks(runs[0][1]) == reply(PROMPT, 150)
        assert chunks(runs[1][1]) == reply(PROMPT[:230], 150)
        last = runs[1][1][-1]
        assert (last.owner, last.usage.carried, runs[0][1][-1].usage.carried) == (owner, 1, 0)
        assert rig.loop.counters.carries == 1
        assert rig.loop.counters.carried_pages == len(rig.manager.ordered[-1].carry[0].pages)
        assert rig.loop.counters.recalls == (stage == "borrowing")
        assert rig.manager.carried == rig.workers[0].lanes.carries


def park(rig: Rig, id_: int) -> None:
    rig.manager.park(id_)
    rig.manager.out.put_nowait(pool_manager_pb2.SessionResponse(extended=pool_manager_pb2.Extended(park=[id_])))


@pytest.mark.parametrize("path", ["prompt", "decode"])
@pytest.mark.parametrize("raw", [False, True])
async def test_a_score_is_carried_like_a_reply(path: str, raw: bool) -> None:
    async with Rig(2, split=True, pages=80, lends=1, chunk_rows=64) as rig:
        await rig.client.wait_ready(10)
        scored: list[Any] = []

        async def score() -> None:
            async for event in rig.client.score(PROMPT, decode_from=200, raw_logits=raw):
                scored.append(event)  # noqa: PERF401 - seen while it runs

        task = asyncio.create_task(score())
        await stop_at(rig, 1, lambda c: c.sent == 128 if path == "prompt" else c.sent > 200)
        rig.manager.carry(1)
        rig.gates(True)
        await task
        assert best(scored) == best_of(PROMPT)
        usage = scored[-1].usage
        assert (usage.carried, usage.borrowed_tokens, usage.fetched_tokens) == (1, 64, 136)


async def test_one_whose_client_does_not_read_is_carried_and_gives_back_what_it_borrows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Rig(2, split=True, pages=80, lends=5, chunk_rows=64) as rig:
        await rig.client.wait_ready(10)
        task, events = start(rig, PROMPT, longer(30))
        c = await stop_at(rig, 1, lambda c: c.sent >= 64)
        monkeypatch.setattr(delivery, "LIMIT_BYTES", -1)
        rig.manager.carry(1)
        rig.gates(True)
        await rig.until(lambda: rig.loop.counters.carries, "it is not carried")
        await rig.until(lambda: not rig.loop._workers.in_flight, "rounds are in flight")
        sent = c.sent
        assert c.stalled
        assert (c.owner, sent < 300, rig.manager.released != []) == (1, True, True)
        monkeypatch.undo()
        rig.loop.wake.set()
        await task
        assert chunks(events) == reply(PROMPT, 30)


@pytest.mark.parametrize("how", ["cancel", pytest.param("deadline", marks=pytest.mark.full), "parked"])
@pytest.mark.parametrize("stage", ["ordered", "one slice", "all slices", "borrowing"])
async def test_one_that_leaves_in_the_middle_of_a_carry_frees_both_owners_pages(
    stage: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.pace.MOST_CARRIED_ROWS", 1000 if stage == "all slices" else 64)
    async with Rig(2, split=True, pages=80, lends=5 if stage == "borrowing" else 0, chunk_rows=64) as rig:
        await rig.client.wait_ready(10)
        client = Client(rig.router.address)
        events: list[Any] = []

        async def consume() -> None:
            async for event in client.generate(PROMPT, longer(200), timeout=2.0 if how == "deadline" else None):
                events.append(event)  # noqa: PERF401 - seen while it runs

        task = asyncio.create_task(consume())
        c = await stop_at(rig, 1, lambda c: c.sent >= 64 if stage == "borrowing" else c.generated)
        if stage in ("ordered", "borrowing"):
            await two_in_flight(rig)
        rig.manager.carry(1)
        if stage in ("ordered", "borrowing"):
            await rig.until(lambda: c.carry is not None, "not ordered")
            assert c.carry.sent == 0
            assert bool(c.borrowed) == (stage == "borrowing")
        else:
            rig.gates(True)
            await every_turn(rig, lambda: c.carry is not None and c.carry.sent)
            assert c.carry.all_sent == (stage == "all slices")
        if how == "cancel":
            task.cancel()
        elif how == "parked":
            park(rig, 1)
            await rig.until(lambda: c.phase.value == "parked", "not parked")
            rig.gates(True)
        await rig.until(lambda: find(rig, 1) is None, "the router keeps it", 20.0)
        rig.gates(True)
        with contextlib.suppress(asyncio.CancelledError, LatentPoolError):
            await task
        await client.close()
        said = chunks(events)
        assert said == reply(PROMPT, len(said))
        assert rig.loop.counters.carries == 0
        if how == "parked":
            assert len(said) == 200
            assert (events[-1].usage.parked, events[-1].usage.carried) == (1, 0)


async def test_where_the_owner_runs_dry_and_another_has_room_nobody_is_parked() -> None:
    async with Rig(2, lanes=3, split=True, pages=32, lends=3) as rig:
        for worker in rig.workers:
            worker.pause = 0.001
        await rig.client.wait_ready(10)
        asked = [(PROMPT[:100], 700), (PROMPT, 40), (PROMPT[:102], 600)]
        runs = []
        for prompt, count in asked:  # of ranks 0, 1 and 0, where two want 13 + 11 of 16 pages; the second is short
            runs.append(start(rig, prompt, longer(count)))
            await rig.until(lambda events=runs[-1][1]: chunks(events), "it does not run")
        assert [rig.manager.pages.leases[name].owner for name in (1, 2, 3)] == [0, 1, 0]
        await asyncio.gather(*(task for task, _ in runs))
        for (prompt, count), (_, events) in zip(asked, runs, strict=True):
            assert chunks(events) == reply(prompt, count)
        counters = rig.loop.counters
        assert counters.carries > 0
        assert counters.parked == 0
        assert sum(events[-1].usage.carried for _, events in runs) == counters.carries


async def test_rows_that_differ_after_a_carry_end_the_epoch_by_name() -> None:
    async with Rig(3, split=True, pages=60) as rig:
        await rig.client.wait_ready(10)
        task, _ = start(rig, PROMPT, longer(200))
        await stop_at(rig, 1, lambda c: len(c.generated) > 3)
        await two_in_flight(rig)
        rig.manager.carry(1, owner=2)
        await rig.until(lambda: rig.loop.book.seated[0].carry is not None, "not ordered")
        worker = rig.workers[2]
        worker.stale = rig.loop._workers.seq + 1
        rig.gates(True)
        with pytest.raises(EpochError, match=r"operation 1 \(carry\): rank 2 holds other rows than rank 0"):
            await task
        error = await rig.router.ended()
        assert rig.manager.mismatches == [str(error)]
        assert rig.manager.carried == []


# ---- all of it ----------------------------------------------------------------------------------------------------------


async def disturb(rig: Rig, random: np.random.Generator) -> None:
    """Orders of every kind every few rounds, each one that a manager may give."""
    manager, counters, due = rig.manager, rig.loop.counters, 0
    while True:
        await asyncio.sleep(0.001)
        if counters.rounds < due:
            continue
        due = counters.rounds + int(random.integers(1, 5))
        leases = {name: lease for name, lease in manager.pages.leases.items() if name not in manager.told}
        borrowers = [name for name, lease in leases.items() if lease.borrowed and not lease.recalled]
        stay = [name for name, lease in leases.items() if not lease.moving]
        if borrowers and random.random() < 0.3:
            manager.order(recall=[int(random.choice(borrowers))])
        elif stay and random.random() < 0.05:
            park(rig, int(random.choice(stay)))
        elif stay:
            name, more = int(random.choice(stay)), int(random.integers(0, 3))
            owner = int(random.choice([owner for owner in range(manager.owners) if owner != leases[name].owner]))
            if manager.pages.spare(owner) >= len(leases[name].pages) + more:
                manager.carry(name, owner, more)


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 9))])
async def test_a_crowd_that_is_moved_about_gets_its_replies_and_every_page_comes_back_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(seed)
    world = int(random.integers(2, 5))
    monkeypatch.setattr("services.router.pace.MOST_CARRIED_ROWS", int(random.choice([64, 192, 4096])))
    rows = int(random.choice([64, 128]))
    async with Rig(world, lanes=4, pages=16 * world, split=True, lends=int(random.integers(1, 6)), chunk_rows=rows) as rig:
        for worker in rig.workers:
            worker.pause, worker.breaks = 0.001, 0.005
        await rig.client.wait_ready(10)
        done: list[Any] = []

        async def one(i: int) -> None:
            prompt = random.integers(0, 240, random.integers(2, 500)).tolist()
            count = int(random.integers(1, 150))
            leaves = float(random.random()) * 0.8 if i % 4 == 1 else None
            await asyncio.sleep(random.random() * 0.8)
            got: list[Any] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(leaves):
                    calls = rig.client.generate(prompt, longer(count))
                    async for event in rig.client.score(prompt, decode_from=1 + len(prompt) // 2) if i % 6 == 0 else calls:
                        got.append(event)  # noqa: PERF401 - kept when it is cut short
            want = best_of(prompt) if i % 6 == 0 else reply(prompt, count)
            have = best(got) if i % 6 == 0 else chunks(got)
            assert have == want[: len(have)]
            if got and isinstance(got[-1], router_pb2.Completion):
                assert have == want
                done.append(got[-1])

        disturbance = asyncio.create_task(disturb(rig, np.random.default_rng(seed + 100)))
        try:
            await asyncio.gather(*(one(i) for i in range(32)))
        finally:
            disturbance.cancel()
        for worker in rig.workers:
            worker.breaks = 0.0
        counters = rig.loop.counters
        assert min(counters.carries, counters.recalls, counters.parked, counters.borrowed_chunks, counters.fetched_chunks) > 0
        assert len(done) >= 24
        assert sum(completion.usage.carried for completion in done) <= counters.carries
        assert counters.replayed_tokens > 0
