"""E3 of the exactness contract on whole groups: prompts that go on from kept states get the replies that they get afresh.

`long_kpool16` is the model: rows past position 79 drop tokens in selection. Conversations are traces of turns as agents and
people make them: long shared beginnings, replies that become history, edited last messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from many import CONTEXT, GEOMETRY, MODEL, Record, cap_pages, carry_any, park_any, settled_but_kept, workers_of

from latentpool.cli.group import LocalGroup
from latentpool.client import AdminClient
from latentpool.errors import NotServedError
from latentpool.sampling import Sampling
from latentpool.v1 import pool_admin_pb2, pool_manager_pb2, router_pb2
from services.router.counters import Counters

pytestmark = pytest.mark.timeout(600)

FULL = pytest.mark.full
PAGE_ROWS = 128
KEEP_FROM = 64


@dataclass(frozen=True)
class Turn:
    """A prompt that ends with a message from `rewind` on."""

    prompt: tuple[int, ...]
    seed: int
    rewind: int
    max_tokens: int = 24

    @property
    def sampling(self) -> Sampling:
        stops = GEOMETRY.image_ids  # which no prompt may hold, and a reply becomes part of the next one
        return Sampling(temperature=0.8, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=True, stop_token_ids=stops)


@dataclass
class Reply:
    ids: list[int] = field(default_factory=list)
    completion: router_pb2.Completion | None = None

    @property
    def cached(self) -> int:
        assert self.completion is not None
        return self.completion.usage.cached_tokens


def tokens(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(240) for _ in range(count))


async def say(group: LocalGroup, turn: Turn, leaves: int | None = None) -> Reply:
    reply = Reply()
    stream = group.client.generate(list(turn.prompt), turn.sampling, rewind=turn.rewind)
    async with contextlib.aclosing(stream) as events:
        async for event in events:
            if isinstance(event, router_pb2.Chunk):
                reply.ids += event.token_ids
                if leaves is not None and len(reply.ids) >= leaves:
                    break
            elif isinstance(event, router_pb2.Completion):
                reply.completion = event
    return reply


async def kept(group: LocalGroup) -> list[pool_admin_pb2.KeptInfo]:
    async with AdminClient(group.manager.address) as admin:
        return list((await admin.list_kept()).kept)


async def reply_is_kept(group: LocalGroup, at: int) -> None:
    """Waits until idle time has kept a reply's end."""
    for _ in range(200):
        if any(state.at == at and state.mark == pool_manager_pb2.MARK_REPLY for state in await kept(group)):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"no state of {at} tokens was kept: {await kept(group)}")


@contextlib.asynccontextmanager
async def group_of(
    world: int, *, pages: int = 0, dtype: Any = "f32", kv_cache: Any = "f32", **settings: Any
) -> AsyncIterator[tuple[LocalGroup, Record]]:
    """pages: of each owner, or of the pool where every rank keeps all."""
    with pytest.MonkeyPatch.context() as patch:
        record = Record(patch)
        if pages:
            cap_pages(patch, pages * (world if settings.get("split") == "on" else 1))
        base: dict[str, Any] = {"context": CONTEXT, "page_rows": PAGE_ROWS, "kv_pages": "on", "parallel": 6, "audit": True}
        base |= {"keep_from": KEEP_FROM, "carry_from": 128, "dtype": dtype, "kv_cache": kv_cache}
        async with LocalGroup(MODEL, world, **(base | settings)) as group:
            yield group, record


Rows = dict[tuple[int, int, int], bytes]
_fresh: dict[Any, tuple[dict[Turn, Reply], Rows]] = {}


class Fresh:
    """What each turn is answered where nothing is kept: computed once a turn, in a group of one lane."""

    def __init__(self, world: int, dtype: str = "f32", kv_cache: str = "f32") -> None:
        self.replies, self.rows = _fresh.setdefault((world, dtype, kv_cache), ({}, {}))
        self._arguments = (world, dtype, kv_cache)

    async def compute(self, chats: list[Chat]) -> None:
        """Plays chats turn by turn; their later prompts hold the replies to the earlier ones."""
        world, dtype, kv_cache = self._arguments
        settings: dict[str, Any] = {"split": "off", "parallel": 1, "cache_bytes": 0}
        async with group_of(world, dtype=dtype, kv_cache=kv_cache, **settings) as (group, record):
            for chat in chats:
                while (turn := chat.next()) is not None:
                    if turn not in self.replies:
                        self.replies[turn] = await say(group, turn)
                    assert self.replies[turn].cached == 0
                    chat.hear(self.replies[turn].ids)
            self.rows |= record.rows

    def check(self, turn: Turn, reply: Reply) -> None:
        fresh = self.replies[turn]
        assert reply.ids == fresh.ids[: len(reply.ids)]
        if reply.completion is not None:
            assert fresh.completion is not None
            assert reply.ids == fresh.ids
            assert reply.completion.receipt == fresh.completion.receipt

    def check_rows(self, record: Record) -> None:
        assert [key for key, bits in record.rows.items() if key in self.rows and self.rows[key] != bits] == []
        assert record.rows.keys() & self.rows.keys()


