"""The part of the plain model that knows kept states: prompts as tuples of blocks, states as prefixes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager.kept import Rules
from services.pool_manager.lease import Orders, Request

if TYPE_CHECKING:
    from services.pool_manager.plan import Plan

BLOCK = 64


@dataclass(eq=False)
class State:
    name: int
    conversation: int
    story: tuple[int, ...]
    owner: int
    pages: list[int]
    fixed: list[int]
    used: int
    phase: Literal["granted", "kept", "forgetting"] = "granted"
    pins: set[int] = field(default_factory=set)
    busy: int = 0
    mark: pb.Mark.ValueType = pb.MARK_UNSPECIFIED
    resumed: int = 0

    @property
    def at(self) -> int:
        return BLOCK * len(self.story)

    @property
    def ids(self) -> list[int]:
        return self.pages + self.fixed


@dataclass
class Ask:
    story: tuple[int, ...]
    mark: pb.Mark.ValueType
    waits: bool = False


def goes_on(longer: Sequence[int], shorter: Sequence[int]) -> bool:
    return len(longer) > len(shorter) and tuple(longer[: len(shorter)]) == tuple(shorter)


class StateModel:
    plan: Plan
    ranks: range
    held: dict[int, list[int]]
    moves: dict[int, list[int]]
    parking: set[int]
    queue: list[int]
    requests: dict[int, Request]
    expected: Orders
    answered_to: int

    def begin_states(self, terms: Rules | None) -> None:
        self.terms = terms
        self.states: dict[int, State] = {}
        self.stories: dict[int, tuple[int, ...]] = {}
        self.seen: list[tuple[int, ...]] = []
        self.asked: dict[int, Ask] = {}
        self.counts: Counter[str] = Counter()
        self.ticks = self.named = 0

    def room(self, rank: int) -> int:
        raise NotImplementedError

    def of(self, rank: int) -> list[int]:
        raise NotImplementedError

    def hands(self) -> dict[int, list[bool]]:
        raise NotImplementedError

    def returning(self, rank: int) -> set[int]:
        raise NotImplementedError

    # ---- what follows ------------------------------------------------------------------------------------------

    @property
    def lasting(self) -> list[State]:
        return [state for state in self.states.values() if state.phase != "forgetting"]

    def found(self, request: Request) -> State | None:
        story = self.stories.get(request.conversation, ())
        fit = [s for s in self.lasting if s.phase == "kept" and story[: len(s.story)] == s.story]
        return max(fit, key=lambda state: len(state.story), default=None)

    def portable(self, state: State, request: Request) -> bool:
        assert self.terms is not None
        return not request.idle and state.at >= self.terms.carry_from

    def extended(self, state: State, story: Sequence[int] = ()) -> bool:
        return any(goes_on(other, state.story) for other in [*(one.story for one in self.lasting), story])

    def pinned(self, state: State) -> bool:
        return bool(state.pins) or state.busy > self.answered_to

    def victims(self, story: Sequence[int] = ()) -> list[State]:
        """The least valuable first: those on whose way one other goes on, then by age."""
        free = sorted((s for s in self.lasting if s.phase == "kept" and not self.pinned(s)), key=lambda state: state.used)
        first = [s for s in free if self.extended(s, story) and s.mark != pb.MARK_SHARED and s.resumed < 2]
        return first + [s for s in free if s not in first]

    def being_kept(self, name: int) -> bool:
        return name in self.asked or any(s.conversation == name and s.phase == "granted" for s in self.states.values())

    def parting(self, name: int, after: int) -> int:
        """Tokens that its prompt has in common with an earlier one."""
        story = self.stories[name]
        common = max(
            (n for n in range(len(story) + 1) if any(old[:n] == story[:n] for old in self.seen if len(old) >= n)), default=0
        )
        ended = any(state.story == story[:common] for state in self.lasting)
        return BLOCK * common if BLOCK * common > after and not ended else 0

    def pages_kept(self, without: Sequence[State] = (), more: Sequence[int] = ()) -> int:
        """Of the rank that has most of them."""
        ids = {page for state in self.lasting if state not in without for page in state.ids} | set(more)
        return max(sum(page % len(self.ranks) == rank for page in ids) for rank in self.ranks)

    # ---- what happens ------------------------------------------------------------------------------------------

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks

    def evict(self, state: State, why: str) -> None:
        state.phase = "forgetting"
        self.counts[f"evicted_{'by' if why == 'hand' else 'for'}_{why}"] += 1
        self.expected.forget.append(state.name)

    def unpin(self, name: int, fence: int) -> None:
        for state in self.states.values():
            if name in state.pins:
                state.pins.remove(name)
                state.busy = max(state.busy, fence)

    def looked_up(self, request: Request, state: State | None, carried: bool) -> None:
        if not self.stories.get(request.conversation):
            return
        if state is not None:
            if not request.idle:
                self.counts.update(hits=1, hit_tokens=state.at, carried_hits=int(carried))
                state.resumed += 1
            state.used = self.tick()
            state.pins.add(request.conversation)
            return
        there = self.found(request)
        assert self.terms is not None
        short = there is not None and there.at < self.terms.carry_from
        self.counts["misses_unknown" if there is None else "misses_short" if short else "misses_room"] += 1

    def outcomes(self) -> list[tuple[int, State | None]]:
        """The answers to what was asked, in order; those that wait are left out."""
        done: list[tuple[int, State | None]] = []
        for name in list(self.asked):
            outcome = self.outcome(name, self.asked[name])
            if outcome != "later":
                del self.asked[name]
                self.counts["refused"] += outcome == "no"
                done.append((name, self.grant(name) if outcome == "yes" else None))
        return done

    def outcome(self, name: int, ask: Ask) -> Literal["yes", "no", "later"]:
        terms, story = self.terms, ask.story
        self.asking = ask
        if terms is None or name not in self.held or name in self.parking or name in self.moves:
            return "no"
        if BLOCK * len(story) < terms.keep_from or not story or self.stories[name][: len(story)] != story:
            return "no"
        if any(state.story == story for state in self.lasting):
            return "no"
        need, most = terms.fixed_pages, terms.budget_bytes // terms.page_bytes
        rows = self.rows_of(name, story)
        victims: list[State] = []
        why: dict[int, str] = {}
        if not ask.waits:
            order = self.inferior(story, ask.mark)
            crowded = bool(self.queue) and not self.requests[self.queue[0]].idle
            while True:
                dear = self.pages_kept(victims, rows) + need > most
                short = (
                    min(map(self.room, self.ranks)) < need and min(self.with_gone(rank, victims) for rank in self.ranks) < need
                )
                if not dear and not short:
                    break
                if (short and crowded) or not order:
                    return "no"
                victims.append(order.pop(0))
                why[victims[-1].name] = "budget" if dear else "pages"
            for state in victims:
                self.evict(state, why[state.name])
            ask.waits = True
        if self.pages_kept((), rows) + need > most:
            return "no"
        if min(map(self.room, self.ranks)) >= need:
            return "yes"
        return "later" if min(self.with_gone(rank, ()) for rank in self.ranks) >= need else "no"

    def rows_of(self, name: int, story: Sequence[int]) -> list[int]:
        return self.held[name][: -(-BLOCK * len(story) // self.plan.page_rows)]

    def with_gone(self, rank: int, gone: Sequence[State]) -> int:
        """Pages of a rank that are unreserved once everything came back, and these states too."""
        more = Counter(page for state in gone for page in state.ids)
        back = {page for page, leaving in self.hands().items() if more[page] and leaving.count(False) == more[page]}
        return self.room(rank) + len(self.returning(rank) | {page for page in back if page % len(self.ranks) == rank})

    def inferior(self, story: tuple[int, ...], mark: pb.Mark.ValueType) -> list[State]:
        """States that one with this story may replace: before it is worth anything by itself, those that are worth as little;
        then all, but for the longer relative that was used last."""
        assert self.terms is not None
        begin = story[: -(-self.terms.keep_from // BLOCK)]
        relatives = [
            s for s in self.lasting if len(s.story) > len(story) and s.story[: len(begin)] == begin and not self.extended(s)
        ]
        relatives.sort(key=lambda state: state.used)
        passing = mark == pb.MARK_REWIND or any(goes_on(state.story, story) for state in self.lasting)
        return [s for s in self.victims(story) if self.extended(s, story) or (not passing and s not in relatives[-1:])]

    def grant(self, name: int) -> State:
        assert self.terms is not None
        self.named += 1
        story = self.asking.story
        fixed = [page for rank in self.ranks for page in self.of(rank)[: self.terms.fixed_pages]]
        owner = self.held[name][0] % len(self.ranks)
        state = State(self.named, name, story, owner, self.rows_of(name, story), fixed, self.tick(), mark=self.asking.mark)
        self.states[state.name] = state
        return state
