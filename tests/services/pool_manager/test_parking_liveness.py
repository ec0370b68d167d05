"""A router that obeys: everything it is asked to serve finishes, whatever outgrows its quota, with rounds in flight, loans
that are recalled and carries under way; and nobody is carried to and fro for nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lease_model import small_plan
from test_leases_faults import AdmitsIntoWhatIsOwed, ParksTheOldest

from services.pool_manager.lease import Lease, Move, Refusal, Request
from services.pool_manager.leases import Leases
from services.pool_manager.plan import Plan

ROWS = 64
STEP = 16
"""Tokens of a conversation a round."""
AHEAD = 32


class StuckError(AssertionError):
    pass


@dataclass(slots=True)
class Talk:
    name: int
    prompt: int
    reply: int
    background: bool
    tokens: int = 0
    lane: int = -1
    pages: list[int] = field(default_factory=list)
    admitted: bool = False
    returning: bool = False
    parked: int = 0
    borrowed: int = 0
    recalled: bool = False
    move: Move | None = None
    slices: int = 0
    idle: bool = False

    @property
    def total(self) -> int:
        return self.prompt + self.reply


class ObedientRouter:
    """Two rounds in flight. Parks when told, in the next round, and brings the parked back at the head of their class. A loan
    ends with the fill, or in the round after a recall; a carry takes a slice of a page a round and arrives once the last one
    is answered."""

    def __init__(self, leases: Sequence[Leases], talks: Sequence[Talk]) -> None:
        self.leases = leases
        self.queue = list(talks)
        self.free_lanes = list(range(leases[0].plan.lanes))
        self.seated: dict[int, Talk] = {}
        self.rounds: deque[tuple[int, list[int], list[Move]]] = deque()
        self.sent = 0
        self.finished: list[int] = []
        self.leaving: list[Talk] = []
        self.granted = 0  # pages beyond those at admission
        self.forgone = 0  # at most so many pages that were owed to those who parked
        self.carries = self.recalls = self.lent = 0
        self.forgetting: list[int] = []
        self.enough = 100 + 6 * sum(talk.total for talk in self.queue) // STEP

    def request(self, talk: Talk, tokens: int) -> Request:
        return Request(talk.name, talk.lane, tokens, talk.total - tokens, "", talk.background, talk.returning)

    def limit(self, talk: Talk) -> int:
        """As far as it may go now."""
        return talk.total

    def ended(self, talk: Talk) -> None:
        self.finished.append(talk.name)

    def run(self) -> None:
        while self.queue or self.seated or self.rounds:
            assert self.carries <= self.granted + self.due + self.forgone
            if self.sent > self.enough:
                raise StuckError(f"{len(self.finished)} finished in {self.sent} rounds: they park one another for ever")
            self.seat()
            if not (self.queue or self.seated or self.rounds):
                return
            self.extend()
            moved = self.send()
            if len(self.rounds) == 2 or (self.rounds and not moved):
                self.answer()
            elif not moved and (self.seated or any(not talk.idle for talk in self.queue)):
                raise StuckError(f"{len(self.seated)} seated, {len(self.queue)} queued, nothing moves")

    def seat(self) -> None:
        """The queue's own order, by class; the parked by age at its head."""
        self.queue.sort(key=lambda talk: (talk.idle, talk.background, not talk.returning, talk.name))
        while self.queue and self.free_lanes:
            talk = self.queue.pop(0)
            talk.lane = self.free_lanes.pop(0)
            self.seated[talk.name] = talk
            tokens = max(talk.tokens, talk.prompt)
            answers = [leases.admit(self.request(talk, tokens)) for leases in self.leases]
            assert answers[0] == answers[1]
            assert not isinstance(answers[0], Refusal) or talk.idle
            if isinstance(answers[0], Refusal):
                self.free_lanes.append(self.seated.pop(talk.name).lane)
            if isinstance(answers[0], Lease):
                self.admitted(answers[0])
            self.obey()

    def admitted(self, lease: Lease) -> None:
        talk = self.seated[lease.request.conversation]
        talk.admitted, talk.pages, talk.tokens = True, list(lease.pages), 0
        talk.borrowed, talk.recalled, talk.move, talk.slices = len(lease.borrowed), False, None, 0
        self.lent += talk.borrowed

    def obey(self) -> None:
        """Orders about those who leave mean nothing any more."""
        orders, same = (leases.take_orders() for leases in self.leases)
        assert orders == same
        for name in orders.recall:
            assert self.seated[name].borrowed
            self.recalls += 1
            self.seated[name].recalled = True
        for move in orders.carry:
            talk = self.seated[move.conversation]
            assert len(move.pages) >= len(talk.pages)
            self.carries += 1
            talk.move, talk.slices = move, 0
        self.forgetting += orders.forget
        self.park(orders.park)

    def park(self, names: Sequence[int]) -> None:
        for name in names:
            if self.seated[name] not in self.leaving:  # one that has just ended gives its pages back anyway
                self.seated[name].parked += 1
                self.forgone += self.leases[0].plan.window_pages
                self.leaving.append(self.seated[name])

    @property
    def due(self) -> int:
        """Pages that are owed now, or wait for those that move at their new owners."""
        ahead = sum(len(talk.move.pages) - len(talk.pages) for talk in self.seated.values() if talk.move is not None)
        return sum(self.leases[0].owed.values()) + ahead

    def extend(self) -> None:
        needs = []
        for talk in self.seated.values():
            rows = min(max(talk.tokens, talk.prompt) + AHEAD, talk.total)
            if talk.admitted and talk not in self.leaving and talk.move is None and rows > len(talk.pages) * ROWS:
                needs.append((talk.name, rows))
        if not needs:
            return
        extension, same = (leases.extend(needs) for leases in self.leases)
        assert extension == same
        for grant in extension.grants:
            talk = self.seated[grant.conversation]
            assert grant.first_slot == len(talk.pages)
            talk.pages += grant.pages
            self.granted += len(grant.pages)
        self.park(extension.park)
        self.admit_waiting()

    def send(self) -> bool:
        """Everyone goes on as far as its pages reach; those who leave are freed. Whether there was anything to do."""
        moved = False
        self.sent += 1
        arriving = []
        for talk in self.seated.values():
            if not talk.admitted or talk in self.leaving:
                continue
            if talk.borrowed and (talk.recalled or talk.tokens >= talk.prompt):
                talk.borrowed = 0
                for leases in self.leases:
                    leases.released(talk.name, self.sent)
            if talk.move is not None:
                talk.slices += 1
                moved |= talk.slices <= len(talk.move.pages)
                arriving += [talk.move] * (talk.slices == len(talk.move.pages))
                continue
            before, talk.tokens = talk.tokens, min(talk.tokens + STEP, self.limit(talk), len(talk.pages) * ROWS)
            moved |= talk.tokens > before
        lanes = []
        for talk in self.leaving:
            for leases in self.leases:
                leases.finish(talk.name, self.sent)
            lanes.append(talk.lane)
            del self.seated[talk.name]
            if talk.tokens == talk.total:
                self.ended(talk)
            elif not talk.idle:
                talk.admitted, talk.returning = False, True
                self.queue.append(talk)
        moved |= bool(self.leaving)
        self.leaving = [talk for talk in self.seated.values() if talk.tokens == talk.total]
        if moved:
            self.rounds.append((self.sent, lanes, arriving))
        else:
            self.sent -= 1
        return moved

    def answer(self) -> None:
        seq, lanes, arriving = self.rounds.popleft()
        self.free_lanes += lanes
        for move in arriving:
            talk = self.seated.get(move.conversation)
            if talk is None or talk.move is not move:
                continue  # it has ended, and gave back both
            self.granted += len(move.pages) - len(talk.pages)
            talk.pages, talk.move = list(move.pages), None
            for leases in self.leases:
                assert leases.carried(talk.name, seq) == move
        for leases in self.leases:
            leases.answered(seq)
        self.admit_waiting()

    def admit_waiting(self) -> None:
        one, two = (list(leases.admit_waiting()) for leases in self.leases)
        assert one == two
        for lease in one:
            self.admitted(lease)
        self.obey()


