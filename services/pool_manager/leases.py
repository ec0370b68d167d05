"""Conversations and the pages they lease: admission by quota, loans, extension, carries, parking, end, and the queue.

Source: design section 5. One object lives as long as one router's term; rounds are counted from 1 in it, and any number of
them may be unanswered. Conversation ids increase in order of arrival, so that the youngest has the highest. What is done when
pages run out is in `relief`.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.pool_manager import relief
from services.pool_manager.books import Books
from services.pool_manager.lease import Extension, Grant, Lease, Move, Orders, Refusal, Request, Waiting
from services.pool_manager.plan import Plan


@dataclass(slots=True)
class Leases:
    """The live leases of one term over the plan's pages.

    headroom: rows of a reply that admission reserves. clock: seconds, for ages only; no decision reads it. borrow: lend free
    pages of other owners to prompts that are being computed.
    owed: pages that running conversations asked for and have not got; admissions, loans and carries leave them alone.
    parking: running conversations that the router was told to park, until it finishes them; their pages are as good as free.
    orders: what the router must be told, until `take_orders`.
    """

    plan: Plan
    headroom: int
    clock: Callable[[], float] = time.monotonic
    borrow: bool = True
    books: Books = field(init=False)
    running: dict[int, Lease] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)
    owed: dict[int, int] = field(default_factory=dict)
    parking: set[int] = field(default_factory=set)
    orders: Orders = field(default_factory=Orders)

    def __post_init__(self) -> None:
        self.books = Books(self.plan.pages, self.plan.residues)

    # ---- asking: changes nothing -------------------------------------------------------------------------------

    def refusal(self, request: Request) -> str | None:
        """Why it can never be served, with numbers; None if it can."""
        plan, tokens = self.plan, request.prompt_tokens + (request.max_tokens or 0)
        asked = f"a prompt of {request.prompt_tokens} tokens"
        if request.max_tokens is not None:
            asked += f" and max_tokens {request.max_tokens}"
        if tokens > plan.context:
            return (
                f"context too long: {asked} make {tokens} tokens, and the group serves conversations of up to "
                f"{plan.context}: shorten it, or serve with a larger --context"
            )
        quota, pool = max(self.quota(request), self._pages_of(tokens)), plan.pages // plan.residues
        if quota > pool:
            return (
                f"larger than the pool: {asked} need {quota} pages of {plan.page_rows} rows, and one rank has {pool}: "
                f"shorten it, or serve with more room"
            )
        return None

    def quota(self, request: Request) -> int:
        """Pages reserved and mapped at admission; a window's lane has all of them."""
        if not self.plan.paged:
            return self.plan.window_pages
        limit = self.plan.context - request.prompt_tokens if request.max_tokens is None else request.max_tokens
        return self._pages_of(request.prompt_tokens + min(limit, self.headroom))

    def unreserved(self, owner: int) -> int:
        """Free pages that no running conversation of this owner waits for; negative while more are owed than are free."""
        return self.books.free(owner) - self._owed(owner)

    def owner(self) -> int:
        """The residue with the most unreserved pages, ties to the lowest."""
        return max(range(self.books.residues), key=lambda residue: (self.unreserved(residue), -residue))

    def can_admit(self, request: Request) -> bool:
        """Whether its quota is free and unreserved now, whoever waits. Nobody is parked for it."""
        if not self.plan.paged:
            return self.books.can_take_run(request.lane * self.plan.window_pages, self.plan.window_pages)
        return self.quota(request) <= self.unreserved(self.owner())

    def lacking(self, conversation: int, rows: int) -> int:
        """Pages still to be mapped for `rows` rows, never past the window; 0 for one that parks, moves or does not run."""
        lease = self.running.get(conversation)
        if lease is None or conversation in self.parking or lease.move is not None:
            return 0
        return max(0, min(-(-rows // self.plan.page_rows), self.plan.window_pages) - len(lease.pages))

    def coming(self, owner: int) -> int:
        """Pages of this owner that come back without another order: fenced, parking, carried away, recalled."""
        pages = self.books.fenced(owner)
        for name, lease in self.running.items():
            if lease.owner != owner:
                pages += self._slots_lent(lease) * lease.recalled
            elif name in self.parking or lease.move is not None:
                pages += len(lease.pages)
        return pages

    def lent(self, owner: int) -> int:
        """Pages of this owner that are lent and not recalled."""
        return sum(self._slots_lent(one) for one in self.running.values() if one.owner != owner and not one.recalled)

    def prospect(self, owner: int) -> int:
        """Pages that are unreserved once everything came back; negative while more are owed than will be free."""
        return self.unreserved(owner) + self.coming(owner)

    def shortfall(self, owner: int) -> int:
        """Pages owed that neither free pages of this owner nor those that come back cover: relief is due above 0."""
        return self._owed(owner) - self.books.free(owner) - self.coming(owner)

    def staying(self, owner: int) -> list[int]:
        """Conversations of this owner that neither park nor move."""
        return [
            name
            for name, lease in self.running.items()
            if lease.owner == owner and name not in self.parking and lease.move is None
        ]

    def youngest(self, owner: int) -> int | None:
        """Who parks next; None where at most one conversation of this owner stays: a window fits, so it goes on alone once
        those that move here have arrived and gone."""
        staying = self.staying(owner)
        return max(staying) if len(staying) > 1 else None

    def move_size(self, conversation: int) -> int:
        """Pages that it needs at another owner: those it has and is owed, and one of slack, lest it comes straight back."""
        pages = len(self.running[conversation].pages) + self.owed.get(conversation, 0) + 1
        return min(pages, self.plan.window_pages)

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is fenced."""
        return not self.running and not self.waiting and not any(map(self.books.fenced, range(self.books.residues)))

    # ---- acting ------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> Lease | Waiting | Refusal:
        """Leases its quota, queues it, or says why it can never be served. It overtakes only those whose turn is later.
        Raises ValueError for a conversation or lane that is in use or not of the plan: the router's mistake."""
        self._check(request)
        reason = self.refusal(request)
        if reason is not None:
            return Refusal(reason)
        ahead = bisect_right(self.waiting, request.turn, key=lambda one: one.request.turn)
        if not ahead and self.can_admit(request):
            return self._lease(request)
        free = max(0, self.unreserved(self.owner()))
        reason = f"waits for pages: {self.quota(request)} are needed, {free} are free, {ahead} wait before it"
        self.waiting.insert(ahead, waiting := Waiting(request, ahead, reason, self.clock()))
        if not ahead:
            relief.recall_for(self, request)
        return waiting

    def admit_waiting(self) -> Iterator[Lease]:
        """Admits from the head of the queue as far as pages go, and recalls for the next. Call it after every other call but
        `admit`, and take all it gives."""
        while self.waiting and self.can_admit(self.waiting[0].request):
            yield self._lease(self.waiting.pop(0).request)
        if self.waiting:
            relief.recall_for(self, self.waiting[0].request)

    def extend(self, needs: Sequence[tuple[int, int]]) -> Extension:
        """Pages towards so many mapped rows of each (conversation, rows), never past the window. Relieves owners that run dry;
        the oldest get what is free first. What is not granted now stays owed until it is asked again and granted."""
        rows = dict(needs)
        for conversation in rows:
            self._owe(conversation, self.lacking(conversation, rows[conversation]))
        for owner in sorted({self.running[conversation].owner for conversation in rows if conversation in self.owed}):
            relief.relieve(self, owner)
        park, self.orders.park = self.orders.park, []
        granted = {conversation: self._grant(conversation) for conversation in sorted(rows)}
        return Extension([granted[conversation] for conversation in rows], sorted(park, reverse=True))

    def released(self, conversation: int, fence: int) -> int:
        """Its borrowed pages come back, and are free once rounds up to `fence` are answered. Returns how many; 0 where it has
        none."""
        lease = self.running.get(conversation)
        if lease is None:
            return 0
        ids, lease.borrowed, lease.recalled = lease.borrowed, [], False
        self.books.give_back(ids, fence)
        return len(ids)

    def carried(self, conversation: int, fence: int) -> Move | None:
        """It has arrived at its new owner: old pages, and borrowed ones whose release did not come before, are free once
        rounds up to `fence` are answered. None where it was not on its way. The new owner may have run dry meanwhile, and is
        relieved."""
        lease = self.running.get(conversation)
        if lease is None or lease.move is None:
            return None
        self.released(conversation, fence)
        move, lease.move = lease.move, None
        self.books.give_back(lease.pages, fence)
        lease.pages, lease.owner = move.pages, move.owner
        relief.relieve(self, lease.owner)
        return move

    def finish(self, conversation: int, fence: int) -> int:
        """Ends a conversation, waiting or running; all its ids are free once rounds up to `fence` are answered. Returns
        how many it held; 0 where it held none or is unknown."""
        lease = self.running.pop(conversation, None)
        if lease is None:
            self.waiting = [one for one in self.waiting if one.request.conversation != conversation]
            return 0
        self.owed.pop(conversation, None)
        self.parking.discard(conversation)
        self.books.give_back(ids := list(lease.ids()), fence)
        return len(ids)

    def answered(self, seq: int) -> None:
        """All rounds up to `seq` are answered by every rank."""
        self.books.answered(seq)

    def take_orders(self) -> Orders:
        """What to tell the router since the last call."""
        orders, self.orders = self.orders, Orders()
        return orders

    # ---- acting, for relief ------------------------------------------------------------------------------------

    def recall(self, conversation: int) -> None:
        """Orders the release of its borrowed pages."""
        self.running[conversation].recalled = True
        self.orders.recall.append(conversation)

    def move(self, conversation: int, owner: int) -> Move:
        """Leases pages of another owner and orders the carry. It gets what it is owed there, and returns what it borrows."""
        lease = self.running[conversation]
        lease.move = move = Move(conversation, owner, self.books.take(owner, self.move_size(conversation)))
        self.owed.pop(conversation, None)
        if lease.borrowed and not lease.recalled:
            self.recall(conversation)
        self.orders.carry.append(move)
        return move

    def park(self, conversation: int) -> None:
        """Orders its end for now; its pages, borrowed ones too, come back with `finish`."""
        self.parking.add(conversation)
        self.running[conversation].recalled = True
        self.owed.pop(conversation, None)
        self.orders.park.append(conversation)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _pages_of(self, tokens: int) -> int:
        """Pages of so many rows and the slack of a decode window; never more than a window has."""
        return min(-(-tokens // self.plan.page_rows) + 1, self.plan.window_pages)

    def _check(self, request: Request) -> None:
        if not 0 <= request.lane < self.plan.lanes:
            raise ValueError(f"lane {request.lane}: the plan has lanes 0 to {self.plan.lanes - 1}")
        if request.prompt_tokens < 1:
            raise ValueError("an empty prompt")
        for other in [lease.request for lease in self.running.values()] + [one.request for one in self.waiting]:
            if other.conversation == request.conversation:
                raise ValueError(f"conversation {request.conversation} is admitted already")
            if other.lane == request.lane:
                raise ValueError(f"lane {request.lane} belongs to conversation {other.conversation}")

    def _owed(self, owner: int) -> int:
        return sum(pages for name, pages in self.owed.items() if self.running[name].owner == owner)

    def _owe(self, conversation: int, pages: int) -> None:
        if pages:
            self.owed[conversation] = pages
        else:
            self.owed.pop(conversation, None)

    def _grant(self, conversation: int) -> Grant:
        lease = self.running.get(conversation)
        if lease is None:
            return Grant(conversation, 0, [])
        first, owed = len(lease.pages), self.owed.get(conversation, 0)
        ids = self.books.take(lease.owner, min(owed, self.books.free(lease.owner)))
        lease.pages += ids
        self._owe(conversation, owed - len(ids))
        return Grant(conversation, first, ids)

    def _lease(self, request: Request) -> Lease:
        quota, owner = self.quota(request), self.owner()
        if self.plan.paged:
            ids = self.books.take(owner, quota)
        else:
            ids = self.books.take_run(request.lane * self.plan.window_pages, self.plan.window_pages)
        lease = self.running[request.conversation] = Lease(request, owner, quota, ids, self.clock(), self._lend(request, owner))
        return lease

    def _lend(self, request: Request, owner: int) -> list[int]:
        """Free and unreserved ids of the other owners for the slots of a prompt, while nobody waits."""
        others = [rank for rank in range(self.books.residues) if rank != owner]
        if not others or not self.borrow or self.waiting:
            return []
        slots = min(-(-request.prompt_tokens // self.plan.page_rows), *(max(0, self.unreserved(rank)) for rank in others))
        lent = [self.books.take(rank, slots) for rank in others]
        return [page for slot in zip(*lent, strict=True) for page in slot]

    def _slots_lent(self, lease: Lease) -> int:
        """Slots whose copies it keeps on borrowed pages: as many pages of every owner but its own."""
        return len(lease.borrowed) // (self.books.residues - 1) if lease.borrowed else 0

    # ---- proof -------------------------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """What is wrong, [] if nothing: the book holds; every id has one holder; every lease has its quota, from one residue,
        within a window, and its loan and its move are of the right residues; only those that run park or are owed, no more
        than a window has and comes free; the queue is in order."""
        violations = self.books.check_integrity([list(lease.ids()) for lease in self.running.values()])
        holders = Counter(page for lease in self.running.values() for page in lease.ids())
        violations += [f"id {page} is leased {count} times" for page, count in sorted(holders.items()) if count > 1]
        violations += [text for lease in self.running.values() for text in self._lease_violations(lease)]
        staying = {name for owner in range(self.books.residues) for name in self.staying(owner)}
        for what, names, allowed in (
            ("parks", self.parking, {name for name, lease in self.running.items() if lease.move is None}),
            ("is owed pages", self.owed.keys(), staying),
        ):
            violations += [f"conversation {name} {what}, but does not run" for name in sorted(names - allowed)]
        if violations:
            return violations
        for owner in range(self.books.residues):
            if self.shortfall(owner) > 0 and self.youngest(owner) is not None:
                violations.append(f"rank {owner} owes {self.shortfall(owner)} pages more than come free, and nobody parks")
        turns = [one.request.turn for one in self.waiting]
        if turns != sorted(turns):
            violations.append(f"the queue is out of order: {[one.request.conversation for one in self.waiting]}")
        return violations

    def _lease_violations(self, lease: Lease) -> Iterator[str]:
        name, window, residues = lease.request.conversation, self.plan.window_pages, self.books.residues
        owed = self.owed.get(name, 0)
        if not lease.quota <= len(lease.pages) <= window - owed:
            yield (
                f"conversation {name} has {len(lease.pages)} pages and is owed {owed}: its quota is {lease.quota}, "
                f"a window {window}"
            )
        if any(page % residues != lease.owner for page in lease.pages):
            yield f"conversation {name} has pages that rank {lease.owner} does not own"
        others = [rank for rank in range(residues) if rank != lease.owner]
        if [page % residues for page in lease.borrowed] != others * self._slots_lent(lease):
            yield f"conversation {name} borrows pages that are not slots of all ranks but {lease.owner}: {lease.borrowed}"
        move = lease.move
        if move is not None and (move.owner == lease.owner or any(page % residues != move.owner for page in move.pages)):
            yield f"conversation {name} moves from rank {lease.owner} to pages that rank {move.owner} does not own"
        if move is not None and not len(lease.pages) <= len(move.pages) <= window:
            yield f"conversation {name} moves {len(lease.pages)} pages to {len(move.pages)}: a window has {window}"
