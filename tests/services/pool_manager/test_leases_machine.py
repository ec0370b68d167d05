"""Leases and books under any sequence of calls, against a plain model of who holds which id.

The model knows rounds: a round touches every page of every running conversation, lent pages and those of a carry under way
included, and a page must not be handed out while a round that touches it is unanswered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from lease_model import CONTEXT, HEADROOM, LANES, ROWS, WINDOW, LeaseModel, Wanted, small_plan

from latentpool.v1 import pool_admin_pb2 as pb
from services.pool_manager.books import Books
from services.pool_manager.lease import Extension, Grant, Lease, Move, Orders, Refusal, Request, Waiting
from services.pool_manager.leases import Leases
from services.pool_manager.pictures import page_runs
from services.pool_manager.relief import CarryError, carry_by_hand


class LeaseMachine(LeaseModel, RuleBasedStateMachine):
    """Two Leases get the same calls and must give the same ids and orders; a model says which are right."""

    books: type[Books] = Books
    kind: type[Leases] = Leases
    layouts: Sequence[tuple[int, bool]] = ((1, True), (2, True), (2, True), (3, True), (4, True), (1, False))  # residues, paged
    spare: Sequence[int] = (0, 1, 2, 4, 8)

    @initialize(data=st.data(), borrow=st.sampled_from([True, True, True, False]))
    def start(self, data: st.DataObject, borrow: bool) -> None:
        residues, paged = data.draw(st.sampled_from(self.layouts))
        owner_pages = WINDOW + data.draw(st.sampled_from(self.spare))
        self.begin(small_plan(residues, paged, owner_pages, lanes=LANES if residues == 1 else 2 * LANES), borrow)
        self.leases = [self.kind(self.plan, HEADROOM, clock=lambda: 0.0, borrow=borrow) for _ in range(2)]
        for leases in self.leases:
            leases.books = self.books(self.plan.pages, residues)
        for _ in range(data.draw(st.integers(0, self.plan.lanes))):
            self.admit(data, data.draw(st.integers(1, 2 * ROWS)), data.draw(st.none() | st.just(0)), False)

    # ---- comparing -------------------------------------------------------------------------------------------

    def both(self, call: Any) -> Any:
        one, two = call(self.leases[0]), call(self.leases[1])
        assert one == two
        return one

    def check_lease(self, lease: Lease, wanted: Wanted | None) -> None:
        assert wanted is not None
        assert lease.pages == list(wanted.pages)
        request, name = lease.request, lease.request.conversation
        self.held[name], self.shared[name] = list(wanted.pages), wanted.shared
        state = self.states[wanted.state] if wanted.state else None
        if wanted.move is not None:
            self.moves[name] = list(wanted.move)
            self.expected.carry.append(Move(name, self.rank(wanted.move[0]), self.moves[name]))
        loan = self.loan(request, self.owner(name)) if self.plan.split and state is None else []
        assert lease.borrowed == loan
        if loan:
            self.loans[name] = loan
        self.looked_up(request, state, wanted.move is not None)
        assert (lease.resume is None) == (state is None)
        if state is not None and lease.resume is not None:
            assert (lease.resume.state, lease.resume.at, lease.owner) == (state.name, state.at, state.owner)
        if self.stories.get(name) and not request.idle:
            assert lease.shared_prefix == self.parting(name, 0 if state is None else state.at)
            self.seen.append(self.stories[name])

    def settle(self) -> None:
        """The head of the queue is admitted, and the next, as far as pages go; nobody overtakes. Then answers and orders."""
        admitted = self.both(lambda leases: list(leases.admit_waiting()))
        for lease in admitted:
            name = self.queue.pop(0)
            assert lease.request.conversation == name
            self.check_lease(lease, self.wanted(lease.request))
        assert not self.queue or self.wanted(self.requests[self.queue[0]]) is None
        self.make_room_for_the_first()
        lost = self.lost()
        assert [request.conversation for request in self.both(lambda leases: leases.give_up())] == lost
        self.queue = [name for name in self.queue if name not in lost]
        answers = self.both(lambda leases: list(leases.answers()))
        for answer, (name, state) in zip(answers, self.outcomes(), strict=True):
            assert answer.conversation == name
            assert (answer.state is None) == (state is None), answer.reason
            if answer.state is not None and state is not None:
                assert (answer.state.state, answer.state.pages, answer.state.fixed) == (state.name, state.pages, state.fixed)
        assert self.both(lambda leases: leases.take_orders()) == self.expected
        self.expected = Orders()

    def check_admit(self, request: Request) -> None:
        name = request.conversation
        self.requests[name] = request
        self.queue.append(name)
        order = self.in_order()
        wanted = self.wanted(request) if order[0] == name else None
        answer = self.both(lambda leases: leases.admit(request))
        if request.prompt_tokens + (request.max_tokens or 0) > self.plan.context or (
            request.idle and self.found(request) is None
        ):
            assert isinstance(answer, Refusal)
            self.queue.remove(name)
        elif wanted is None:
            assert isinstance(answer, Waiting)
            assert answer.ahead == order.index(name)
            self.queue = order
            if not answer.ahead:
                self.make_room_for_the_first()
        else:
            assert isinstance(answer, Lease)
            self.queue.remove(name)
            self.check_lease(answer, wanted)
        self.settle()

    # ---- calls -----------------------------------------------------------------------------------------------

    @property
    def lanes_left(self) -> list[int]:
        taken = {self.requests[name].lane for name in [*self.held, *self.queue]}
        return [lane for lane in range(self.plan.lanes) if lane not in taken]

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
        most = self.plan.context - old.prompt_tokens if old.max_tokens is None else old.max_tokens
        done = data.draw(st.integers(0, most))
        lane = data.draw(st.sampled_from(self.lanes_left))
        again = replace(old, lane=lane, prompt_tokens=old.prompt_tokens + done, max_tokens=most - done, returning=True)
        self.check_admit(again)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """Needs of some, in any order: of those told to park, of those that move, and of strangers too. What is unmet stays
        owed."""
        names = data.draw(st.lists(st.sampled_from([*sorted(self.held), 10**6]), min_size=1, unique=True))
        rows = st.just(self.plan.context + 1) | st.integers(0, self.plan.context + 2 * ROWS)
        self.check_extend([(name, data.draw(rows)) for name in names])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """Everyone, or everyone of one owner, gets a page further."""
        rank = data.draw(st.none() | st.sampled_from(self.ranks))
        names = [name for name in self.held if rank is None or self.owner(name) == rank]
        self.check_extend([(name, self.plan.page_rows * (len(self.held[name]) + 1)) for name in names])

    def check_extend(self, needs: Sequence[tuple[int, int]]) -> None:
        names = [name for name, _ in needs]
        for name, rows in needs:
            if name in self.held and name not in self.parking and name not in self.moves:
                self.owed[name] = max(0, min(-(-rows // self.plan.page_rows), WINDOW) - len(self.held[name]))
        for rank in sorted({self.owner(name) for name in names if name in self.held and self.owed.get(name)}):
            self.relieve(rank)
        park, self.expected.park = self.expected.park, []
        granted = {}
        for name in sorted(names):
            pages = self.held.get(name, [])
            ids = self.of(self.owner(name))[: self.owed.get(name, 0)] if pages else []
            granted[name] = Grant(name, len(pages), ids)
            if pages:
                self.held[name] = pages + ids
                self.owed[name] = self.owed.get(name, 0) - len(ids)
        answer = self.both(lambda leases: leases.extend(needs))
        assert answer == Extension([granted[name] for name in names], sorted(park, reverse=True))
        self.settle()

    @rule()
    def send_round(self) -> None:
        self.sent += 1
        for places in (self.held, self.loans, self.moves):
            for page in [page for pages in places.values() for page in pages]:
                self.touched[page] = max(self.touched[page], self.sent)

    @precondition(lambda self: self.sent > self.answered_to)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """Any number of rounds stays in flight. Releases and arrivals that are repeated, or come after the end, do nothing."""
        self.answered_to = data.draw(st.integers(self.answered_to, self.sent))
        name = data.draw(st.integers(0, self.names))
        assert name in self.loans or self.both(lambda leases: leases.released(name, 0)) == 0
        assert name in self.moves or self.both(lambda leases: leases.carried(name, 0)) is None
        self.both(lambda leases: leases.answered(self.answered_to))
        self.settle()

    def touch(self, pages: Sequence[int], ahead: int) -> int:
        """The fence of pages that are given back: the last round that touches them may not be sent yet."""
        for page in pages:
            self.touched[page] = max(self.touched[page], self.sent + ahead)
        return self.sent + ahead

    @precondition(lambda self: self.loans)
    @rule(data=st.data(), ahead=st.integers(0, 1))
    def release(self, data: st.DataObject, ahead: int) -> None:
        """Told to or not, while it is carried or parks, too."""
        name = data.draw(st.sampled_from(sorted(self.loans)))
        pages = self.loans.pop(name, [])
        self.recalled.discard(name)
        fence = self.touch(pages, ahead)
        assert self.both(lambda leases: leases.released(name, fence)) == len(pages)
        self.settle()

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), ahead=st.integers(0, 1))
    def arrive(self, data: st.DataObject, ahead: int) -> None:
        """An arrival ends a loan, too. The new owner may have run dry meanwhile."""
        name = data.draw(st.sampled_from(sorted(self.moves)))
        fence = self.touch([*self.held[name], *self.loans.pop(name, [])], ahead)
        self.recalled.discard(name)
        self.held[name] = pages = self.moves.pop(name)
        self.shared[name] = 0
        self.relieve(self.owner(name))
        move = self.both(lambda leases: leases.carried(name, fence))
        assert move == Move(name, self.owner(name), pages)
        self.settle()

    @precondition(lambda self: self.held and self.plan.split)
    @rule(data=st.data(), known=st.integers(0, 9))
    def carry(self, data: st.DataObject, known: int) -> None:
        """By hand: anyone but the idle, anywhere."""
        name = data.draw(st.sampled_from(sorted(self.held))) if known else 10**6
        rank = data.draw(st.none() | st.integers(0, self.plan.residues))
        others = [other for other in self.ranks if name in self.held and other != self.owner(name)]
        to = self.richest(others) if rank is None and others else rank
        stays = name in self.held and name in self.tenants(self.owner(name)) and not self.requests[name].idle
        wanted = None
        if stays and to in others and self.room(to) >= self.size_elsewhere(name) and not self.being_kept(name):
            wanted = self.move(name, to)
        assert self.both(lambda leases: by_hand(leases, name, rank)) == wanted
        self.settle()

    @precondition(lambda self: self.parking)
    @rule(data=st.data(), ahead=st.integers(0, 2))
    def park(self, data: st.DataObject, ahead: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.parking)))
        if not self.requests[name].idle:
            self.parked.add(name)
        self.leave(name, ahead)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), ahead=st.integers(0, 2))
    def finish(self, data: st.DataObject, ahead: int) -> None:
        """Some end before they are parked, or while they move."""
        self.leave(data.draw(st.sampled_from(sorted(self.held))), ahead)

    def leave(self, name: int, ahead: int) -> None:
        self.parking.discard(name)
        self.recalled.discard(name)
        self.owed.pop(name, None)
        pages = [*self.held.pop(name), *self.loans.pop(name, []), *self.moves.pop(name, [])]
        fence = self.touch(pages, ahead)
        self.unpin(name, fence)
        assert self.both(lambda leases: leases.finish(name, fence)) == len(pages)
        self.settle()

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def cancel_waiting(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.queue))
        self.queue.remove(name)
        assert self.both(lambda leases: leases.finish(name, self.sent)) == 0
        self.settle()

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "plan"):
            return
        places = self.places()
        for leases in self.leases:
            assert leases.check_integrity() == []
            assert {name: lease.pages for name, lease in leases.running.items()} == self.held
            assert {name: lease.owner for name, lease in leases.running.items()} == {
                name: self.owner(name) for name in self.held
            }
            assert [one.request.conversation for one in leases.waiting] == self.queue
            assert leases.parking == self.parking
            assert leases.owed == {name: pages for name, pages in self.owed.items() if pages}
            assert shown(leases) == places
            states = leases.kept.states.values()
            assert {state.state: state.pinned for state in states} == {s.name: self.pinned(s) for s in self.states.values()}
            assert {state.state: state.phase.value for state in states} == {s.name: s.phase for s in self.states.values()}
            assert {key: count for key, count in asdict(leases.kept.counts).items() if count} == +self.counts

    def places(self) -> dict[int, tuple[int, int, int]]:
        """What operators should see of every id: its kind, the conversation and the state with the lowest numbers."""
        free = {page for rank in self.ranks for page in self.of(rank)}
        kinds = {page: pb.PAGE_KIND_FREE if page in free else pb.PAGE_KIND_FENCED for page in self.unheld}
        who, which = dict.fromkeys(range(self.plan.pages), 0), dict.fromkeys(range(self.plan.pages), 0)
        for state in sorted(self.states.values(), key=lambda state: -state.name):
            kinds |= dict.fromkeys(state.ids, pb.PAGE_KIND_KEPT)
            which |= dict.fromkeys(state.ids, state.name)
        for name in sorted(self.held, reverse=True):
            ids = [*self.held[name], *self.moves.get(name, [])]
            kinds |= dict.fromkeys(ids, pb.PAGE_KIND_LIVE) | dict.fromkeys(self.loans.get(name, []), pb.PAGE_KIND_BORROWED)
            who |= dict.fromkeys([*ids, *self.loans.get(name, [])], name)
        return {page: (kinds[page], who[page], which[page]) for page in range(self.plan.pages)}


def by_hand(leases: Leases, name: int, rank: int | None) -> Move | None:
    try:
        return carry_by_hand(leases, name, rank)
    except CarryError:
        return None


def shown(leases: Leases) -> dict[int, tuple[int, int, int]]:
    """Kind, conversation and state of every id, as operators see them."""
    runs = page_runs(leases)
    return {run.first + at * run.stride: (run.kind, run.conversation, run.state) for run in runs for at in range(run.count)}


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=40, stateful_step_count=100, deadline=None)


@pytest.mark.full
def test_many_long_runs() -> None:
    many = settings(max_examples=600, stateful_step_count=150, deadline=None)
    run_state_machine_as_test(LeaseMachine, settings=many)  # type: ignore[no-untyped-call]
