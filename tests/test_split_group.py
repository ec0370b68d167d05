"""E1 of the exactness contract on whole groups: a split pool = a replicated one = windows, whatever is borrowed, fetched,
recalled, carried or parked.

`long_kpool16` is the model: rows past position 79 drop tokens in selection, so most rows of the long prompts are sparse.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recording_engine
from many import (
    CONTEXT,
    GEOMETRY,
    MODEL,
    PAGE_ROWS,
    Record,
    Reply,
    Script,
    cap_pages,
    carry_any,
    park_any,
    play,
    play_all,
    same,
    scripts,
    settled,
    workers_of,
)

from kernels.numpy import NumpyKernels
from latentpool.cli.group import LocalGroup
from latentpool.client import AdminClient
from latentpool.errors import EpochError, LatentPoolError
from latentpool.sampling import Sampling
from latentpool.v1 import pool_admin_pb2, router_pb2
from services.pool_manager import relief
from services.pool_manager.leases import Leases
from services.rank_worker.arena import Arena
from services.rank_worker.split.fetch import FetchedRows, Part, least_staging_rows
from services.rank_worker.split.rows import HereRows
from services.router.counters import Counters

pytestmark = pytest.mark.timeout(600)

Rows = dict[tuple[int, int, int], bytes]
Disturb = Callable[[LocalGroup], Awaitable[None]]
WINDOW = -(-CONTEXT // PAGE_ROWS) + 1
DENSE = GEOMETRY.list_length
"""Rows from here on are sparse."""


# ---- disturbances ----------------------------------------------------------------------------------------------------


async def recall_all(group: LocalGroup) -> None:
    """Whoever borrows is told to return it, again and again."""
    while True:
        await asyncio.sleep(0.02)
        session = group.manager._router.session  # type: ignore[union-attr]
        assert session is not None
        for conversation, lease in session.leases.running.items():
            if lease.borrowed and not lease.recalled:
                session.leases.recall(conversation)
        session._order()


@dataclass(frozen=True)
class Mode:
    """How a group runs the script. owned: latent pages of each rank in split modes. took: whether it did what it is for."""

    settings: dict[str, Any]
    took: Callable[[Counters, list[Reply]], bool]
    owned: int = 0
    disturb: Disturb | None = None
    patches: dict[str, Any] = field(default_factory=dict)


def sparse(replies: list[Reply], what: str) -> bool:
    """Whether a prompt with sparse rows was computed so."""
    return any(
        reply.completion and reply.completion.usage.prompt_tokens > DENSE + 64 and getattr(reply.completion.usage, what) > DENSE
        for reply in replies
    )


_parts: list[int] = []


def _counted(rows: slice, *others: Any) -> Part:
    """Part, with its rows counted: below 64 where a block of a prompt was cut."""
    _parts.append(rows.stop - rows.start)
    return Part(rows, *others)


ROOMY: dict[str, Any] = {"split": "on", "parallel": 8, "chunk_rows": 128}
MODES: dict[str, Mode] = {
    "replicated": Mode({"split": "off", "kv_pages": "on", "parallel": 8, "chunk_rows": 128}, lambda c, _: c.rounds > 0),
    "windows": Mode({"split": "off", "kv_pages": "off", "parallel": 8, "chunk_rows": 128}, lambda c, _: c.rounds > 0),
    "borrowing": Mode(ROOMY, lambda c, r: c.fetched_chunks == 0 and sparse(r, "borrowed_tokens"), owned=300),
    "fetching": Mode(ROOMY | {"borrow": False}, lambda c, r: c.borrowed_chunks == 0 and sparse(r, "fetched_tokens"), owned=300),
    "tiny staging": Mode(
        ROOMY | {"borrow": False, "staging_rows": least_staging_rows(GEOMETRY), "chunk_rows": 192},
        lambda c, r: sparse(r, "fetched_tokens") and min(_parts) < 64,
        owned=300,
        patches={"services.rank_worker.split.fetch.PIECE_ROWS": 50, "services.rank_worker.split.fetch.Part": _counted},
    ),
    "recalls": Mode(
        ROOMY | {"chunk_rows": 64},
        lambda c, r: c.recalls > 3 and c.borrowed_chunks > 0 and sparse(r, "fetched_tokens"),
        owned=300,
        disturb=recall_all,
    ),
    "carries": Mode(
        ROOMY,
        lambda c, r: c.carries > 5 and any(reply.completion and reply.completion.usage.carried > 1 for reply in r),
        owned=300,
        disturb=carry_any,
    ),
    "parks": Mode(ROOMY, lambda c, _: c.parked > 5 and c.replayed_tokens > 0, owned=300, disturb=park_any),
}


# ---- runs ------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def recorded(
    world: int, directory: Path, mode: Mode, kv_cache: str, transport: str
) -> AsyncIterator[tuple[LocalGroup, Callable[[], Rows]]]:
    """A group in this mode, and afterwards the rows that its tokens were drawn from."""
    with pytest.MonkeyPatch.context() as patch:
        if mode.owned:
            cap_pages(patch, mode.owned * world)
        for name, value in mode.patches.items():
            patch.setattr(name, value)
        settings: dict[str, Any] = {"dtype": "f32", "kv_cache": kv_cache, "context": CONTEXT, "page_rows": PAGE_ROWS}
        settings |= {"audit": True, "transport": transport} | mode.settings
        if transport == "ucx":
            patch.setenv(recording_engine.RECORD_DIRECTORY, str(directory))
            patch.setenv("PYTHONPATH", str(Path(__file__).parent))
            settings["engines"] = dict.fromkeys(range(world), "recording_engine")
            rows = lambda: recording_engine.read(directory)  # noqa: E731
        else:
            record = Record(patch)
            rows = lambda: record.rows  # noqa: E731
        async with LocalGroup(MODEL, world, **settings) as group:
            yield group, rows


@cache
def conversations(count: int) -> list[Script]:
    return scripts(count, seed=5, spread=1.0, quick=count < 40)


_references: dict[tuple[int, str, int], tuple[dict[int, Reply], Rows]] = {}


async def reference(world: int, kv_cache: str, count: int, directory: Path) -> tuple[dict[int, Reply], Rows]:
    """Each conversation alone, in a window that every rank keeps."""
    key = (world, kv_cache, count)
    if key not in _references:
        alone = Mode({"split": "off", "kv_pages": "off"}, lambda *_: True)
        async with recorded(world, directory, alone, kv_cache, "inproc") as (group, rows):
            replies = {s.seed: await play(group, Script(s.prompt, s.sampling)) for s in conversations(count)}
            _references[key] = replies, rows()
    return _references[key]


async def compared(world: int, name: str, kv_cache: str, count: int, directory: Path, transport: str = "inproc") -> None:
    mode, some = MODES[name], conversations(count)
    expected = await reference(world, kv_cache, count, directory)
    async with recorded(world, directory, mode, kv_cache, transport) as (group, rows):
        replies, counters = await played(group, mode, some)
    equal(some, replies, rows(), *expected)
    assert mode.took(counters, list(replies.values())), counters


async def played(group: LocalGroup, mode: Mode, some: list[Script]) -> tuple[dict[int, Reply], Counters]:
    disturb = mode.disturb
    replies = await play_all(group, some, (lambda: disturb(group)) if disturb else None)
    await settled(group)
    return replies, workers_of(group).counters


def equal(some: list[Script], replies: dict[int, Reply], rows: Rows, expected: dict[int, Reply], expected_rows: Rows) -> None:
    for script in some:
        same(replies[script.seed], expected[script.seed], script)
    assert [key for key, bits in rows.items() if key in expected_rows and expected_rows[key] != bits] == []
    assert len(rows.keys() & expected_rows.keys()) > len(some)


FULL = pytest.mark.full
KV = ["f32", "bf16"]


@pytest.mark.parametrize("name", ["borrowing", "tiny staging", "carries"])
async def test_a_sample_of_modes(name: str, tmp_path: Path) -> None:
    await compared(2, name, "bf16" if name == "carries" else "f32", 12, tmp_path)


@FULL
@pytest.mark.parametrize("kv_cache", KV)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", MODES)
async def test_forty_conversations_in_every_mode(world: int, name: str, kv_cache: str, tmp_path: Path) -> None:
    await compared(world, name, kv_cache, 40, tmp_path)


@FULL
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["replicated", "windows", "borrowing", "fetching", "recalls", "carries", "parks"])
async def test_forty_conversations_over_ucx(world: int, name: str, tmp_path: Path) -> None:
    mode = MODES[name]
    assert not any("rank_worker" in patch for patch in mode.patches)  # engines are other processes
    await compared(world, name, "f32", 40, tmp_path, "ucx")


async def crowd_rank_0(group: LocalGroup) -> None:
    """Everybody who fits is moved to rank 0, once: then it runs dry, and others have room."""
    async with AdminClient(group.manager.address) as admin:
        running: list[pool_admin_pb2.ConversationInfo] = []
        for _ in range(500):
            await asyncio.sleep(0.02)
            running = await admin.list_conversations()
            if len(running) >= 5:
                break
        for info in running:
            with contextlib.suppress(LatentPoolError):
                await admin.carry(info.conversation, 0)
        await asyncio.Event().wait()


@FULL
@pytest.mark.parametrize("crowded", [True, False])
@pytest.mark.parametrize("world", [2, 3])
async def test_owners_that_run_dry_carry_or_park(
    world: int, crowded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies outgrow their quotas together, with one window's pages for each owner. Where they crowd one rank the others take
    some over; where there are too many for all ranks somebody parks."""
    moves, next_move = [], relief._next_move

    def counted(leases: Leases, owner: int) -> tuple[int, int] | None:
        moves.append(move := next_move(leases, owner))
        return move

    monkeypatch.setattr(relief, "_next_move", counted)
    some = [
        Script(tuple((7 * i + 3 * j) % 240 for j in range(90 + i)), Sampling(seed=i, max_tokens=280, ignore_eos=True))
        for i in range(8 if crowded else 7 * world)
    ]
    alone = Mode({"split": "off", "kv_pages": "off"}, lambda *_: True)
    async with recorded(world, tmp_path, alone, "f32", "inproc") as (group, rows):
        expected = {script.seed: await play(group, script) for script in some}, rows()
    mode = Mode(
        ROOMY | {"parallel": 7 * world, "headroom": 1},
        lambda c, _: any(moves) if crowded else c.parked > 0 and c.replayed_tokens > 0,
        owned=WINDOW,
        disturb=crowd_rank_0 if crowded else None,
        patches={"services.router.loop.AHEAD_ROWS": 16},
    )
    async with recorded(world, tmp_path, mode, "f32", "inproc") as (group, rows):
        replies, counters = await played(group, mode, some)
    equal(some, replies, rows(), *expected)
    assert mode.took(counters, list(replies.values())), counters


