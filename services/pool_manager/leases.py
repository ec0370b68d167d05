"""Conversations and the pages they lease: admission by quota, extension, parking, end, and the queue of those that wait.

Source: design section 5. One object lives as long as one router's term; rounds are counted from 1 in it, and any number of
them may be unanswered. Conversation ids increase in order of arrival, so that the youngest has the highest.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.pool_manager.books import Books
from services.pool_manager.plan import Plan


@dataclass(frozen=True, slots=True)
class Request:
    """What a conversation asks for. max_tokens None: until the limit. returning: it was parked; prompt_tokens are all its
    tokens so far and max_tokens those that may still come."""

    conversation: int
    lane: int
    prompt_tokens: int
    max_tokens: int | None = None
    request_id: str = ""
    background: bool = False
    returning: bool = False

    @property
    def turn(self) -> tuple[bool, bool, int]:
        """Its place in the queue: foreground before background, in a class those that return first, and of them the
        oldest; equals in order of arrival."""
        return self.background, not self.returning, self.conversation if self.returning else 0


@dataclass(slots=True)
class Lease:
    """A running conversation: page ids of its slots 0, 1, ..., all of one owner's residue."""

    request: Request
    owner: int
    quota: int
    pages: list[int]
    since: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """It can never be served."""

    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not now: it is in the queue behind `ahead` others, and `admit_waiting` will admit it."""

    request: Request
    ahead: int
    reason: str
    since: float


@dataclass(frozen=True, slots=True)
class Grant:
    """Page ids of the slots first_slot, first_slot + 1, ... of a conversation; as many as were free."""

    conversation: int
    first_slot: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Extension:
    """Grants in the order asked, and the conversations that the router must park now, the youngest first."""

    grants: list[Grant]
    park: list[int]


@dataclass(slots=True)
class Leases:
    """The live leases of one term over the plan's pages.

    headroom: rows of a reply that admission reserves. clock: seconds, for ages only; no decision reads it.
    owed: pages that running conversations asked for and have not got; admissions leave them alone. parking: running
    conversations that the router was told to park, until it finishes them; their pages are as good as free.
    """

    plan: Plan
    headroom: int
    clock: Callable[[], float] = time.monotonic
    books: Books = field(init=False)
    running: dict[int, Lease] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)
    owed: dict[int, int] = field(default_factory=dict)
    parking: set[int] = field(default_factory=set)

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
        """Pages still to be mapped for `rows` rows, never past the window; 0 for one that is parking or does not run."""
        lease = self.running.get(conversation)
        if lease is None or conversation in self.parking:
            return 0
        return max(0, min(-(-rows // self.plan.page_rows), self.plan.window_pages) - len(lease.pages))

    def shortfall(self, owner: int) -> int:
        """Pages owed that neither free, nor fenced, nor parking pages of this owner cover: parking is due above 0."""
        coming = sum(len(self.running[name].pages) for name in self.parking if self.running[name].owner == owner)
        return self._owed(owner) - self.books.free(owner) - self.books.fenced(owner) - coming

    def youngest(self, owner: int) -> int | None:
        """Who parks next; None where at most one conversation of this owner stays: a window fits, so it goes on alone."""
        staying = [name for name, lease in self.running.items() if lease.owner == owner and name not in self.parking]
        return max(staying) if len(staying) > 1 else None

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
        return waiting

    def admit_waiting(self) -> Iterator[Lease]:
        """Admits from the head of the queue as far as pages go. Call it after `finish`, `answered` and `extend`."""
        while self.waiting and self.can_admit(self.waiting[0].request):
            yield self._lease(self.waiting.pop(0).request)

    def extend(self, needs: Sequence[tuple[int, int]]) -> Extension:
        """Pages towards so many mapped rows of each (conversation, rows), never past the window. Parks the youngest of an
        owner until what is owed there is covered; the oldest get what is free first. What is not granted now stays owed
        until it is asked again and granted."""
        rows = dict(needs)
        for conversation in rows:
            self._owe(conversation, self.lacking(conversation, rows[conversation]))
        owners = sorted({self.running[conversation].owner for conversation in rows if conversation in self.owed})
        park = [name for owner in owners for name in self._park(owner)]
        granted = {conversation: self._grant(conversation) for conversation in sorted(rows)}
        return Extension([granted[conversation] for conversation in rows], sorted(park, reverse=True))

    def finish(self, conversation: int, fence: int) -> int:
        """Ends a conversation, waiting or running; its ids are free once rounds up to `fence` are answered. Returns how
        many pages it had; 0 where it had none or is unknown."""
        lease = self.running.pop(conversation, None)
        if lease is None:
            self.waiting = [one for one in self.waiting if one.request.conversation != conversation]
            return 0
        self.owed.pop(conversation, None)
        self.parking.discard(conversation)
        self.books.give_back(lease.pages, fence)
        return len(lease.pages)

    def answered(self, seq: int) -> None:
        """All rounds up to `seq` are answered by every rank."""
        self.books.answered(seq)

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

    def _park(self, owner: int) -> Iterator[int]:
        while self.shortfall(owner) > 0 and (name := self.youngest(owner)) is not None:
            self.parking.add(name)
            self.owed.pop(name, None)
            yield name

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
        lease = self.running[request.conversation] = Lease(request, owner, quota, ids, self.clock())
        return lease

    # ---- proof -------------------------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """What is wrong, [] if nothing: the book holds; every lease has its quota, from one residue, within a window; only
        those that run park, only those that stay are owed, no more than a window has and comes free; the queue is in
        order."""
        violations = self.books.check_integrity([lease.pages for lease in self.running.values()])
        window = self.plan.window_pages
        for conversation, lease in self.running.items():
            if not lease.quota <= len(lease.pages) <= window - self.owed.get(conversation, 0):
                violations.append(
                    f"conversation {conversation} has {len(lease.pages)} pages and is owed {self.owed.get(conversation, 0)}: "
                    f"its quota is {lease.quota}, a window {window}"
                )
            if any(page % self.books.residues != lease.owner for page in lease.pages):
                violations.append(f"conversation {conversation} has pages that rank {lease.owner} does not own")
        for what, names, allowed in (
            ("parks", self.parking, self.running.keys()),
            ("is owed pages", self.owed.keys(), self.running.keys() - self.parking),
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
