"""The machine of leases with kept states: keep, resume, evict, pin, idle, in any order, against the plain model.

Prompts are few blocks from a small alphabet, so that many begin alike; a page has two blocks, so that states end within pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from kept_fakes import BLOCK, HISTORY, MARKS, digests
from lease_model import HEADROOM, LANES, WINDOW, small_plan
from state_model import Ask
from test_leases_machine import LeaseMachine

from services.pool_manager import keeping
from services.pool_manager.keeping import EvictError
from services.pool_manager.kept import Rules
from services.pool_manager.lease import Request
from services.pool_manager.leases import Leases


class KeptMachine(LeaseMachine):
    layouts: Sequence[tuple[int, bool]] = ((1, True), (2, True), (2, True), (3, True))
    spare: Sequence[int] = (2, 4, 6, 12, 20)

    @initialize(
        data=st.data(),
        borrow=st.booleans(),
        fixed=st.integers(1, 2),
        budget=st.sampled_from([6, 12, 1000]),
        keep=st.sampled_from([BLOCK, BLOCK, 2 * BLOCK]),
        carry=st.sampled_from([BLOCK, 3 * BLOCK, 1000]),
    )
    def start(self, data: st.DataObject, borrow: bool, fixed: int, budget: int, keep: int, carry: int) -> None:
        residues, paged = data.draw(st.sampled_from(self.layouts))
        pages = WINDOW + data.draw(st.sampled_from(self.spare))
        plan = small_plan(residues, paged, pages, lanes=LANES if residues == 1 else 2 * LANES, rows=2 * BLOCK)
        terms = Rules(fixed_pages=fixed, page_bytes=7, budget_bytes=7 * budget, keep_from=keep, carry_from=carry)
        self.begin(plan, borrow, terms)
        self.leases = [self.kind(plan, HEADROOM, clock=lambda: 0.0, borrow=borrow, rules=terms) for _ in range(2)]
        for leases in self.leases:
            leases.books = self.books(plan.pages, residues)
        for _ in range(data.draw(st.integers(0, 3))):
            self.go_through(data, data.draw(st.integers(2, 8)))

    # ---- conversations with blocks -----------------------------------------------------------------------------

    @precondition(lambda self: self.lanes_left)
    @rule(
        data=st.data(),
        prompt=st.integers(1, (WINDOW - 1) * 2 * BLOCK) | st.integers(3 * BLOCK, (WINDOW - 1) * 2 * BLOCK),
        most=st.just(0) | st.just(0) | st.integers(0, BLOCK),
        background=st.booleans(),
        idle=st.sampled_from([False, False, True]),
    )
    def admit(self, data: st.DataObject, prompt: int, most: int, background: bool, idle: bool) -> None:
        """Its prompt goes on from some earlier one, or from a part of it; sometimes it has no blocks."""
        self.names += 1
        kept = sorted({state.story for state in self.lasting})
        before = data.draw(st.sampled_from(kept)) if kept and prompt % 4 else ()
        if prompt % 8 == 7:
            before = data.draw(st.sampled_from([(), *sorted(set(self.stories.values()))]))
            before = before[: data.draw(st.integers(0, 8))]
        story = (*before, *data.draw(st.lists(st.integers(0, 1), min_size=8, max_size=8)))[: (prompt - 1) // BLOCK]
        story = () if prompt % 20 == 19 else story
        lane = data.draw(st.sampled_from(self.lanes_left))
        self.stories[self.names] = story
        blocks = digests(story)
        self.check_admit(Request(self.names, lane, prompt, most, "", background and not idle, blocks=blocks, idle=idle))

    @precondition(lambda self: self.lanes_left)
    @rule(data=st.data(), blocks=st.integers(2, 8))
    def go_through(self, data: st.DataObject, blocks: int) -> None:
        """One that keeps its state, if it can at once, and leaves."""
        self.admit(data, min(BLOCK * blocks + 1, self.plan.context), 0, False, False)
        name = self.names
        if name in self.held:
            self.ask_for(name, self.stories[name], HISTORY)
        for state in list(self.states.values()):
            if state.conversation == name and state.phase == "granted":
                self.keep_now(state.name)
        if name in self.held:
            self.leave(name, 0)

    # ---- states --------------------------------------------------------------------------------------------------

    @precondition(lambda self: bool(set(self.held) - set(self.asked)))
    @rule(data=st.data(), mark=st.sampled_from(MARKS), short=st.sampled_from([0, 0, 1, 2, -1]))
    def ask(self, data: st.DataObject, mark: Any, short: int) -> None:
        """Mostly at the end of its prompt; sometimes by one that does not run."""
        name = data.draw(st.sampled_from([*sorted(set(self.held) - set(self.asked)), 10**6]))
        story = self.stories.get(name, ())
        self.ask_for(name, (*story, 5) if short < 0 else story[: len(story) - short], mark)

    def ask_for(self, name: int, story: tuple[int, ...], mark: Any) -> None:
        self.asked[name] = Ask(story, mark)
        self.both(lambda leases: leases.ask_keep(name, BLOCK * len(story), mark))
        self.settle()

    @property
    def granted(self) -> list[int]:
        return [state.name for state in self.states.values() if state.phase == "granted"]

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Its conversation may have ended meanwhile. A repeat does nothing."""
        self.keep_now(data.draw(st.sampled_from(self.granted)))

    def keep_now(self, name: int) -> None:
        self.states[name].phase = "kept"
        self.states[name].used = self.tick()
        self.counts["kept"] += 1
        assert self.both(lambda leases: (found := keeping.kept(leases, name)) and found.state) == name
        assert self.both(lambda leases: keeping.kept(leases, name)) is None
        self.settle()

    @precondition(lambda self: self.states)
    @rule(data=st.data(), ahead=st.integers(-2, 1))
    def forget(self, data: st.DataObject, ahead: int) -> None:
        """Those whose end is ordered, and those that were never kept."""
        names = [state.name for state in self.states.values() if state.phase != "kept"]
        names = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
        fence = max(0, self.sent + ahead)
        for name in names:
            for page in self.states.pop(name).ids:
                self.touched[page] = max(self.touched[page], fence)
        assert self.both(lambda leases: [s.state for s in keeping.forgotten(leases, [*names, 10**6], fence)]) == names
        self.settle()

    @precondition(lambda self: any(state.pins for state in self.states.values()))
    @rule(data=st.data(), ahead=st.integers(0, 1))
    def resume(self, data: st.DataObject, ahead: int) -> None:
        """The round that resumes is sent, or is the next. A repeat does nothing."""
        names = sorted(name for state in self.states.values() for name in state.pins)
        name = data.draw(st.sampled_from(names))
        fence = self.sent + ahead
        self.unpin(name, fence)
        for again in (0, 5):
            self.both(lambda leases: leases.resumed(name, fence + again))  # noqa: B023
        self.settle()

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def evict_by_hand(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from([*sorted(self.states), 10**6]), unique=True, max_size=3))
        states = [self.states.get(name) for name in names]
        if any(state is None or state.phase == "granted" or self.pinned(state) for state in states):
            assert self.both(lambda leases: evicted(leases, names)) is None
            return
        if not names:
            names = sorted(state.name for state in self.victims())
        for name in names:
            if self.states[name].phase == "kept":
                self.evict(self.states[name], "hand")
        assert self.both(lambda leases: evicted(leases, names)) == names
        self.settle()

    @invariant()
    def within_the_budget(self) -> None:
        if self.states and self.terms is not None:
            assert self.pages_kept() * self.terms.page_bytes <= self.terms.budget_bytes


def evicted(leases: Leases, names: Sequence[int]) -> list[int] | None:
    try:
        return keeping.evict_by_hand(leases, names)
    except EvictError:
        return None


TestKeptMachine = KeptMachine.TestCase
TestKeptMachine.settings = settings(max_examples=40, stateful_step_count=100, deadline=None)


@pytest.mark.full
def test_many_long_runs_with_states() -> None:
    many = settings(max_examples=600, stateful_step_count=150, deadline=None)
    run_state_machine_as_test(KeptMachine, settings=many)  # type: ignore[no-untyped-call]
