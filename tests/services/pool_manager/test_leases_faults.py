"""Faults planted into books and leases, each of which the state machine must catch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_leases_machine import LeaseMachine

from services.pool_manager.books import Books
from services.pool_manager.lease import Lease, Move, Refusal, Request, Waiting
from services.pool_manager.leases import Leases

pytestmark = pytest.mark.timeout(900)


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

    def coming(self, owner: int, more: Iterable[int] = ()) -> int:
        return self.books.fenced(owner)


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


class LendsWhatIsOwed(Leases):
    def lend(self, request: Request, owner: int) -> list[int]:
        owed, self.owed = self.owed, {}
        try:
            return Leases.lend(self, request, owner)
        finally:
            self.owed = owed


class LendsWhileOthersWait(Leases):
    def lend(self, request: Request, owner: int) -> list[int]:
        waiting, self.waiting = self.waiting, []
        try:
            return Leases.lend(self, request, owner)
        finally:
            self.waiting = waiting


class LendsRankByRank(Leases):
    """All ids of a rank, then all of the next, instead of slot by slot."""

    def lend(self, request: Request, owner: int) -> list[int]:
        return sorted(Leases.lend(self, request, owner), key=lambda page: page % self.books.residues)


class ForgetsTheLoan(Leases):
    def finish(self, conversation: int, fence: int) -> int:
        if conversation in self.running:
            self.running[conversation].borrowed = []
        return Leases.finish(self, conversation, fence)


class ForgetsTheMove(Leases):
    def finish(self, conversation: int, fence: int) -> int:
        if conversation in self.running:
            self.running[conversation].move = None
        return Leases.finish(self, conversation, fence)


class KeepsTheOldPages(Leases):
    def carried(self, conversation: int, fence: int) -> Move | None:
        lease = self.running.get(conversation)
        if lease is not None and lease.move is not None:
            lease.pages = []
        return Leases.carried(self, conversation, fence)


class FreesTheOldPagesAtOnce(Leases):
    def carried(self, conversation: int, fence: int) -> Move | None:
        return Leases.carried(self, conversation, 0)


class FreesTheLoanAtOnce(Leases):
    def released(self, conversation: int, fence: int) -> int:
        return Leases.released(self, conversation, 0)


class GrantsWhatMoves(Leases):
    def lacking(self, conversation: int, rows: int) -> int:
        lease = self.running.get(conversation)
        move = None if lease is None else lease.move
        if lease is None or move is None:
            return Leases.lacking(self, conversation, rows)
        lease.move = None
        try:
            return Leases.lacking(self, conversation, rows)
        finally:
            lease.move = move


class CarriesWithoutSlack(Leases):
    def move_size(self, conversation: int) -> int:
        return len(self.running[conversation].pages) + self.owed.get(conversation, 0)


class RecallsAgain(Leases):
    """What is recalled already does not count."""

    def recall(self, conversation: int) -> None:
        Leases.recall(self, conversation)
        lease = self.running[conversation]
        lease.recalled = not lease.recalled if self.orders.recall.count(conversation) == 1 else True


_BOOKS = [FreesBeforeTheFence, FreesTooEarly, LosesAPage, GivesAPageTwice, GivesTheHighest]
_QUICK = [ParksTheOldest, KnowsOneClass]
_SLOW = [
    ReturnsWithoutHeadroom,
    ParksAgain,
    ParksThoughFencedPagesCome,
    AdmitsIntoWhatIsOwed,
    ReturnsWithHalfItsTokens,
    ReturnsLikeNew,
]
_OWNERS_QUICK = [LendsWhileOthersWait, LendsRankByRank, ForgetsTheLoan, FreesTheLoanAtOnce]
_OWNERS_SLOW = [
    KeepsTheOldPages,
    ForgetsTheMove,
    LendsWhatIsOwed,
    FreesTheOldPagesAtOnce,
    GrantsWhatMoves,
    CarriesWithoutSlack,
    RecallsAgain,
]
_SAMPLE = [*_BOOKS, *_QUICK, *_OWNERS_QUICK]
_REST = [*_SLOW, *_OWNERS_SLOW]


@pytest.mark.parametrize("fault", [*_SAMPLE, *(pytest.param(fault, marks=pytest.mark.full) for fault in _REST)])
def test_the_machine_catches(fault: type[Books] | type[Leases]) -> None:
    owners = fault in [*_OWNERS_QUICK, *_OWNERS_SLOW]
    layouts = [(3, True)] if fault is LendsRankByRank else [(2, True)] if owners else [(1, True)]
    planted: dict[str, Any] = {"books": fault} if issubclass(fault, Books) else {"kind": fault, "layouts": layouts}
    machine = type("Faulty", (LeaseMachine,), planted)
    quick = settings(
        max_examples=3000,  # until it is found; what is drawn depends on the modules that are loaded
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
