"""Conversations and the pages they lease: admission by quota or from kept states, loans, extension, carries, parking, end, and
the queue.

Source: design sections 5 and 6. One object lives as long as one router's term; rounds are counted from 1 in it, and any number
of them may be unanswered. Conversation ids increase in order of arrival, so that the youngest has the highest. Where a
conversation goes is in `placing`, what is done when pages run out in `relief`, how states are kept in `keeping`.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from latentpool.geometry import BLOCK
from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager import keeping, placing, proof, relief
from services.pool_manager.books import Books
from services.pool_manager.kept import Kept, Phase, Rules
from services.pool_manager.lease import (
    Answer,
    Ask,
    Extension,
    Grant,
    Lease,
    Move,
    Orders,
    Refusal,
    Request,
    Waiting,
)
from services.pool_manager.plan import Plan

NOTHING_LEFT = "no kept state has room for it to go on: an idle conversation computes nothing afresh"
"""Why an idle conversation is refused."""


@dataclass(slots=True)
class Leases:
    """The live leases of one term over the plan's pages.

    headroom: rows of a reply that admission reserves. clock: seconds, for ages only; no decision reads it. borrow: lend free
    pages of other owners to prompts that are being computed.
    owed: pages that running conversations asked for and have not got; admissions, loans and carries leave them alone.
    parking: running conversations that the router was told to park, until it finishes them; their pages are as good as free.
    orders: what the router must be told, until `take_orders`.
    rules: of keeping; None: nothing is kept, and `nothing_kept` says why. asked: conversations that want their state kept,
    until `answers`.
    """

    plan: Plan
    headroom: int
    clock: Callable[[], float] = time.monotonic
    borrow: bool = True
    rules: Rules | None = None
    nothing_kept: str = ""
    books: Books = field(init=False)
    running: dict[int, Lease] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)
    owed: dict[int, int] = field(default_factory=dict)
    parking: set[int] = field(default_factory=set)
    orders: Orders = field(default_factory=Orders)
    kept: Kept = field(init=False)
    asked: dict[int, Ask] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kept = Kept(self.plan.residues)
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

    def lacking(self, conversation: int, rows: int) -> int:
        """Pages still to be mapped for `rows` rows, never past the window; 0 for one that parks, moves or does not run."""
        lease = self.running.get(conversation)
        if lease is None or conversation in self.parking or lease.move is not None:
            return 0
        return max(0, min(-(-rows // self.plan.page_rows), self.plan.window_pages) - len(lease.pages))

    def coming(self, owner: int, more: Iterable[int] = ()) -> int:
        """Pages of this owner that come back without another order: fenced, parking, carried away, recalled, forgotten, and
        held by nobody else; with `more`, those too that come back if these ids are let go of once more."""
        leaving = Counter(page for page in chain(self._leaving(), more) if page % self.books.residues == owner)
        back = sum(count == self.books.holders(page) for page, count in leaving.items())
        return self.books.fenced(owner) + back

    def prospect(self, owner: int, more: Iterable[int] = ()) -> int:
        """Pages that are unreserved once everything came back, `more` too; negative while more are owed than will be free."""
        return self.unreserved(owner) + self.coming(owner, more)

    def shortfall(self, owner: int) -> int:
        """Pages owed that neither free pages of this owner nor those that come back cover: relief is due above 0."""
        short = self._owed(owner) - self.books.free(owner)
        return short - self.coming(owner) if short > 0 else short

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
        if request.idle and self.kept.lookup(request.blocks) is None:
            reason = NOTHING_LEFT
        if reason is not None:
            return Refusal(reason)
        ahead = bisect_right(self.waiting, request.turn, key=lambda one: one.request.turn)
        if not ahead and (place := placing.place(self, request)) is not None:
            return placing.lease(self, request, place)
        free = max(0, self.unreserved(self.owner()))
        reason = f"waits for pages: {self.quota(request)} are needed, {free} are free, {ahead} wait before it"
        self.waiting.insert(ahead, waiting := Waiting(request, ahead, reason, self.clock()))
        if not ahead:
            relief.make_room(self, request)
        return waiting

    def admit_waiting(self) -> Iterator[Lease]:
        """Admits from the head of the queue as far as pages go, and makes room for the next. Call it after every other call
        but `admit`, and take all it gives; then `give_up` and `answers`."""
        while self.waiting and (place := placing.place(self, self.waiting[0].request)) is not None:
            yield placing.lease(self, self.waiting.pop(0).request, place)
        if self.waiting:
            relief.make_room(self, self.waiting[0].request)

    def give_up(self) -> list[Request]:
        """Idle ones that wait for nothing leave the queue, refused for good. Call it after `admit_waiting`."""
        gone = [one.request for one in self.waiting if one.request.idle and relief.hopeless(self, one.request)]
        self.waiting = [one for one in self.waiting if one.request not in gone]
        return gone

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
        lease.pages, lease.owner, lease.shared = move.pages, move.owner, 0
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
        self._unpin(lease, fence)
        self.books.give_back(ids := list(lease.ids()), fence)
        return len(ids)

    def answered(self, seq: int) -> None:
        """All rounds up to `seq` are answered by every rank."""
        self.books.answered(seq)
        self.kept.answered(seq)

    def ask_keep(self, conversation: int, at: int, mark: pb.Mark.ValueType) -> None:
        """A conversation wants its state kept at `at` tokens: `answers` says whether it may. Raises ValueError for what no
        router should ask: a second time before the answer, or not at a whole block."""
        if conversation in self.asked:
            raise ValueError(f"conversation {conversation} asks to keep a state before it knows of the last one")
        if at % BLOCK:
            raise ValueError(f"conversation {conversation} asks to keep a state at {at} tokens: a block has {BLOCK}")
        self.asked[conversation] = Ask(conversation, at, mark)

    def answers(self) -> Iterator[Answer]:
        """What came of `ask_keep`. Call it after `give_up`, and take all it gives."""
        return keeping.answers(self)

    def resumed(self, conversation: int, fence: int) -> None:
        """The round that resumes its state is sent: the state is in use until rounds up to `fence` are answered. Nothing where
        it resumes none, did before, or has ended."""
        if (lease := self.running.get(conversation)) is not None:
            self._unpin(lease, fence)

    def report(self, conversation: int, rows: int, decoding: bool) -> None:
        """What a conversation does, for operators."""
        if (lease := self.running.get(conversation)) is not None:
            lease.rows, lease.decoding = rows, decoding

    def take_orders(self) -> Orders:
        """What to tell the router since the last call."""
        orders, self.orders = self.orders, Orders()
        return orders

    # ---- acting, for relief and placing --------------------------------------------------------------------------

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

    def lend(self, request: Request, owner: int) -> list[int]:
        """Free and unreserved ids of the other owners for the slots of a prompt, while nobody waits but the idle."""
        others = [rank for rank in range(self.books.residues) if rank != owner]
        if not others or not self.borrow or (self.waiting and not self.waiting[0].request.idle):
            return []
        slots = min(-(-request.prompt_tokens // self.plan.page_rows), *(max(0, self.unreserved(rank)) for rank in others))
        lent = [self.books.take(rank, slots) for rank in others]
        return [page for slot in zip(*lent, strict=True) for page in slot]

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

    def _unpin(self, lease: Lease, fence: int) -> None:
        state = None if lease.resume is None else self.kept.states.get(lease.resume.state)
        if state is not None and lease.request.conversation in state.pins:
            self.kept.resumed(state, lease.request.conversation, fence)

    def _leaving(self) -> Iterator[int]:
        """Ids that their holders were told to let go of, once a holder."""
        for name, lease in self.running.items():
            if name in self.parking or lease.move is not None:
                yield from lease.pages
            if lease.recalled:
                yield from lease.borrowed
        for state in self.kept.states.values():
            if state.phase is Phase.FORGETTING:
                yield from state.ids()

    def slots_lent(self, lease: Lease) -> int:
        """Slots whose copies it keeps on borrowed pages: as many pages of every owner but its own."""
        return len(lease.borrowed) // (self.books.residues - 1) if lease.borrowed else 0

    # ---- proof -------------------------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """What is wrong, [] if nothing."""
        return proof.check_integrity(self)
