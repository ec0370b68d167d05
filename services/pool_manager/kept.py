"""Kept states: which there are, which prompt goes on from which, which goes first when room is needed, and what was counted.

Source: design section 6. Bytes are the limit, never a number of states. Decisions read a logical counter, no clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from latentpool.geometry import BLOCK, Geometry
from latentpool.units import format_bytes
from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager.plan import Plan

DIGEST = 16
"""Bytes of a block digest."""
_PROMPT_BLOCKS = 65_536
"""Blocks of earlier prompts that are remembered."""

BRANCHES = 2
"""Prompts that went on from a state that something extends: from so many on it is where prompts part."""
Why = Literal["pages", "budget", "hand"]


class Phase(Enum):
    """GRANTED: it holds its ids, but no round has kept it. KEPT: it can be resumed. FORGETTING: its end is ordered."""

    GRANTED = "granted"
    KEPT = "kept"
    FORGETTING = "forgetting"


@dataclass(frozen=True, slots=True)
class Rules:
    """fixed_pages: ids of every residue that a state takes for what is fixed. budget_bytes: what all states may take on a rank,
    a page of which is page_bytes. keep_from, carry_from: tokens under which nothing is kept, or carried to be resumed."""

    fixed_pages: int
    page_bytes: int
    budget_bytes: int
    keep_from: int = 4096
    carry_from: int = 2048


def fixed_pages(geometry: Geometry, world: int, dtype: str, kv_dtype: str, page_rows: int) -> int:
    """Latent parts of pages that hold what a state needs at any length, on the rank that needs most."""
    most = max(geometry.kept_bytes(world, rank, dtype) for rank in range(world))
    return -(-most // (page_rows * geometry.latent_bytes(kv_dtype)))


def rules_of(plan: Plan, fixed: int, cache_bytes: int, keep_from: int, carry_from: int) -> Rules | str:
    """The rules of keeping in a group of this plan, whose states take `fixed` pages of each rank; or why nothing is ever
    kept in it."""
    if not plan.paged:  # a lane's run of pages is written anew by the next conversation
        return "its lanes are windows (--kv-pages off, or auto on one rank); --kv-pages on keeps prompts"
    if not cache_bytes:
        return "it was started with --cache 0"
    if keep_from > plan.context:
        return f"--keep-from {keep_from} is more than the {plan.context} tokens of the longest conversation (--context)"
    page_bytes, rows, pool = plan.ledgers[0].page_bytes, -(-keep_from // plan.page_rows), plan.pages // plan.residues
    need = f"a state takes {format_bytes((fixed + rows) * page_bytes)} a rank at least, {fixed + rows} pages"
    if (fixed + rows) * page_bytes > cache_bytes:
        return f"{need}, and --cache is {format_bytes(cache_bytes)}"
    if fixed + rows > pool:
        return f"{need}, and the pool has {pool} a rank"
    return Rules(fixed, page_bytes, min(cache_bytes, pool * page_bytes), keep_from, carry_from)


@dataclass(slots=True)
class State:
    """Tokens [0, at) of a prompt. chain: digests of its blocks. pages: ids of its rows, slots 0, 1, ...; the last one may be
    partly filled. fixed: ids of every residue, equally many of each, ascending residues. used: the counter when it was last
    kept or resumed. since, used_at: seconds, for ages only. extenders: states that hold it and more. pins: conversations that
    are about to resume it. busy: the round up to which it is being resumed; 0: none."""

    state: int
    conversation: int
    request_id: str
    at: int
    mark: pb.Mark.ValueType
    owner: int
    chain: bytes = field(repr=False)
    pages: list[int]
    fixed: list[int]
    since: float
    phase: Phase = Phase.GRANTED
    used: int = 0
    used_at: float = 0.0
    hits: int = 0
    extenders: int = 0
    pins: set[int] = field(default_factory=set)
    busy: int = 0

    @property
    def pinned(self) -> bool:
        return bool(self.pins) or self.busy > 0

    def ids(self) -> Iterator[int]:
        """Everything it holds."""
        yield from self.pages
        yield from self.fixed


@dataclass(slots=True)
class Counts:
    """Since the term began; names as in KeptCounts."""

    hits: int = 0
    hit_tokens: int = 0
    carried_hits: int = 0
    misses_unknown: int = 0
    misses_room: int = 0
    misses_short: int = 0
    kept: int = 0
    refused: int = 0
    evicted_for_pages: int = 0
    evicted_for_budget: int = 0
    evicted_by_hand: int = 0

    def evicted(self, why: Why) -> None:
        match why:
            case "pages":
                self.evicted_for_pages += 1
            case "budget":
                self.evicted_for_budget += 1
            case "hand":
                self.evicted_by_hand += 1


@dataclass(slots=True)
class Prompts:
    """Block digests of earlier prompts, the least recently seen forgotten first; of a prompt, those at its end before those at
    its beginning, so that what is remembered of it is always a beginning."""

    limit: int = _PROMPT_BLOCKS
    _seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def shared(self, blocks: bytes) -> int:
        """Tokens of the longest beginning, in whole blocks, that an earlier prompt had too."""
        low, high = 0, len(blocks) // DIGEST
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if ending(blocks, middle * BLOCK) in self._seen else (low, middle - 1)
        return low * BLOCK

    def remember(self, blocks: bytes) -> None:
        for at in range(len(blocks) // DIGEST * BLOCK, 0, -BLOCK):
            digest = ending(blocks, at)
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > self.limit:
            self._seen.popitem(last=False)


def ending(blocks: bytes, at: int) -> bytes:
    """The digest of the block that ends `at` tokens; b"" where the blocks end before, or at 0."""
    end = at // BLOCK * DIGEST
    return blocks[end - DIGEST : end] if 0 < end <= len(blocks) else b""


def extends(longer: bytes, shorter: bytes) -> bool:
    """Whether one chain holds the other and more. Digests are chained: equal ones end equal beginnings."""
    return len(longer) > len(shorter) and longer[len(shorter) - DIGEST : len(shorter)] == shorter[-DIGEST:]


@dataclass(slots=True)
class Kept:
    """All states of a term. `held` counts the holders of each id among states that are not being forgotten, `used` their ids by
    residue. `last_refusal`: why the last one was not kept that was asked for."""

    residues: int
    states: dict[int, State] = field(default_factory=dict)
    prompts: Prompts = field(default_factory=Prompts)
    counts: Counts = field(default_factory=Counts)
    held: Counter[int] = field(default_factory=Counter)
    used: list[int] = field(init=False)
    last_refusal: str = ""
    _ticks: int = 0
    _names: int = 0
    _answered: int = 0

    def __post_init__(self) -> None:
        self.used = [0] * self.residues

    # ---- asking: changes nothing -------------------------------------------------------------------------------

    @property
    def lasting(self) -> Iterator[State]:
        """Those that are not being forgotten, in the order granted."""
        return (state for state in self.states.values() if state.phase is not Phase.FORGETTING)

    def lookup(self, blocks: bytes) -> State | None:
        """The longest state that can be resumed by a prompt of these blocks."""
        found = [s for s in self.lasting if s.phase is Phase.KEPT and ending(blocks, s.at) == s.chain[-DIGEST:]]
        return max(found, key=lambda state: state.at, default=None)

    def ends(self, blocks: bytes, at: int) -> State | None:
        """The state of exactly these tokens, resumable or about to be."""
        digest = ending(blocks, at)
        return next((state for state in self.lasting if state.at == at and state.chain[-DIGEST:] == digest), None)

    def victims(self, chain: bytes = b"") -> list[State]:
        """Those that may be evicted, the least valuable first: those that are outgrown, or would be by one of `chain`; then the
        least recently used."""
        free = [state for state in self.lasting if state.phase is Phase.KEPT and not state.pinned]
        return sorted(free, key=lambda state: (not self.outgrown(state, chain), state.used))

    def outgrown(self, state: State, chain: bytes = b"") -> bool:
        """Whether a later state serves in its place: one extends it, and prompts do not part here. Where they do (agents that
        share a system prompt) it is the one state that serves them all, and everything extends it."""
        parts = state.mark == pb.MARK_SHARED or state.hits >= BRANCHES
        return self.extended(state, chain) and not parts

    def extended(self, state: State, chain: bytes = b"") -> bool:
        """Whether a later state holds it and more, or one of `chain` would."""
        return state.extenders > 0 or extends(chain, state.chain)

    def shared_prefix(self, blocks: bytes, after: int) -> int:
        """Tokens of the longest beginning that earlier prompts had too, if it is longer than `after` and no state ends it."""
        at = self.prompts.shared(blocks)
        return at if at > after and self.ends(blocks, at) is None else 0

    # ---- acting ------------------------------------------------------------------------------------------------

    def next_name(self) -> int:
        self._names += 1
        return self._names

    def add(self, state: State) -> None:
        """A state is granted."""
        for other in self.lasting:
            other.extenders += extends(state.chain, other.chain)
            state.extenders += extends(other.chain, state.chain)
        self.states[state.state] = state
        self._count(state, 1)

    def touch(self, state: State, now: float) -> None:
        """It is kept or resumed."""
        self._ticks += 1
        state.used, state.used_at = self._ticks, now

    def forget(self, state: State, why: Why) -> None:
        """It cannot be resumed any more; its ids are its own until `remove`."""
        self.counts.evicted(why)
        self._leave(state)
        state.phase = Phase.FORGETTING

    def remove(self, name: int) -> State:
        state = self.states.pop(name)
        if state.phase is not Phase.FORGETTING:
            self._leave(state)
        return state

    def resumed(self, state: State, conversation: int, fence: int) -> None:
        """The pin lasts until rounds up to `fence` are answered."""
        state.pins.discard(conversation)
        if fence > self._answered:
            state.busy = max(state.busy, fence)

    def answered(self, seq: int) -> None:
        self._answered = max(self._answered, seq)
        for state in self.states.values():
            if state.busy <= self._answered:
                state.busy = 0

    def _leave(self, state: State) -> None:
        self._count(state, -1)
        for other in self.lasting:
            other.extenders -= extends(state.chain, other.chain)

    def _count(self, state: State, sign: int) -> None:
        for page in state.ids():
            before = self.held[page]
            self.held[page] += sign
            if not before or not self.held[page]:
                self.used[page % self.residues] += sign
            if not self.held[page]:
                del self.held[page]
