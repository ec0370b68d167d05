"""Conversations and the pages they lease: admission by quota, extension, end, and the queue of those that wait.

Source: design section 5. One object lives as long as one router's term; rounds are counted from 1 in it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.pool_manager.books import Books
from services.pool_manager.plan import Plan


@dataclass(frozen=True, slots=True)
class Request:
    """What a conversation asks for. max_tokens None: until the limit."""

    conversation: int
    lane: int
    prompt_tokens: int
    max_tokens: int | None = None
    request_id: str = ""


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


@dataclass(slots=True)
class Leases:
    """The live leases of one term over the plan's pages.

    headroom: rows of a reply that admission reserves. clock: seconds, for ages only; no decision reads it.
    """

    plan: Plan
    headroom: int
    clock: Callable[[], float] = time.monotonic
    books: Books = field(init=False)
    running: dict[int, Lease] = field(default_factory=dict)
    waiting: deque[Waiting] = field(default_factory=deque)

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

    def owner(self) -> int:
        """The residue with the most free pages, ties to the lowest."""
        return max(range(self.books.residues), key=lambda residue: (self.books.free(residue), -residue))

    def can_admit(self, request: Request) -> bool:
        """Whether its quota is free now, whoever waits."""
        if not self.plan.paged:
            return self.books.can_take_run(request.lane * self.plan.window_pages, self.plan.window_pages)
        return self.quota(request) <= self.books.free(self.owner())

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is fenced."""
        return not self.running and not self.waiting and not self.books.fenced

    # ---- acting ------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> Lease | Waiting | Refusal:
        """Leases its quota, queues it, or says why it can never be served. Nobody overtakes the queue. Raises ValueError
        for a conversation or lane that is in use or not of the plan: the router's mistake."""
        self._check(request)
        reason = self.refusal(request)
        if reason is not None:
            return Refusal(reason)
        if self.waiting or not self.can_admit(request):
            free = self.books.free(self.owner())
            reason = f"waits for pages: {self.quota(request)} are needed, {free} are free, {len(self.waiting)} wait before it"
            self.waiting.append(waiting := Waiting(request, len(self.waiting), reason, self.clock()))
            return waiting
        return self._lease(request)

    def admit_waiting(self) -> Iterator[Lease]:
        """Admits from the head of the queue as far as pages go. Call it after `finish` and `answered`."""
        while self.waiting and self.can_admit(self.waiting[0].request):
            yield self._lease(self.waiting.popleft().request)

    def extend(self, conversation: int, rows: int) -> tuple[int, list[int]]:
        """(first slot, new page ids) towards `rows` mapped rows, never past the window: as many as are free, [] if none
        is needed, free, or the conversation does not run."""
        lease = self.running.get(conversation)
        if lease is None:
            return 0, []
        first = len(lease.pages)
        lacking = min(-(-rows // self.plan.page_rows), self.plan.window_pages) - first
        ids = self.books.take(lease.owner, min(max(0, lacking), self.books.free(lease.owner)))
        lease.pages += ids
        return first, ids

    def finish(self, conversation: int, fence: int) -> int:
        """Ends a conversation, waiting or running; its ids are free once rounds up to `fence` are answered. Returns how
        many pages it had; 0 where it had none or is unknown."""
        lease = self.running.pop(conversation, None)
        if lease is None:
            self.waiting = deque(one for one in self.waiting if one.request.conversation != conversation)
            return 0
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
        """What is wrong, [] if nothing: the book holds, and every lease has its quota, from one residue, within a window."""
        violations = self.books.check_integrity([lease.pages for lease in self.running.values()])
        for conversation, lease in self.running.items():
            if not lease.quota <= len(lease.pages) <= self.plan.window_pages:
                violations.append(
                    f"conversation {conversation} has {len(lease.pages)} pages: its quota is {lease.quota}, "
                    f"a window {self.plan.window_pages}"
                )
            if any(page % self.books.residues != lease.owner for page in lease.pages):
                violations.append(f"conversation {conversation} has pages that rank {lease.owner} does not own")
        return violations