def plan_of(window: int, lanes: int, residues: int, spare: int) -> Plan:
    small = small_plan(residues, True, window + -(-lanes // residues) - 1 + spare, lanes)
    return Plan(
        **{name: getattr(small, name) for name in small.__slots__} | {"context": (window - 1) * ROWS, "window_pages": window}
    )


def serve(plan: Plan, headroom: int, talks: Sequence[Talk], kind: type[Leases] = Leases) -> list[Talk]:
    run_to_end(plan, headroom, talks, kind)
    return list(talks)


def run_to_end(plan: Plan, headroom: int, talks: Sequence[Talk], kind: type[Leases] = Leases) -> ObedientRouter:
    """Runs all to their ends; the books are whole and everything came back."""
    leases = [kind(plan, headroom, clock=lambda: 0.0) for _ in range(2)]
    router = ObedientRouter(leases, talks)
    router.run()
    assert sorted(router.finished) == sorted(talk.name for talk in talks)
    for one in leases:
        assert one.check_integrity() == []
        assert one.idle
        assert sum(map(one.books.free, range(plan.residues))) == plan.pages
    return router


@pytest.mark.parametrize("residues", [1, 2])
@pytest.mark.parametrize("window", [5, 17, 33])
def test_eight_lanes_outgrow_their_quota_together_and_all_finish(window: int, residues: int) -> None:
    """Windows hold one of eight; the oldest of a residue goes through, and the parks do not multiply."""
    plan = plan_of(window, lanes=8, residues=residues, spare=0)
    talks = serve(plan, headroom=0, talks=[Talk(name, 1, plan.context - 1, False) for name in range(1, 9)])
    assert talks[0].parked == 0
    assert 0 < sum(talk.parked for talk in talks) <= 8 * 7 / 2


def test_background_waits_but_finishes() -> None:
    plan = plan_of(9, lanes=3, residues=1, spare=0)
    talks = serve(plan, headroom=ROWS, talks=[Talk(name, 100, plan.context - 100, name % 2 == 0) for name in range(1, 11)])
    assert sum(talk.parked for talk in talks) > 0


@st.composite
def loads(draw: st.DrawFn) -> tuple[Plan, int, list[Talk]]:
    lanes, window = draw(st.integers(1, 8)), draw(st.integers(3, 12))
    plan = plan_of(window, lanes, draw(st.sampled_from([1, 2, 2, 3, 4])), draw(st.sampled_from([0, 0, 1, 5])))
    talks = []
    for name in range(1, draw(st.integers(1, 14)) + 1):
        prompt = draw(st.just(1) | st.integers(1, plan.context - 1))
        reply = draw(st.just(plan.context - prompt) | st.integers(1, plan.context - prompt))
        talks.append(Talk(name, prompt, reply, draw(st.booleans())))
    return plan, draw(st.sampled_from([0, 16, ROWS, 200])), talks


@settings(max_examples=60, deadline=None)
@given(load=loads())
def test_whatever_is_asked_for_finishes(load: tuple[Plan, int, list[Talk]]) -> None:
    plan, headroom, talks = load
    serve(plan, headroom, talks)
    assert talks[0].parked == 0
    assert max(talk.parked for talk in talks) <= plan.lanes * plan.window_pages


@pytest.mark.parametrize("residues", [2, 3, 4])
def test_owners_recall_then_carry_then_park(residues: int) -> None:
    """Long prompts borrow; short ones outgrow their owners. Each way out is taken, and all finish."""
    plan = plan_of(17, lanes=4 * residues, residues=residues, spare=3)
    talks = [Talk(name, 500 if name % 3 else 1, (name * 331) % 500 + 24, False) for name in range(1, 6 * residues)]
    router = run_to_end(plan, 0, talks)
    assert router.lent > 0
    assert router.recalls > 0
    assert router.carries > 0
    assert sum(talk.parked for talk in talks) > 0
    assert router.carries < router.granted


def test_one_that_grows_moves_to_a_rank_with_room_and_is_not_computed_again() -> None:
    """Three on two owners: the pair outgrows its owner, and one of it moves to where the third has ended."""
    plan = plan_of(17, lanes=3, residues=2, spare=0)
    router = run_to_end(plan, 0, [Talk(1, 1, 1_000, False), Talk(2, 1, 64, False), Talk(3, 1, 1_000, False)])
    assert (router.carries, router.recalls) == (1, 0)
    assert router.forgone == 0


class CarriesForNothing(Leases):
    """Moves without the pages that it is owed, so that it comes back for them."""

    def move_size(self, conversation: int) -> int:
        return len(self.running[conversation].pages)


@pytest.mark.parametrize(("kind", "few"), [(Leases, True), (CarriesForNothing, False)])
def test_nobody_is_carried_to_and_fro(kind: type[Leases], few: bool) -> None:
    """Sixteen outgrow three owners together."""
    plan = plan_of(33, lanes=8, residues=3, spare=0)
    router = run_to_end(plan, 0, [Talk(name, 1, plan.context - 1, False) for name in range(1, 17)], kind)
    assert (router.carries <= 4) == few


def test_parking_the_oldest_is_caught() -> None:
    plan = plan_of(17, lanes=8, residues=1, spare=0)
    talks = serve(plan, 0, [Talk(name, 1, plan.context - 1, False) for name in range(1, 9)], ParksTheOldest)
    assert talks[0].parked > 0


@pytest.mark.full
def test_admitting_into_what_is_owed_is_caught() -> None:
    """The pages that a park freed go to one that waits, so that the next extension parks again: for ever."""
    plan = plan_of(33, lanes=8, residues=1, spare=0)
    with pytest.raises(StuckError, match="for ever"):
        serve(plan, ROWS, [Talk(name, 1, plan.context - 1, False) for name in range(1, 9)], AdmitsIntoWhatIsOwed)
