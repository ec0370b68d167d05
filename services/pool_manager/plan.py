"""The plan: how many pages, windows and lanes fit in what is left on each rank. Pure arithmetic, no I/O.

Source: design section 4. All sizes are bytes a rank; `fixed` is what a lane needs there at any length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from latentpool.errors import ConfigError, PlanRefusedError
from latentpool.geometry import BLOCK, Geometry
from latentpool.units import format_bytes
from latentpool.v1 import plan_pb2

Mode = Literal["pages", "windows"]
Order = Literal["new", "stated"]
Choice = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where one rank's room goes: room = stream + lane + cache + unused, in bytes. Page is the cost of one id here: of
    one *owned* id and its W index parts in a split group."""

    rank: int
    room_bytes: int
    page_bytes: int
    stream_bytes: int
    lane_bytes: int
    cache_bytes: int
    unused_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a group serves. Page counts are ids of the whole group: in a split group each rank owns one in `world`."""

    world: int
    paged: bool
    split: bool
    context: int
    lanes: int
    page_rows: int
    window_pages: int
    stream_pages: int
    pages: int
    cache_bytes: int
    kv_dtype: str
    ledgers: tuple[Ledger, ...]
    note: str = ""

    @property
    def residues(self) -> int:
        """Free sets of the id book: one a rank where ids have owners, else one."""
        return self.world if self.split else 1

    @property
    def owner_pages(self) -> int:
        """k: stream ids that one owner has; all of them where ids have no owner."""
        return self.stream_pages // self.residues

    @property
    def stream_tokens(self) -> int:
        """Rows that the streams' pages hold over the whole group."""
        return self.stream_pages * self.page_rows


def decide(kv_pages: Choice, split: Choice, world: int) -> tuple[Mode, bool]:
    """(mode, split) of the settings: pages with owners from two ranks, windows on one, where they are left to us. Raises
    ConfigError for settings that exclude one another."""
    if split == "on" and kv_pages == "off":
        raise ConfigError("--split on --kv-pages off: windows are whole on every rank and have no owner: use --kv-pages on")
    if split == "on" and world == 1:
        raise ConfigError("--split on --ranks 1: one rank keeps every row anyway: use --ranks 2 or more, or --split auto")
    paged = kv_pages == "on" or (kv_pages == "auto" and world > 1)
    return ("pages" if paged else "windows"), paged and world > 1 and split != "off"


def choose(
    kv_pages: Choice,
    split: Choice,
    *,
    room: Sequence[int],
    context: int,
    lanes: int,
    cache_budget: int,
    geometry: Geometry,
    world: int,
    fixed: Sequence[int],
    kv_dtype: str,
    page_rows: int = 512,
    order: Order = "new",
) -> Plan:
    """The plan of the settings; `fixed` as `lane_fixed` gives it for the mode that `decide` names. What is served and what
    `latentpool plan` prints both come from here.

    --split auto falls back to the replicated plan where only that serves `context`; its `note` says why. Where neither does,
    the refusal is that of the layout which would serve the longer context. Raises as `plan` and `decide` do.
    """
    mode, owners = decide(kv_pages, split, world)
    _check(room, context, lanes, cache_budget, geometry, world, mode, owners, fixed, page_rows)
    sizes = _Sizes(tuple(room), tuple(fixed), cache_budget, geometry, world, owners, kv_dtype, page_rows, True, order)
    made = _attempt(sizes, mode, context, lanes)
    if owners and split == "auto" and isinstance(made, _Refused):
        replicated = _attempt(replace(sizes, split=False), mode, context, lanes)
        if isinstance(replicated, Plan):
            reason = made.text.partition("; ")[0]
            made = replace(replicated, note=f"rows are kept on every rank, because with owners {reason}")
        else:
            made = max(made, replicated, key=lambda refused: refused.best)
    return _granted(made)


def check_context(context: int, geometry: Geometry) -> None:
    """Raises ConfigError if the model does not serve conversations of so many tokens."""
    if not 1 <= context <= geometry.max_context:
        raise ConfigError(f"--context {context}: the model serves 1 to {geometry.max_context} tokens")


def lane_fixed(
    geometry: Geometry, world: int, rank: int, dtype: str, kv_dtype: str, mode: Mode, context: int, page_rows: int
) -> int:
    """`fixed` on `rank`: the lane's state, and in windows the slack rows past `context` that its whole pages hold."""
    slack = window_pages(context, page_rows) * page_rows - context if mode == "windows" else 0
    return geometry.lane_fixed_bytes(world, rank, dtype) + slack * geometry.row_bytes(kv_dtype)