class Chat:
    """A conversation of several turns. edits: turns whose message is asked first in another wording, as who edits it would."""

    def __init__(self, seed: int, system: tuple[int, ...], turns: int, length: int = 60, edits: tuple[int, ...] = ()) -> None:
        self._chance = random.Random(seed)
        self._seed = 1000 * seed
        self._history = system
        self._left = turns
        self._length = length
        self._edits = edits
        self._turn: Turn | None = None
        self._asked = 0
        self._edited = False

    def next(self) -> Turn | None:
        if not self._left:
            return None
        message = tokens(self._chance, self._chance.randint(self._length // 2, self._length))
        self._turn = Turn(self._history + message, self._seed + self._asked, len(self._history))
        self._asked += 1
        return self._turn

    def hear(self, reply: list[int]) -> None:
        assert self._turn is not None
        turn = self._asked - 1
        if turn in self._edits and not self._edited:
            self._edited = True  # the same place again, in other words
            return
        self._edited = False
        self._left -= 1
        self._history = self._turn.prompt + tuple(token for token in reply if token not in GEOMETRY.image_ids)


GROUPS = [
    (1, {}),
    (2, {"split": "off"}),
    (2, {"split": "on"}),
    pytest.param(3, {"split": "off"}, marks=FULL),
    pytest.param(3, {"split": "on"}, marks=FULL),
]


@pytest.mark.parametrize(("world", "split"), GROUPS)
async def test_chats_of_many_turns_with_edits(world: int, split: dict[str, Any]) -> None:
    """Every turn but the first goes on from the end of the last reply, which idle time has kept; an edited one from just before
    the message."""

    def chats() -> list[Chat]:
        return [Chat(seed, tokens(random.Random(seed), 150), 4, edits=(2,)) for seed in (1, 2)]

    fresh = Fresh(world)
    await fresh.compute(chats())
    async with group_of(world, **split) as (group, record):
        for chat in chats():
            last: tuple[Turn, Reply] | None = None
            while (turn := chat.next()) is not None:
                reply = await say(group, turn)
                fresh.check(turn, reply)
                if last is not None:
                    before = len(last[0].prompt) + len(last[1].ids) - 1
                    edited = turn.rewind < before
                    # the end of the reply, or where the edited message begins; marks near others are dropped
                    assert reply.cached >= (turn.rewind if edited else before) // 64 * 64 - 256
                    assert reply.cached > 0
                chat.hear(reply.ids)
                last = turn, reply
                total = (len(turn.prompt) + len(reply.ids)) // 64 * 64
                await idle(group)
                if total - reply.cached >= 256 + 64:
                    await reply_is_kept(group, total)
        fresh.check_rows(record)
        counters = workers_of(group).counters
        assert counters.resumes >= 6
        assert counters.keeps > 0
        await settled_but_kept(group)


async def idle(group: LocalGroup) -> None:
    """Waits until nothing runs, idle conversations included."""
    async with AdminClient(group.manager.address) as admin:
        for _ in range(400):
            await asyncio.sleep(0.02)
            if not await admin.list_conversations():
                return
    raise AssertionError("conversations do not end")


@pytest.mark.parametrize(("world", "split"), GROUPS)
async def test_six_agents_share_a_system_prompt(world: int, split: dict[str, Any]) -> None:
    """The first computes it; the second finds out where they part and keeps it; those after it resume there."""
    system = tokens(random.Random(9), 500)
    chats = [Chat(10 + agent, system, 1) for agent in range(6)]
    fresh = Fresh(world)
    await fresh.compute([Chat(10 + agent, system, 1) for agent in range(6)])
    async with group_of(world, **split) as (group, record):
        turns = [turn for chat in chats if (turn := chat.next()) is not None]
        replies = [await say(group, turns[0]), await say(group, turns[1])]
        replies += await asyncio.gather(*(say(group, turn) for turn in turns[2:]))
        for turn, reply in zip(turns, replies, strict=True):
            fresh.check(turn, reply)
        assert [reply.cached for reply in replies[2:]] == [448] * 4
        fresh.check_rows(record)


def quiet() -> Chat:
    return Chat(99, tokens(random.Random(99), 90), 3)


async def one_alone_resumes(group: LocalGroup, fresh: Fresh) -> None:
    """Whatever the others left: who has the group for himself goes on from what he said."""
    chat = quiet()
    cached = []
    while (turn := chat.next()) is not None:
        reply = await say(group, turn)
        fresh.check(turn, reply)
        cached.append(reply.cached)
        chat.hear(reply.ids)
        await idle(group)
    assert cached[0] == 0
    assert min(cached[1:]) > 0, cached


@dataclass(frozen=True)
class Trouble:
    """What disturbs a group whose conversations resume."""

    settings: dict[str, Any]
    took: Callable[[Counters], bool]
    pages: int = 0
    disturb: Callable[[LocalGroup], Awaitable[None]] | None = None
    leaves: bool = False
    evicts: bool = False


async def evict_one(group: LocalGroup, chance: random.Random) -> None:
    """Any state that nobody is about to resume."""
    async with AdminClient(group.manager.address) as admin:
        states = [info.state for info in (await admin.list_kept()).kept if not info.pinned]
        if states:
            with contextlib.suppress(NotServedError):  # somebody resumes it since
                await admin.evict([chance.choice(states)])


TROUBLES = {
    "evictions": Trouble({}, lambda c: c.forgets > 3 and c.resumes > 0, evicts=True),
    "parks": Trouble({}, lambda c: c.parked > 3 and c.resumes > 0, disturb=park_any),
    "carries": Trouble({"split": "on"}, lambda c: c.carries > 2 and c.resumes > 0, disturb=carry_any),
    # who comes first decides whether a state is still there when its chat goes on; one that is alone finds its own
    "a small budget": Trouble({"cache_bytes": 5 * 128 * 160}, lambda c: c.forgets > 0),  # some five pages
    "a small pool": Trouble({"headroom": 16, "parallel": 3}, lambda c: c.keeps > 0, pages=15),
    "cancels": Trouble({}, lambda c: c.resumes > 3, leaves=True),
}


@pytest.mark.parametrize(
    ("world", "split", "dtype", "kv_cache"),
    [
        (2, "on", "f32", "f32"),
        pytest.param(1, "off", "f32", "bf16", marks=FULL),
        pytest.param(2, "off", "bf16", "bf16", marks=FULL),
        pytest.param(3, "on", "f32", "bf16", marks=FULL),
        pytest.param(3, "off", "f32", "f32", marks=FULL),
    ],
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=FULL if name in ("parks", "cancels") else ()) for name in TROUBLES])
async def test_resumed_prompts_in_trouble(name: str, world: int, split: Any, dtype: Any, kv_cache: Any) -> None:
    """Six chats at once, three of which share their beginning; resumes followed by whatever may follow."""
    trouble = TROUBLES[name]
    if trouble.settings.get("split") == "on" and split == "off":
        pytest.skip("nothing is carried where every rank keeps every row")
    shared = tokens(random.Random(21), 300)

    def chats() -> list[Chat]:
        return [
            Chat(30 + i, shared if i % 2 else tokens(random.Random(40 + i), 100 + 90 * i), 3, edits=(1,) if i == 2 else ())
            for i in range(6)
        ]

    fresh = Fresh(world, dtype, kv_cache)
    await fresh.compute([*chats(), quiet()])
    cached, chance = 0, random.Random(6)

    async def converse(group: LocalGroup, chat: Chat) -> None:
        nonlocal cached
        while (turn := chat.next()) is not None:
            if trouble.leaves:
                fresh.check(turn, await say(group, turn, leaves=2))
                both = await asyncio.gather(say(group, turn), say(group, turn))  # the same state twice at once
                fresh.check(turn, both[1])
                reply = both[0]
            else:
                reply = await say(group, turn)
            fresh.check(turn, reply)
            cached += reply.cached
            chat.hear(reply.ids)
            if trouble.evicts and chance.random() < 0.5:
                await evict_one(group, chance)

    settings = {"split": split, "dtype": dtype, "kv_cache": kv_cache} | trouble.settings
    async with group_of(world, pages=trouble.pages, **settings) as (group, record):
        disturbance = asyncio.create_task(trouble.disturb(group)) if trouble.disturb else None
        try:
            await asyncio.gather(*(converse(group, chat) for chat in chats()))
        finally:
            if disturbance is not None:
                disturbance.cancel()
                await asyncio.gather(disturbance, return_exceptions=True)
        await idle(group)
        await one_alone_resumes(group, fresh)
        counters = workers_of(group).counters
        assert counters.resumes >= 2
        assert cached <= counters.resumed_tokens
        assert trouble.took(counters), counters
        fresh.check_rows(record)
        await settled_but_kept(group)
