"""Leases and books under any sequence of calls, against a plain model; planted faults must be caught by it.

The model knows rounds: a round touches every page of every running conversation, and a page must not be handed out while a
round that touches it is unanswered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from services.pool_manager.books import Books
from services.pool_manager.leases import Lease, Leases, Refusal, Request, Waiting
from services.pool_manager.plan import Plan

ROWS = 64
WINDOW = 5
CONTEXT = (WINDOW - 1) * ROWS
HEADROOM = 100
LANES = 4


def small_plan(residues: int, paged: bool, owner_pages: int, lanes: int = LANES) -> Plan:
    """A plan of `owner_pages` ids a residue; windows have one run a lane and two pages for kept states."""
    pages = owner_pages * residues if paged else lanes * WINDOW + 2
    return Plan(
        world=max(2, residues),
        paged=paged,
        split=residues > 1,
        context=CONTEXT,
        lanes=lanes,
        page_rows=ROWS,
        window_pages=WINDOW,
        stream_pages=pages,
        pages=pages,
        cache_bytes=0,
        kv_dtype="bf16",
        ledgers=(),
    )


class LeaseMachine(RuleBasedStateMachine):
    """Two Leases get the same calls and must give the same ids; a model says which ids are right."""

    books: type[Books] = Books

    @initialize(residues=st.sampled_from([1, 2, 3]), paged=st.booleans(), owner_pages=st.integers(WINDOW, 9))
    def start(self, residues: int, paged: bool, owner_pages: int) -> None:
        residues = residues if paged else 1
        self.plan = small_plan(residues, paged, owner_pages)
        self.leases = [Leases(self.plan, HEADROOM, clock=lambda: 0.0) for _ in range(2)]
        for leases in self.leases:
            leases.books = self.books(self.plan.pages, residues)
        self.free = set(range(self.plan.pages))
        self.touched = dict.fromkeys(range(self.plan.pages), 0)
        self.held: dict[int, list[int]] = {}
        self.quota: dict[int, int] = {}
        self.requests: dict[int, Request] = {}
        self.queue: list[int] = []
        self.sent = self.answered_to = self.names = 0

    # ---- the model -------------------------------------------------------------------------------------------

    def of(self, residue: int) -> list[int]:
        """Free ids of a residue whose rounds are all answered, ascending."""
        return sorted(
            page for page in self.free if page % self.plan.residues == residue and self.touched[page] <= self.answered_to
        )

    def wanted(self, request: Request) -> list[int] | None:
        """The ids that the request should get now, None if it cannot have its quota."""
        if not self.plan.paged:
            run = list(range(request.lane * WINDOW, (request.lane + 1) * WINDOW))
            return run if set(run) <= set(self.of(0)) else None
        limit = CONTEXT - request.prompt_tokens if request.max_tokens is None else request.max_tokens
        pages, rest = divmod(request.prompt_tokens + min(limit, HEADROOM), ROWS)
        quota = min(pages + bool(rest) + 1, WINDOW)
        richest = sorted(range(self.plan.residues), key=lambda residue: -len(self.of(residue)))[0]
        return self.of(richest)[:quota] if len(self.of(richest)) >= quota else None

    def check_lease(self, lease: Lease, wanted: Sequence[int] | None) -> None:
        assert wanted is not None
        assert lease.pages == list(wanted)
        name = lease.request.conversation
        self.held[name], self.quota[name] = list(wanted), lease.quota
        self.free -= set(wanted)

    def both(self, call: Any) -> Any:
        one, two = call(self.leases[0]), call(self.leases[1])
        assert one == two
        return one

    def check_admissions(self) -> None:
        """The head of the queue, and the next, as far as pages go; nobody overtakes."""
        admitted = self.both(lambda leases: list(leases.admit_waiting()))
        for lease in admitted:
            assert lease.request.conversation == self.queue.pop(0)
            self.check_lease(lease, self.wanted(lease.request))
        assert not self.queue or self.wanted(self.requests[self.queue[0]]) is None

    # ---- calls -----------------------------------------------------------------------------------------------

    @property
    def lanes_left(self) -> list[int]:
        taken = {self.requests[name].lane for name in [*self.held, *self.queue]}
        return [lane for lane in range(LANES) if lane not in taken]

    @precondition(lambda self: self.lanes_left)
    @rule(data=st.data(), prompt=st.integers(1, CONTEXT + 5), most=st.none() | st.integers(0, CONTEXT))
    def admit(self, data: st.DataObject, prompt: int, most: int | None) -> None:
        self.names += 1
        request = Request(self.names, data.draw(st.sampled_from(self.lanes_left)), prompt, most)
        wanted = None if self.queue else self.wanted(request)
        answer = self.both(lambda leases: leases.admit(request))
        self.requests[self.names] = request
        if prompt + (most or 0) > CONTEXT:
            assert isinstance(answer, Refusal)
        elif wanted is None:
            assert isinstance(answer, Waiting)
            assert answer.ahead == len(self.queue)
            self.queue.append(self.names)
        else:
            assert isinstance(answer, Lease)
            self.check_lease(answer, wanted)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), rows=st.integers(0, CONTEXT + 2 * ROWS))
    def extend(self, data: st.DataObject, rows: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        pages = self.held[name]
        lacking = max(0, min(-(-rows // ROWS), WINDOW) - len(pages))
        wanted = self.of(pages[0] % self.plan.residues)[:lacking]
        assert self.both(lambda leases: leases.extend(name, rows)) == (len(pages), wanted)
        pages += wanted
        self.free -= set(wanted)

    @rule()
    def send_round(self) -> None:
        self.sent += 1
        for pages in self.held.values():
            for page in pages:
                self.touched[page] = self.sent

    @precondition(lambda self: self.sent > self.answered_to)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.answered_to = data.draw(st.integers(self.answered_to, self.sent))
        self.both(lambda leases: leases.answered(self.answered_to))
        self.check_admissions()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        pages = self.held.pop(name)
        assert self.both(lambda leases: leases.finish(name, self.sent)) == len(pages)
        for page in pages:
            self.touched[page] = self.sent
        self.free |= set(pages)
        self.check_admissions()

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def cancel_waiting(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.queue))
        self.queue.remove(name)
        assert self.both(lambda leases: leases.finish(name, self.sent)) == 0
        self.check_admissions()

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "plan"):
            return
        for leases in self.leases:
            assert leases.check_integrity() == []
            assert {name: lease.pages for name, lease in leases.running.items()} == self.held
            assert [one.request.conversation for one in leases.waiting] == self.queue
            free = {page for residue in range(self.plan.residues) for page in self.of(residue)}
            assert {page for page, kind in enumerate(leases.books.kinds()) if kind.value == "free"} == free


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.full
def test_many_long_runs() -> None:
    many = settings(max_examples=300, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(LeaseMachine, settings=many)  # type: ignore[no-untyped-call]


# ---- planted faults ------------------------------------------------------------------------------------------------


class FreesBeforeTheFence(Books):
    def give_back(self, ids: Sequence[int], fence: int) -> None:
        super().give_back(ids, 0)


class FreesTooEarly(Books):
    def answered(self, seq: int) -> None:
        super().answered(seq + 1)


class LosesAPage(Books):
    def give_back(self, ids: Sequence[int], fence: int) -> None:
        super().give_back(ids[:-1], fence)


class GivesAPageTwice(Books):
    def take(self, residue: int, count: int) -> list[int]:
        ids = super().take(residue, count)
        self._free[residue] = ids[-1:] + self._free[residue]
        return ids


class GivesTheHighest(Books):
    def take(self, residue: int, count: int) -> list[int]:
        self._free[residue].reverse()
        ids = super().take(residue, count)
        self._free[residue].reverse()
        return ids


@pytest.mark.parametrize("fault", [FreesBeforeTheFence, FreesTooEarly, LosesAPage, GivesAPageTwice, GivesTheHighest])
def test_the_machine_catches(fault: type[Books]) -> None:
    machine = type("Faulty", (LeaseMachine,), {"books": fault})
    quick = settings(
        max_examples=60,
        stateful_step_count=30,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        print_blob=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=quick)  # type: ignore[no-untyped-call]