def window_pages(context: int, page_rows: int) -> int:
    """Pages of a window: the last one holds rows of a decode window past the end."""
    return -(-context // page_rows) + 1


def plan(
    room: Sequence[int],
    context: int,
    lanes: int,
    cache_budget: int,
    geometry: Geometry,
    world: int,
    mode: Mode,
    split: bool,
    fixed: Sequence[int],
    kv_dtype: str,
    page_rows: int = 512,
    engine_paged: bool = True,
    order: Order = "new",
) -> Plan:
    """Decides pages or windows for `lanes` conversations of up to `context` tokens.

    room[rank] is what is left after weights, work buffers, links and the first lane's fixed part (its slack included in
    windows); fixed[rank] as `lane_fixed` gives it. Raises PlanRefusedError with the numbers and what would be served,
    ConfigError for a value that no room could serve.
    """
    _check(room, context, lanes, cache_budget, geometry, world, mode, split, fixed, page_rows)
    sizes = _Sizes(tuple(room), tuple(fixed), cache_budget, geometry, world, split, kv_dtype, page_rows, engine_paged, order)
    return _granted(_attempt(sizes, mode, context, lanes))


def to_proto(plan: Plan) -> plan_pb2.Plan:
    """The same plan as a message."""
    return plan_pb2.Plan(
        world=plan.world,
        paged=plan.paged,
        split=plan.split,
        context=plan.context,
        lanes=plan.lanes,
        page_rows=plan.page_rows,
        window_pages=plan.window_pages,
        stream_pages=plan.stream_pages,
        pages=plan.pages,
        cache_bytes=plan.cache_bytes,
        kv_dtype=plan.kv_dtype,
        note=plan.note,
        ledgers=[
            plan_pb2.Ledger(
                rank=ledger.rank,
                room_bytes=ledger.room_bytes,
                page_bytes=ledger.page_bytes,
                stream_bytes=ledger.stream_bytes,
                lane_bytes=ledger.lane_bytes,
                cache_bytes=ledger.cache_bytes,
                unused_bytes=ledger.unused_bytes,
            )
            for ledger in plan.ledgers
        ],
    )


# ---- sizes of one rank -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    room: tuple[int, ...]
    fixed: tuple[int, ...]
    cache_budget: int
    geometry: Geometry
    world: int
    split: bool
    kv_dtype: str
    page_rows: int
    engine_paged: bool
    order: Order

    @property
    def residues(self) -> int:
        return self.world if self.split else 1

    @property
    def page(self) -> int:
        """Bytes of one owned page: its latent rows, and the index parts of it and of the other owners' pages."""
        g = self.geometry
        return self.page_rows * (g.latent_bytes(self.kv_dtype) + self.residues * g.index_bytes(self.kv_dtype))

    def rows(self, context: int) -> int:
        """Bytes of one conversation's rows where nothing is split."""
        return context * self.geometry.row_bytes(self.kv_dtype)

    def least(self, context: int, lanes: int) -> int:
        """Owned pages under which the lanes are not served: one whole window, a page for every other lane."""
        others = -(-lanes // self.residues)
        return window_pages(context, self.page_rows) + others - 1 if self.engine_paged else others

    def need(self, rank: int, mode: Mode, context: int, lanes: int) -> int:
        """Bytes of room that `lanes` at `context` take at the least."""
        streams = lanes * self.rows(context) if mode == "windows" else self.least(context, lanes) * self.page
        return streams + (lanes - 1) * self.fixed[rank]

    def fits(self, mode: Mode, context: int, lanes: int) -> bool:
        return all(self.need(rank, mode, context, lanes) <= self.room[rank] for rank in range(self.world))

    def tightest(self, mode: Mode, context: int, lanes: int) -> int:
        """The rank that lacks most, the lowest of equals."""
        return min(range(self.world), key=lambda rank: self.room[rank] - self.need(rank, mode, context, lanes))

    def windows(self, rank: int, context: int, lanes: int) -> int:
        """Pages of the lanes' windows."""
        return lanes * window_pages(context, self.page_rows)

    def pages(self, rank: int, context: int, lanes: int) -> int:
        """Owned pages that `rank` can give to the streams, in the order of design section 4."""
        room = self.room[rank] - (lanes - 1) * self.fixed[rank]
        least = self.least(context, lanes)
        count = least
        if self.engine_paged:
            whole = self.whole_windows(rank, context, lanes) * window_pages(context, self.page_rows)
            count = min(max(-(-whole // self.residues), least), room // self.page)
        cache = min(self.cache_budget, room - count * self.page)
        return count + (room - count * self.page - cache) // self.page

    def whole_windows(self, rank: int, context: int, lanes: int) -> int:
        """n: lanes that windows would have served in the same room."""
        if self.order == "stated":
            return 1
        rows = self.rows(context)
        return max(1, min(lanes, 1 + (self.room[rank] - rows) // (rows + self.fixed[rank])))

    def ledger(self, rank: int, mode: Mode, context: int, lanes: int, owned: int) -> Ledger:
        """Where the room goes once every rank has `owned` pages: a rank with more room than others has more cache."""
        stream = lanes * self.rows(context) if mode == "windows" else owned * self.page
        lane = (lanes - 1) * self.fixed[rank]
        left = self.room[rank] - stream - lane
        cache = min(self.cache_budget, left)
        return Ledger(rank, self.room[rank], self.page, stream, lane, cache, left - cache)


# ---- the decision ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Refused:
    """`best`: the largest context at these lanes, and the most lanes at this context, that would be served."""

    text: str
    best: tuple[int, int]


def _granted(made: Plan | _Refused) -> Plan:
    if isinstance(made, _Refused):
        raise PlanRefusedError(made.text)
    return made


def _attempt(sizes: _Sizes, mode: Mode, context: int, lanes: int) -> Plan | _Refused:
    if not sizes.fits(mode, context, lanes):
        return _refusal(sizes, mode, context, lanes)
    count = sizes.windows if mode == "windows" else sizes.pages
    owned = min(count(rank, context, lanes) for rank in range(sizes.world))
    ledgers = tuple(sizes.ledger(rank, mode, context, lanes, owned) for rank in range(sizes.world))
    kept = min(ledger.cache_bytes for ledger in ledgers) // sizes.page
    return Plan(
        world=sizes.world,
        paged=mode == "pages",
        split=sizes.split,
        context=context,
        lanes=lanes,
        page_rows=sizes.page_rows,
        window_pages=window_pages(context, sizes.page_rows),
        stream_pages=owned * sizes.residues,
        pages=(owned + kept) * sizes.residues,
        cache_bytes=min(ledger.cache_bytes for ledger in ledgers),
        kv_dtype=sizes.kv_dtype,
        ledgers=ledgers,
    )


# ---- refusals ------------------------------------------------------------------------------------------------------


def _refusal(sizes: _Sizes, mode: Mode, context: int, lanes: int) -> _Refused:
    """Numbers of the tightest rank, then what would be served instead."""
    rank = sizes.tightest(mode, context, lanes)
    largest_lanes = _largest(lanes - 1, lambda count: sizes.fits(mode, context, count))
    largest_pages = _largest(context // sizes.page_rows, lambda count: sizes.fits(mode, count * sizes.page_rows, lanes))
    ways = [f"serve --parallel {largest_lanes}"] * bool(largest_lanes) + ["lower --context"] * bool(largest_pages)
    advice = ", or ".join(ways) or "give it more memory"
    parts = [f"{_shortage(sizes, mode, context, lanes, rank)}: {advice}"]
    if len(set(zip(sizes.room, sizes.fixed, strict=True))) > 1:
        parts.append(f"rank {rank} has the least room")
    parts.append(
        f"the largest --parallel at --context {context} is {largest_lanes}"
        if largest_lanes
        else f"no --parallel is served at --context {context}"
    )
    parts.append(
        f"the largest --context at --parallel {lanes} is {largest_pages * sizes.page_rows}"
        if largest_pages
        else f"no --context is served at --parallel {lanes}"
    )
    if mode == "windows":
        paged = sizes.fits("pages", context, lanes)
        parts.append(f"--kv-pages on would {'' if paged else 'not '}serve --parallel {lanes} at --context {context}")
    return _Refused("; ".join(parts), (largest_pages, largest_lanes))


def _shortage(sizes: _Sizes, mode: Mode, context: int, lanes: int, rank: int) -> str:
    first = sizes.need(rank, mode, context, 1)
    room = sizes.room[rank]
    if first > room:
        return (
            f"--context {context} needs {format_bytes(first)} for one stream, and the memory budget leaves "
            f"{format_bytes(max(0, room))}"
        )
    base = first if mode == "windows" else 0
    detail = "" if mode == "windows" else f" ({sizes.least(context, lanes)} pages a rank at least)"
    return (
        f"--parallel {lanes} needs {format_bytes(sizes.need(rank, mode, context, lanes) - base)} for its streams at a "
        f"{context}-token window{detail}, and the memory budget leaves {format_bytes(room - base)}"
    )


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest count in 1..most that fits, 0 if none; `fits` is monotone."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _check(
    room: Sequence[int],
    context: int,
    lanes: int,
    cache_budget: int,
    geometry: Geometry,
    world: int,
    mode: Mode,
    split: bool,
    fixed: Sequence[int],
    page_rows: int,
) -> None:
    geometry.check_world(world)
    if len(room) != world or len(fixed) != world:
        raise ValueError(f"room and fixed of {len(room)} and {len(fixed)} ranks: {world} are needed")
    check_context(context, geometry)
    if lanes < 1:
        raise ConfigError(f"--parallel {lanes}: at least 1 is needed")
    if cache_budget < 0:
        raise ConfigError(f"--cache {cache_budget}: at least 0 is needed")
    if split and mode == "windows":
        raise ConfigError("--split on --kv-pages off: windows are whole on every rank and have no owner: use --kv-pages on")
    if page_rows & (page_rows - 1) or not BLOCK <= page_rows <= 512:
        raise ConfigError(f"--page-rows {page_rows}: 64, 128, 256 or 512 are served")
