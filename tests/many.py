"""Many conversations against a whole group: scripts, and a record of every logits row that a token was drawn from.

Every conversation has a seed of its own, so (seed, position) names a row: runs are compared row by row, bit by bit, and a row
computed twice in one run (after parking) must be equal to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from harness import oracle

import services.pool_manager.service as pool_manager
from latentpool.cli.group import LocalGroup
from latentpool.client import AdminClient
from latentpool.errors import LatentPoolError
from latentpool.geometry import Geometry
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2
from services.rank_worker.sample import Draws, Sampler
from services.router.workers import Workers

MODEL, _ = oracle("long_kpool16")
GEOMETRY = Geometry.from_file(MODEL)
CONTEXT = 1728
PAGE_ROWS = 64


@dataclass(frozen=True)
class Script:
    """One conversation. arrives: seconds after the start. leaves: chunks after which its client cancels. pause: seconds its
    client waits between reads."""

    prompt: tuple[int, ...]
    sampling: Sampling
    arrives: float = 0.0
    leaves: int | None = None
    pause: float = 0.0
    background: bool = False

    @property
    def seed(self) -> int:
        assert self.sampling.seed is not None
        return self.sampling.seed


def scripts(count: int, seed: int = 7, spread: float = 2.0, quick: bool = False) -> list[Script]:
    """Prompts of 1 to 1,500 tokens, most of them short; every way to sample; some cancel, some read slowly."""
    chance = random.Random(seed)
    made = []
    for i in range(count):
        length = chance.choice([1, 2, 3, 63, 64, 65, chance.randint(4, 200), chance.randint(100, 400)])
        if i % 4 == 0:  # short prompts with long replies, which outgrow their quota together
            length = chance.randint(1, 65)
        if i % 8 == 5:
            length = chance.choice([1500, 1100, chance.randint(600, 1400)]) if not quick else chance.randint(300, 700)
        made.append(
            Script(
                prompt=tuple(chance.randrange(240) for _ in range(length)),
                sampling=Sampling(
                    temperature=chance.choice([0.0, 0.7, 1.2]),
                    top_k=chance.choice([0, 0, 5, 40]),
                    top_p=chance.choice([1.0, 1.0, 0.9]),
                    min_p=chance.choice([0.0, 0.0, 0.05]),
                    seed=1000 * seed + i,
                    max_tokens=chance.randint(1, 60) if i % 4 else chance.randint(120, 220),
                    ignore_eos=i % 4 == 0 or chance.random() < 0.5,
                    stop_token_ids=tuple(chance.sample(range(240), 6)) if i % 4 else (),
                    log_probs=chance.choice([None, 0, 5]),
                ),
                arrives=chance.random() * spread,
                leaves=chance.randint(1, 5) if i % 7 == 3 else None,
                pause=0.02 if i % 9 == 4 else 0.0,
                background=i % 5 == 2,
            )
        )
    return made


@dataclass
class Reply:
    ids: list[int]
    log_probs: list[tuple[float, tuple[int, ...], tuple[float, ...]]]
    completion: router_pb2.Completion | None = None
    filled: int = 0


class Record:
    """Logits rows by (rank, seed, position)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[int, int, int], bytes] = {}
        self.again = 0
        sample = Sampler.sample

        def recorded(sampler: Sampler, logits: Any, draws: Draws) -> Any:
            rank = sampler._link.exchange.rank
            for row, seed, position in zip(np.array(logits), draws.seed, draws.position, strict=True):
                key, bits = (rank, int(seed), int(position)), row.tobytes()
                self.again += key in self.rows
                assert self.rows.setdefault(key, bits) == bits, f"another row when computed again: {key}"
            return sample(sampler, logits, draws)

        monkeypatch.setattr(Sampler, "sample", recorded)


