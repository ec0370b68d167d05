"""A plain model of leases: sets of page ids by holder, from which follows what every call must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from state_model import State, StateModel

from services.pool_manager.kept import Rules
from services.pool_manager.lease import Move, Orders, Request
from services.pool_manager.plan import Plan

ROWS = 64
WINDOW = 5
CONTEXT = (WINDOW - 1) * ROWS
HEADROOM = 40
LANES = 4


def small_plan(residues: int, paged: bool, owner_pages: int, lanes: int = LANES, rows: int = ROWS) -> Plan:
    """A plan of `owner_pages` ids a residue, of so many rows; windows have one run a lane and two pages more."""
    pages = owner_pages * residues if paged else lanes * WINDOW + 2
    return Plan(
        world=max(2, residues),
        paged=paged,
        split=residues > 1,
        context=(WINDOW - 1) * rows,
        lanes=lanes,
        page_rows=rows,
        window_pages=WINDOW,
        stream_pages=pages,
        pages=pages,
        cache_bytes=0,
        kv_dtype="bf16",
        ledgers=(),
    )


@dataclass(frozen=True)
class Wanted:
    """What a request should get: pages of its slots, of which so many are shared with a state, and pages to move to."""

    pages: list[int]
    state: int = 0
    shared: int = 0
    move: list[int] | None = None


class LeaseModel(StateModel):
    """What two Leases of a plan must have done, from their calls alone. Methods that are verbs change it."""

    def begin(self, plan: Plan, borrow: bool, terms: Rules | None = None) -> None:
        self.plan = plan
        self.ranks = range(plan.residues)
        self.borrow = borrow
        self.touched = dict.fromkeys(range(self.plan.pages), 0)
        self.held: dict[int, list[int]] = {}  # own pages
        self.shared: dict[int, int] = {}  # of those, how many are only read
        self.loans: dict[int, list[int]] = {}  # borrowed pages, of those that have any
        self.moves: dict[int, list[int]] = {}  # pages at the new owner, of those that move
        self.recalled: set[int] = set()
        self.requests: dict[int, Request] = {}
        self.queue: list[int] = []
        self.owed: dict[int, int] = {}
        self.parking: set[int] = set()
        self.parked: set[int] = set()
        self.expected = Orders()
        self.sent = self.answered_to = self.names = 0
        self.begin_states(terms)

    def rank(self, page: int) -> int:
        return page % self.plan.residues

    def hands(self) -> dict[int, list[bool]]:
        """For each id that is held, whether each of its holders was told to let go."""
        hands: dict[int, list[bool]] = {}
        for name, pages in self.held.items():
            for page in pages:
                hands.setdefault(page, []).append(name in self.parking or name in self.moves)
        for name, pages in self.loans.items():
            for page in pages:
                hands.setdefault(page, []).append(name in self.recalled or name in self.parking)
        for pages in self.moves.values():
            for page in pages:
                hands.setdefault(page, []).append(False)
        for state in self.states.values():
            for page in state.ids:
                hands.setdefault(page, []).append(state.phase == "forgetting")
        return hands

    @property
    def unheld(self) -> set[int]:
        own = [page for name, pages in self.held.items() for page in pages[self.shared.get(name, 0) :]]
        own += [page for places in (self.loans, self.moves) for pages in places.values() for page in pages]
        own += [page for state in self.states.values() for page in state.fixed]
        assert len(own) == len(set(own))
        return set(range(self.plan.pages)) - set(self.hands())

    def of(self, rank: int) -> list[int]:
        """Free ids of a rank whose rounds are all answered, ascending."""
        return sorted(page for page in self.unheld if self.rank(page) == rank and self.touched[page] <= self.answered_to)

    def returning(self, rank: int) -> set[int]:
        """Ids of a rank that will be free though nothing more is ordered."""
        pages = self.unheld - set(self.of(rank))
        pages |= {page for page, leaving in self.hands().items() if all(leaving)}
        return {page for page in pages if self.rank(page) == rank}

    def owner(self, name: int) -> int:
        return self.rank(self.held[name][0])

    def tenants(self, rank: int) -> list[int]:
        """Those of a rank that stay, the oldest first."""
        return sorted(name for name in self.held if self.owner(name) == rank and name not in self.parking | set(self.moves))

    def idlers(self, rank: int) -> list[int]:
        return [name for name in self.tenants(rank) if self.requests[name].idle]

    def owes(self, rank: int) -> int:
        return sum(self.owed.get(name, 0) for name in self.tenants(rank))

    def room(self, rank: int) -> int:
        return len(self.of(rank)) - self.owes(rank)

    def prospect(self, rank: int) -> int:
        return self.room(rank) + len(self.returning(rank))

    def richest(self, ranks: Sequence[int]) -> int:
        return sorted(ranks, key=lambda rank: -self.room(rank))[0]

    def quota(self, request: Request) -> int:
        if not self.plan.paged:
            return WINDOW
        limit = self.plan.context - request.prompt_tokens if request.max_tokens is None else request.max_tokens
        pages, rest = divmod(request.prompt_tokens + min(limit, HEADROOM), self.plan.page_rows)
        return min(pages + bool(rest) + 1, WINDOW)

    def wanted(self, request: Request) -> Wanted | None:
        """What the request should get now, None if it cannot have its quota."""
        if not self.plan.paged:
            run = list(range(request.lane * WINDOW, (request.lane + 1) * WINDOW))
            return Wanted(run) if set(run) <= set(self.of(0)) else None
        quota, state = self.quota(request), self.found(request)
        if state is not None:
            full = state.pages[: state.at // self.plan.page_rows]
            if self.room(state.owner) >= quota - len(full):
                return Wanted(full + self.of(state.owner)[: quota - len(full)], state.name, len(full))
            others = [rank for rank in self.ranks if rank != state.owner]
            if others and self.portable(state, request) and self.room(to := self.richest(others)) >= quota:
                return Wanted(state.pages, state.name, len(state.pages), self.of(to)[:quota])
        if request.idle:
            return None
        richest = self.richest(self.ranks)
        return Wanted(self.of(richest)[:quota]) if self.room(richest) >= quota else None

    def loan(self, request: Request, owner: int) -> list[int]:
        """What it should borrow once it has its own pages: nothing while others wait or pages are owed."""
        others = [rank for rank in self.ranks if rank != owner]
        slots = -(-request.prompt_tokens // self.plan.page_rows)
        if not others or any(not self.requests[name].idle for name in self.queue) or not self.borrow or request.idle:
            return []
        slots = min([slots, *(max(self.room(rank), 0) for rank in others)])
        return [self.of(rank)[slot] for slot in range(slots) for rank in others]

    def borrowers(self, rank: int) -> list[int]:
        """Those with pages of a rank that nothing brings back yet, the oldest first."""
        pages = self.returning(rank)
        return sorted(name for name, loan in self.loans.items() if any(self.rank(page) == rank for page in set(loan) - pages))

    def lack(self, rank: int) -> int:
        return self.owes(rank) - len(self.of(rank)) - len(self.returning(rank))

    def relieve(self, rank: int) -> None:
        """The idle park; the youngest return what they borrow; states go; then the youngest that fit elsewhere move; then the
        youngest park."""
        while self.lack(rank) > 0:
            if self.idlers(rank):
                self.park_soon(self.idlers(rank)[-1])
            elif self.borrowers(rank):
                self.recall(self.borrowers(rank)[-1])
            elif self.victims():
                self.evict(self.victims()[0], "pages")
            elif fit := self.movers(rank):
                self.move(fit[-1], self.richest([other for other in self.ranks if other != rank]))
            elif len(self.tenants(rank)) > 1:
                self.park_soon(self.tenants(rank)[-1])
            else:
                return

    def movers(self, rank: int) -> list[int]:
        elsewhere = [other for other in self.ranks if other != rank]
        return [
            name
            for name in self.tenants(rank)
            if not self.being_kept(name) and any(self.room(other) >= self.size_elsewhere(name) for other in elsewhere)
        ]

    def park_soon(self, name: int) -> None:
        self.parking.add(name)
        self.owed.pop(name, None)
        self.expected.park.append(name)

    def recall(self, name: int) -> None:
        self.recalled.add(name)
        self.expected.recall.append(name)

    def size_elsewhere(self, name: int) -> int:
        return min(len(self.held[name]) + self.owed.get(name, 0) + 1, WINDOW)

    def move(self, name: int, rank: int) -> Move:
        self.moves[name] = self.of(rank)[: self.size_elsewhere(name)]
        self.owed.pop(name, None)
        if name in self.loans and name not in self.recalled:
            self.recall(name)
        self.expected.carry.append(Move(name, rank, self.moves[name]))
        return self.expected.carry[-1]

    def make_room_for_the_first(self) -> None:
        """Only if it fits with what can be ordered back, and not without: on its state's owner first, where it can be carried
        to next, else afresh."""
        if not self.queue or not self.plan.paged:
            return
        request = self.requests[self.queue[0]]
        quota, state = self.quota(request), self.found(request)
        ways: list[tuple[int, int, State | None]] = []
        if state is not None:
            ways.append((state.owner, quota - state.at // self.plan.page_rows, state))
            others = [rank for rank in self.ranks if rank != state.owner]
            if others and self.portable(state, request):
                ways.append((max(others, key=lambda rank: (len(self.at_best(rank, False, state)), -rank)), quota, state))
        if not request.idle:
            ways.append(
                (max(self.ranks, key=lambda rank: (len(self.at_best(rank, False)) - self.owes(rank), -rank)), quota, None)
            )
        if any(self.prospect(rank) >= need for rank, need, _ in ways):
            return
        for rank, need, spared in ways:
            if len(self.at_best(rank, request.idle, spared)) - self.owes(rank) >= need:
                self.fetch(rank, need, spared, request.idle)
                return

    def lost(self) -> list[int]:
        """Idle ones that wait though nothing would help them."""
        lost = []
        for name in self.queue:
            request = self.requests[name]
            state = self.found(request) if request.idle else None
            busy = any(not self.requests[other].idle for other in self.held)
            if request.idle and state is None:
                lost.append(name)
            elif state is not None and not busy:
                need = self.quota(request) - state.at // self.plan.page_rows
                if len(self.at_best(state.owner, True, state)) - self.owes(state.owner) < need:
                    lost.append(name)
        return lost

    def at_best(self, rank: int, idle: bool, spared: State | None = None) -> set[int]:
        """Ids of a rank that would be free, or owed, if everything came back that may be ordered back for an admission."""
        goes = {page for state in self.victims() if state is not spared for page in state.ids}
        more: dict[int, int] = dict.fromkeys(goes, 0)
        for state in self.victims():
            for page in state.ids if state is not spared else ():
                more[page] += 1
        if not idle:
            lent = [page for name, loan in self.loans.items() if name not in self.recalled | self.parking for page in loan]
            for page in [*lent, *(page for name in self.idlers(rank) for page in self.held[name])]:
                more[page] = more.get(page, 0) + 1
        back = {page for page, leaving in self.hands().items() if leaving.count(False) == more.get(page, 0)}
        return {page for page in back | self.unheld if self.rank(page) == rank}

    def fetch(self, rank: int, need: int, spared: State | None, idle: bool) -> None:
        while self.prospect(rank) < need:
            victims = [state for state in self.victims() if state is not spared]
            if self.idlers(rank) and not idle:
                self.park_soon(self.idlers(rank)[-1])
            elif self.borrowers(rank) and not idle:
                self.recall(self.borrowers(rank)[-1])
            elif victims:
                self.evict(victims[0], "pages")
            else:
                return

    def in_order(self) -> list[int]:
        """The queue by class, those that return first and by age, the others by arrival."""
        order = []
        for rung in ((False, False), (False, True), (True, False), (True, True)):
            mine = [name for name in self.queue if (self.requests[name].idle, self.requests[name].background) == rung]
            order += sorted(name for name in mine if self.requests[name].returning)
            order += [name for name in mine if not self.requests[name].returning]
        return order
