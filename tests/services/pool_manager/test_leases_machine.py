"""Leases and books under any sequence of calls, against a plain model; planted faults must be caught by it.

The model knows rounds: a round touches every page of every running conversation, and a page must not be handed out while a
round that touches it is unanswered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from services.pool_manager.books import Books
from services.pool_manager.leases import Extension, Grant, Lease, Leases, Refusal, Request, Waiting
from services.pool_manager.plan import Plan

ROWS = 64
WINDOW = 5
CONTEXT = (WINDOW - 1) * ROWS
HEADROOM = 40
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
    """Two Leases get the same calls and must give the same ids and park lists; a model says which are right."""

    books: type[Books] = Books
    kind: type[Leases] = Leases
    layouts: Sequence[tuple[int, bool]] = ((1, True), (2, True), (3, True), (1, False))  # residues, paged
    spare: Sequence[int] = (0, 1, 2, 4)

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        residues, paged = data.draw(st.sampled_from(self.layouts))
        owner_pages = WINDOW + data.draw(st.sampled_from(self.spare))
        self.plan = small_plan(residues, paged, owner_pages)
        self.leases = [self.kind(self.plan, HEADROOM, clock=lambda: 0.0) for _ in range(2)]
        for leases in self.leases:
            leases.books = self.books(self.plan.pages, residues)
        self.free = set(range(self.plan.pages))
        self.touched = dict.fromkeys(range(self.plan.pages), 0)
        self.held: dict[int, list[int]] = {}
        self.quota: dict[int, int] = {}
        self.requests: dict[int, Request] = {}
        self.queue: list[int] = []
        self.owed: dict[int, int] = {}
        self.parking: set[int] = set()
        self.parked: set[int] = set()
        self.sent = self.answered_to = self.names = 0

    # ---- the model -------------------------------------------------------------------------------------------

    def of(self, residue: int) -> list[int]:
        """Free ids of a residue whose rounds are all answered, ascending."""
        return sorted(
            page for page in self.free if page % self.plan.residues == residue and self.touched[page] <= self.answered_to
        )

    def owner(self, name: int) -> int:
        return self.held[name][0] % self.plan.residues

    def tenants(self, residue: int) -> list[int]:
        """Those of a residue that stay, the oldest first."""
        return sorted(name for name in self.held if self.owner(name) == residue and name not in self.parking)

    def room(self, residue: int) -> int:
        return len(self.of(residue)) - sum(self.owed.get(name, 0) for name in self.tenants(residue))

    def wanted(self, request: Request) -> list[int] | None:
        """The ids that the request should get now, None if it cannot have its quota."""
        if not self.plan.paged:
            run = list(range(request.lane * WINDOW, (request.lane + 1) * WINDOW))
            return run if set(run) <= set(self.of(0)) else None
        limit = CONTEXT - request.prompt_tokens if request.max_tokens is None else request.max_tokens
        pages, rest = divmod(request.prompt_tokens + min(limit, HEADROOM), ROWS)
        quota = min(pages + bool(rest) + 1, WINDOW)
        richest = sorted(range(self.plan.residues), key=lambda residue: -self.room(residue))[0]
        return self.of(richest)[:quota] if self.room(richest) >= quota else None

    def in_order(self) -> list[int]:
        """The queue by class, those that return first and by age, the others by arrival."""
        order = []
        for background in (False, True):
            mine = [name for name in self.queue if self.requests[name].background == background]
            order += sorted(name for name in mine if self.requests[name].returning)
            order += [name for name in mine if not self.requests[name].returning]
        return order

    def to_park(self, residue: int) -> list[int]:
        """The fewest of the youngest whose pages, with the free, fenced and parking ones, cover what the others lack."""
        tenants = self.tenants(residue)
        coming = sum(page % self.plan.residues == residue for page in self.free)
        coming += sum(len(self.held[name]) for name in self.parking if self.owner(name) == residue)
        for count in range(len(tenants)):
            stay, go = tenants[: len(tenants) - count], tenants[len(tenants) - count :]
            if sum(self.owed.get(name, 0) for name in stay) <= coming + sum(len(self.held[name]) for name in go):
                return go
        raise AssertionError("one alone lacks more than its window")

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

    def check_admit(self, request: Request) -> None:
        name = request.conversation
        self.requests[name] = request
        self.queue.append(name)
        order = self.in_order()
        wanted = self.wanted(request) if order[0] == name else None
        answer = self.both(lambda leases: leases.admit(request))
        if request.prompt_tokens + (request.max_tokens or 0) > CONTEXT:
            assert isinstance(answer, Refusal)
            self.queue.remove(name)
        elif wanted is None:
            assert isinstance(answer, Waiting)
            assert answer.ahead == order.index(name)
            self.queue = order
        else:
            assert isinstance(answer, Lease)
            self.queue.remove(name)
            self.check_lease(answer, wanted)

    # ---- calls -----------------------------------------------------------------------------------------------

    @property
    def lanes_left(self) -> list[int]:
        taken = {self.requests[name].lane for name in [*self.held, *self.queue]}
        return [lane for lane in range(LANES) if lane not in taken]

    @precondition(lambda self: self.lanes_left)
    @rule(
        data=st.data(),
        prompt=st.sampled_from([1, ROWS, ROWS + 1]) | st.integers(1, CONTEXT + 5),
        most=st.none() | st.integers(0, CONTEXT),
        background=st.booleans(),
    )
    def admit(self, data: st.DataObject, prompt: int, most: int | None, background: bool) -> None:
        self.names += 1
        lane = data.draw(st.sampled_from(self.lanes_left))
        self.check_admit(Request(self.names, lane, prompt, most, background=background))

    @precondition(lambda self: self.lanes_left and self.parked)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """A parked conversation, with more tokens than it came with and fewer to come."""
        name = data.draw(st.sampled_from(sorted(self.parked)))
        self.parked.remove(name)
        old = self.requests[name]
        most = CONTEXT - old.prompt_tokens if old.max_tokens is None else old.max_tokens
        done = data.draw(st.integers(0, most))
        again = Request(
            name, data.draw(st.sampled_from(self.lanes_left)), old.prompt_tokens + done, most - done, "", old.background, True
        )
        self.check_admit(again)

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """Needs of some, in any order: of those told to park and of strangers too. What is unmet stays owed."""
        names = data.draw(st.lists(st.sampled_from([*sorted(self.held), 10**6]), min_size=1, unique=True))
        needs = [(name, data.draw(st.just(CONTEXT + 1) | st.integers(0, CONTEXT + 2 * ROWS))) for name in names]
        for name, rows in needs:
            if name in self.held and name not in self.parking:
                self.owed[name] = max(0, min(-(-rows // ROWS), WINDOW) - len(self.held[name]))
        park: list[int] = []
        for residue in {self.owner(name) for name in names if name in self.held and self.owed.get(name)}:
            park += self.to_park(residue)
        self.parking |= set(park)
        for name in park:
            self.owed.pop(name, None)
        granted = {}
        for name in sorted(names):
            pages = self.held.get(name, [])
            ids = self.of(self.owner(name))[: self.owed.get(name, 0)] if pages else []
            granted[name] = Grant(name, len(pages), ids)
            if pages:
                self.held[name] = pages + ids
                self.owed[name] = self.owed.get(name, 0) - len(ids)
                self.free -= set(ids)
        answer = self.both(lambda leases: leases.extend(needs))
        assert answer == Extension([granted[name] for name in names], sorted(park, reverse=True))
        self.check_admissions()

    @rule()
    def send_round(self) -> None:
        self.sent += 1
        for pages in self.held.values():
            for page in pages:
                self.touched[page] = self.sent

    @precondition(lambda self: self.sent > self.answered_to)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """Any number of rounds stays in flight."""
        self.answered_to = data.draw(st.integers(self.answered_to, self.sent))
        self.both(lambda leases: leases.answered(self.answered_to))
        self.check_admissions()

    @precondition(lambda self: self.parking)
    @rule(data=st.data(), ahead=st.integers(0, 2))
    def park(self, data: st.DataObject, ahead: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.parking)))
        self.parking.remove(name)
        self.parked.add(name)
        self.leave(name, ahead)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), ahead=st.integers(0, 2))
    def finish(self, data: st.DataObject, ahead: int) -> None:
        """Some end before they are parked."""
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.parking.discard(name)
        self.leave(name, ahead)

    def leave(self, name: int, ahead: int) -> None:
        """The last round that touches its pages may not be sent yet."""
        self.owed.pop(name, None)
        pages = self.held.pop(name)
        assert self.both(lambda leases: leases.finish(name, self.sent + ahead)) == len(pages)
        for page in pages:
            self.touched[page] = self.sent + ahead
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
            assert leases.parking == self.parking
            assert leases.owed == {name: pages for name, pages in self.owed.items() if pages}
            free = {page for residue in range(self.plan.residues) for page in self.of(residue)}
            assert {page for page, kind in enumerate(leases.books.kinds()) if kind.value == "free"} == free


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=25, stateful_step_count=100, deadline=None)


@pytest.mark.full
def test_many_long_runs() -> None:
    many = settings(max_examples=600, stateful_step_count=150, deadline=None)
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
        self._free[residue].put(ids[-1:])
        return ids


class GivesTheHighest(Books):
    def take(self, residue: int, count: int) -> list[int]:
        ids = super().take(residue, self.free(residue))
        self.give_back(ids[: len(ids) - count], 0)
        return ids[len(ids) - count :]


class ParksTheOldest(Leases):
    def youngest(self, owner: int) -> int | None:
        staying = {name for name, lease in self.running.items() if lease.owner == owner} - self.parking
        return min(staying) if len(staying) > 1 else None


class ParksAgain(Leases):
    """Pages of those that park already do not count."""

    def shortfall(self, owner: int) -> int:
        return self._owed(owner) - self.books.free(owner) - self.books.fenced(owner)


class ParksThoughFencedPagesCome(Leases):
    def shortfall(self, owner: int) -> int:
        return Leases.shortfall(self, owner) + self.books.fenced(owner)


class AdmitsIntoWhatIsOwed(Leases):
    def unreserved(self, owner: int) -> int:
        return self.books.free(owner)


class ReturnsWithoutHeadroom(Leases):
    def quota(self, request: Request) -> int:
        return Leases.quota(self, replace(request, max_tokens=0) if request.returning else request)


class ReturnsWithHalfItsTokens(Leases):
    def quota(self, request: Request) -> int:
        return Leases.quota(self, replace(request, prompt_tokens=request.prompt_tokens // 2) if request.returning else request)


class ReturnsLikeNew(Leases):
    def admit(self, request: Request) -> Lease | Waiting | Refusal:
        return Leases.admit(self, replace(request, returning=False))


class KnowsOneClass(Leases):
    def admit(self, request: Request) -> Lease | Waiting | Refusal:
        return Leases.admit(self, replace(request, background=False))


_BOOKS = [FreesBeforeTheFence, FreesTooEarly, LosesAPage, GivesAPageTwice, GivesTheHighest]
_QUICK = [ParksTheOldest, ReturnsWithoutHeadroom, KnowsOneClass]
_SLOW = [ParksAgain, ParksThoughFencedPagesCome, AdmitsIntoWhatIsOwed, ReturnsWithHalfItsTokens, ReturnsLikeNew]


@pytest.mark.parametrize("fault", [*_BOOKS, *_QUICK, *(pytest.param(fault, marks=pytest.mark.full) for fault in _SLOW)])
def test_the_machine_catches(fault: type[Books] | type[Leases]) -> None:
    planted: dict[str, Any] = {"books": fault} if issubclass(fault, Books) else {"kind": fault, "layouts": [(1, True)]}
    machine = type("Faulty", (LeaseMachine,), planted)
    quick = settings(
        max_examples=300,
        stateful_step_count=150,
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