def cap_pages(monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """Plans give exactly so many pages, whatever room there is."""
    choose = pool_manager.choose

    def capped(*arguments: Any, **named: Any) -> Any:
        return dataclasses.replace(choose(*arguments, **named), pages=pages, stream_pages=pages)

    monkeypatch.setattr(pool_manager, "choose", capped)


async def play(group: LocalGroup, script: Script) -> Reply:
    """One conversation from its arrival to its end; a client that leaves closes its stream."""
    await asyncio.sleep(script.arrives)
    reply, chunks = Reply([], []), 0
    stream = group.client.generate(list(script.prompt), script.sampling, background=script.background)
    try:
        async for event in stream:
            if isinstance(event, router_pb2.Filling):
                assert event.tokens_total == len(script.prompt)
                reply.filled = max(reply.filled, event.tokens_done)
            elif isinstance(event, router_pb2.Chunk):
                assert event.first_index == len(reply.ids)
                reply.ids += event.token_ids
                reply.log_probs += [(p.log_prob, tuple(p.top_ids), tuple(p.top_log_probs)) for p in event.log_probs]
                chunks += 1
                await asyncio.sleep(script.pause)
                if chunks == script.leaves:
                    break
            elif isinstance(event, router_pb2.Completion):
                reply.completion = event
    finally:
        await stream.aclose()
    return reply


async def play_all(
    group: LocalGroup, scripts: Sequence[Script], meanwhile: Callable[[], Any] | None = None
) -> dict[int, Reply]:
    """All conversations at once, by seed; `meanwhile` is a coroutine function that disturbs the group until they are done."""
    disturbance = asyncio.create_task(meanwhile()) if meanwhile else None
    try:
        replies = await asyncio.gather(*(play(group, script) for script in scripts))
    finally:
        if disturbance is not None:
            disturbance.cancel()
            await asyncio.gather(disturbance, return_exceptions=True)
    return {script.seed: reply for script, reply in zip(scripts, replies, strict=True)}


async def carry_any(group: LocalGroup) -> None:
    """One conversation after another is moved by hand, to any rank."""
    chance = random.Random(3)
    async with AdminClient(group.manager.address) as admin:
        while True:
            await asyncio.sleep(0.03)
            for info in await admin.list_conversations():
                if chance.random() < 0.5:
                    with contextlib.suppress(LatentPoolError):  # it has ended, is there, or the rank is full
                        await admin.carry(info.conversation, chance.randrange(len(group.workers)))


async def park_any(group: LocalGroup) -> None:
    """One conversation after another is told to give its pages to others, each at most twice: it must get on in between."""
    chance, told = random.Random(4), Counter[int]()
    while True:
        await asyncio.sleep(0.1)
        session = group.manager._router.session  # type: ignore[union-attr]
        assert session is not None
        leases = session.leases
        names = [name for name, lease in leases.running.items() if name not in leases.parking and not lease.move]
        if some := [name for name in names if told[name] < 2]:
            told[name := chance.choice(some)] += 1
            leases.park(name)
            session._order()


def same(reply: Reply, alone: Reply, script: Script) -> None:
    """A whole reply equals the one alone; a cancelled one is its beginning."""
    count = len(reply.ids)
    assert reply.ids == alone.ids[:count]
    assert reply.log_probs == alone.log_probs[: len(reply.log_probs)]
    if script.leaves is None:
        assert reply.completion is not None
        assert alone.completion is not None
        assert count == len(alone.ids)
        assert reply.completion.receipt == alone.completion.receipt
        assert reply.completion.finish_reason == alone.completion.finish_reason


def workers_of(group: LocalGroup) -> Workers:
    """The router's hold on the ranks: its counters, and streams that tests break."""
    router = group.router
    assert router._group is not None
    assert router._group._loop is not None
    return router._group._loop._workers


async def settled(group: LocalGroup) -> None:
    """Everything came back: no conversation, every page free, the books whole."""
    async with AdminClient(group.manager.address) as admin:
        for _ in range(100):
            pages = await admin.list_pages()
            if pages.free == pages.pages:
                break
            await asyncio.sleep(0.05)
        assert pages.free == pages.pages
        assert pages.reserved == 0
        assert await admin.list_conversations() == []
        assert await admin.check_integrity() == []


async def settled_but_kept(group: LocalGroup) -> None:
    """Everything came back but what kept states hold; and that too once they are evicted."""
    async with AdminClient(group.manager.address) as admin:
        for _ in range(200):
            if not await admin.list_conversations():
                break
            await asyncio.sleep(0.05)
        assert await admin.list_conversations() == []
        assert await admin.check_integrity() == []
        await admin.evict([])
        assert list((await admin.list_kept()).kept) == []
    await settled(group)