# ---- planted faults: what only hashes of rows can show ends the epoch, and is named ----------------------------------


def stale_row(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 loses a row of its borrowed copies, after it was digested."""
    store = HereRows.store

    def stale(self: HereRows, p: Any, layer: int, rows: Any) -> None:
        store(self, p, layer, rows)
        if p.arena.rank == 1 and not p.arena.keeps(int(p.batch.lanes[0])):
            p.arena.latent[p.batch.pages[5], layer, p.batch.offsets[5]] += 1

    patch.setattr(HereRows, "store", stale)


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 reads fetched rows one place beside."""
    renumber = FetchedRows._renumber

    def off(self: FetchedRows, lists: Any, union: Any) -> Any:
        places = renumber(self, lists, union)
        return np.where(places > self._staging.first, places - (self._link.rank == 1), places)

    patch.setattr(FetchedRows, "_renumber", off)


def missing_page(patch: pytest.MonkeyPatch) -> None:
    """The new owner of a carried conversation drops the last page that it is sent."""
    imported = NumpyKernels.import_rows

    def dropped(self: NumpyKernels, rows: Any, view: Any, pages: Any, offsets: Any) -> None:
        some = pages != pages[-1]
        imported(self, rows[some], view, pages[some], offsets[some])

    patch.setattr(NumpyKernels, "import_rows", dropped)


def wrong_owner(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 takes one page of its conversation for another rank's."""
    mapped = Arena.map

    def wrong(self: Arena, lane: int, first_slot: int, pages: Any) -> None:
        mapped(self, lane, first_slot, pages)
        if self.split and self.rank == 0 and self.keeps(lane):
            self.latent_tables[lane, 2] = self.latent_discard

    patch.setattr(Arena, "map", wrong)


@pytest.mark.parametrize(
    ("plant", "settings", "words"),
    [
        (stale_row, {}, r"\(prompt\): rank (0|1) holds other rows than rank (0|1)"),
        (off_by_one, {"borrow": False}, r"\(prompt\): rank (0|1) holds other rows than rank (0|1)"),
        (missing_page, {}, r"\(carry\): rank (0|1) holds other rows than rank (0|1)"),
        (wrong_owner, {}, r"operation \d+ \(prompt\): lane 0: row 128 has no page on its owner, rank 0"),
    ],
)
async def test_a_planted_fault_is_named_at_run_time(
    plant: Callable[[pytest.MonkeyPatch], None], settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    prompt = [(7 * j) % 240 for j in range(400)]
    base: dict[str, Any] = {"split": "on", "dtype": "f32", "context": CONTEXT, "page_rows": 64, "chunk_rows": 192}
    async with LocalGroup(MODEL, 2, audit=True, **(base | settings)) as group, AdminClient(group.manager.address) as admin:

        async def converse() -> None:
            async for event in group.client.generate(prompt, Sampling(max_tokens=300, ignore_eos=True)):
                if plant is missing_page and isinstance(event, router_pb2.Chunk) and event.first_index == 3:
                    with contextlib.suppress(LatentPoolError):
                        await admin.carry(1, 1)

        with pytest.raises(EpochError, match=words):
            await converse()
        await group.failed()
