"""A plain model of leases: sets of page ids by holder, from which follows what every call must do."""

from __future__ import annotations

from collections.abc import Sequence

from services.pool_manager.lease import Move, Orders, Request
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


class LeaseModel:
    """What two Leases of a plan must have done, from their calls alone. Methods that are verbs change it."""

    def begin(self, plan: Plan, borrow: bool) -> None:
        self.plan = plan
        self.ranks = range(plan.residues)
        self.borrow = borrow
        self.touched = dict.fromkeys(range(self.plan.pages), 0)
        self.held: dict[int, list[int]] = {}  # own pages
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

    def rank(self, page: int) -> int:
        return page % self.plan.residues

    @property
    def unheld(self) -> set[int]:
        held = [page for places in (self.held, self.loans, self.moves) for pages in places.values() for page in pages]
        assert len(held) == len(set(held))
        return set(range(self.plan.pages)) - set(held)

    def of(self, rank: int) -> list[int]:
        """Free ids of a rank whose rounds are all answered, ascending."""
        return sorted(page for page in self.unheld if self.rank(page) == rank and self.touched[page] <= self.answered_to)

    def returning(self, rank: int) -> set[int]:
        """Ids of a rank that will be free though nothing more is ordered."""
        pages = self.unheld - set(self.of(rank))
        for name in self.parking:
            pages |= {*self.held[name], *self.loans.get(name, [])}
        for name in self.moves:
            pages |= set(self.held[name])
        for name in self.recalled & set(self.loans):
            pages |= set(self.loans[name])
        return {page for page in pages if self.rank(page) == rank}

    def owner(self, name: int) -> int:
        return self.rank(self.held[name][0])

    def tenants(self, rank: int) -> list[int]:
        """Those of a rank that stay, the oldest first."""
        return sorted(name for name in self.held if self.owner(name) == rank and name not in self.parking | set(self.moves))

    def owes(self, rank: int) -> int:
        return sum(self.owed.get(name, 0) for name in self.tenants(rank))

    def room(self, rank: int) -> int:
        return len(self.of(rank)) - self.owes(rank)

    def richest(self, ranks: Sequence[int]) -> int:
        return sorted(ranks, key=lambda rank: -self.room(rank))[0]

    def quota(self, request: Request) -> int:
        if not self.plan.paged:
            return WINDOW
        limit = CONTEXT - request.prompt_tokens if request.max_tokens is None else request.max_tokens
        pages, rest = divmod(request.prompt_tokens + min(limit, HEADROOM), ROWS)
        return min(pages + bool(rest) + 1, WINDOW)

    def wanted(self, request: Request) -> list[int] | None:
        """The ids that the request should get now, None if it cannot have its quota."""
        if not self.plan.paged:
            run = list(range(request.lane * WINDOW, (request.lane + 1) * WINDOW))
            return run if set(run) <= set(self.of(0)) else None
        richest, quota = self.richest(self.ranks), self.quota(request)
        return self.of(richest)[:quota] if self.room(richest) >= quota else None

    def loan(self, request: Request, owner: int) -> list[int]:
        """What it should borrow once it has its own pages: nothing while others wait or pages are owed."""
        others = [rank for rank in self.ranks if rank != owner]
        slots = -(-request.prompt_tokens // ROWS)
        if not others or self.queue or not self.borrow:
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
        """The youngest return what they borrow; then the youngest that fit elsewhere move; then the youngest park."""
        while self.lack(rank) > 0:
            if self.borrowers(rank):
                self.recall(self.borrowers(rank)[-1])
                continue
            elsewhere = [other for other in self.ranks if other != rank]
            fit = [
                name for name in self.tenants(rank) if any(self.room(other) >= self.size_elsewhere(name) for other in elsewhere)
            ]
            if fit:
                self.move(fit[-1], self.richest(elsewhere))
            elif len(self.tenants(rank)) > 1:
                name = self.tenants(rank)[-1]
                self.parking.add(name)
                self.owed.pop(name, None)
                self.expected.park.append(name)
            else:
                return

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

    def recall_for_the_first(self) -> None:
        """Only if it fits with what is lent, and not without."""
        if not self.queue or not self.loans:
            return
        quota = self.quota(self.requests[self.queue[0]])
        alone = {rank: self.room(rank) + len(self.returning(rank)) for rank in self.ranks}
        lent = {page for loan in self.loans.values() for page in loan}
        with_loans = {
            rank: alone[rank] + len({p for p in lent if self.rank(p) == rank} - self.returning(rank)) for rank in alone
        }
        best = sorted(self.ranks, key=lambda rank: -with_loans[rank])[0]
        if max(alone.values()) < quota <= with_loans[best]:
            while self.room(best) + len(self.returning(best)) < quota:
                self.recall(self.borrowers(best)[-1])

    def in_order(self) -> list[int]:
        """The queue by class, those that return first and by age, the others by arrival."""
        order = []
        for background in (False, True):
            mine = [name for name in self.queue if self.requests[name].background == background]
            order += sorted(name for name in mine if self.requests[name].returning)
            order += [name for name in mine if not self.requests[name].returning]
        return order
