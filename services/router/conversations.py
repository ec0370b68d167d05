"""A conversation's life: waiting, filling, decoding, perhaps parked and waiting again, ended; and the book of all that live."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from latentpool.errors import LatentPoolError
from latentpool.geometry import BLOCK, R_MAX
from latentpool.sampling import Sampling
from latentpool.v1 import pool_manager_pb2, router_pb2
from services.router.delivery import Mailbox
from services.router.kept import Keeping
from services.router.stops import StopFinder


class Phase(Enum):
    WAITING = "waiting"  # for a lane, then for pages
    FILLING = "filling"  # its prompt is being sent
    DECODING = "decoding"
    PARKED = "parked"  # its pages were given to others: it leaves its lane, then it waits again
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a Score asks for: tokens from `decode_from` on run on the decode path; raw: whole rows of logits."""

    decode_from: int
    raw: bool


@dataclass(slots=True)
class Carry:
    """The way of a conversation's rows to another owner. It holds both owners' pages until the last slice is answered."""

    owner: int
    pages: list[int]
    """Ids of the new owner for slots 0, 1, ...: at least as many as it has pages."""
    sent: int = 0
    """Slots whose slices were sent."""

    @property
    def all_sent(self) -> bool:
        return self.sent == len(self.pages)


@dataclass(slots=True)
class Times:
    """Moments on the loop's clock, in seconds."""

    arrived: float
    admitted: float = 0.0
    first_token: float = 0.0


@dataclass(eq=False, slots=True)
class Conversation:
    """One request between its arrival and its end. `tokens` is the prompt, or all that a Score runs (uint32). `seed` is the
    stated one or the one drawn.

    Rows run ahead of answers: `sent` rows went to the workers, of which `answered` came back. After parking both begin at 0
    again, and rows whose outcome the client has are run as they were, prompt by blocks and the reply by forced windows."""

    id: int
    request_id: str
    tokens: npt.NDArray[np.uint32]
    sampling: Sampling
    seed: int
    stops: frozenset[int]
    limit: int
    """Rows and reply tokens together are at most this many."""
    mailbox: Mailbox
    times: Times
    scoring: Scoring | None = None
    background: bool = False
    idle: bool = False
    """Nobody waits for it: it computes what was said on the prompt path, to keep its state, and gives way to everybody."""
    keeping: Keeping = field(default_factory=Keeping)
    stop_finder: StopFinder | None = None
    phase: Phase = Phase.WAITING
    ahead: int = -1
    """Conversations ahead, as last told to the client."""
    lane: int = -1
    owner: int = 0
    bound: bool = False
    """Whether the workers were told (Bind was sent)."""
    leaving: bool = False
    """Whether its lane is being freed."""
    pages: list[int] = field(default_factory=list)
    tabled: int = 0
    """Pages that the workers were told of."""
    borrowed: list[int] = field(default_factory=list)
    """Pages that other owners lend for its fill, slot by slot from slot 0 on; empty once they are released."""
    recalled: bool = False
    """Whether the borrowed pages go back before anything else is run for it."""
    carry: Carry | None = None
    """Nothing is run for it, and no page is asked for, while its rows are on their way to another owner."""
    asked_rows: int = 0
    """Rows of the extension that the manager has not answered yet, or 0."""
    dry_until: float = 0.0
    """The manager had no page; it is not asked again before this moment."""
    stalled: bool = False
    """Whether it stands still because its client does not read."""
    sent: int = 0
    answered: int = 0
    generated: list[int] = field(default_factory=list)
    stop: str = ""
    """The stop string that ended the reply, if one did."""
    scored: int = 0
    """Rows of a Score that the client was given: they are not given again after parking."""
    replay_rows: int = 0
    """Rows up to here are run again since it was parked: their tokens are known, and so is the one after them."""
    parked: int = 0
    """How often it was parked."""
    borrowed_tokens: int = 0
    """Prompt tokens answered that were computed on copies in borrowed pages; they count again after parking."""
    fetched_tokens: int = 0
    """The same for those computed on rows that the owner sent."""
    carried: int = 0
    """How often its rows moved to another owner."""

    @property
    def order(self) -> tuple[bool, bool, int]:
        """Who comes first: foreground before background, those that come back at the head of their class, then by arrival."""
        return self.background, not self.parked, self.id

    @property
    def prompt_rows(self) -> int:
        """Tokens of the prompt path."""
        if self.idle:
            return len(self.tokens) // BLOCK * BLOCK
        return len(self.tokens) if self.scoring is None else self.scoring.decode_from

    @property
    def tokens_so_far(self) -> int:
        return len(self.tokens) + len(self.generated)

    @property
    def tokens_to_come(self) -> int | None:
        """At most; None: as many as the context holds."""
        if self.scoring is not None or self.idle:
            return 0
        return None if self.sampling.max_tokens is None else self.limit - self.tokens_so_far

    @property
    def runs(self) -> bool:
        """Whether it has a lane and pages, and keeps them."""
        return self.phase in (Phase.FILLING, Phase.DECODING)

    @property
    def stands(self) -> bool:
        """Whether no row may be added now: its rows are on their way to another owner, or will be, or their state is kept."""
        return self.carry is not None or self.keeping.awaits_carry or self.keeping.ask is not None

    @property
    def rows_at_end(self) -> int:
        """Rows when it ends at the latest. A Score runs its tokens; the last token of a reply is never run."""
        if self.idle:
            return self.prompt_rows
        return len(self.tokens) if self.scoring is not None else self.limit - 1

    def has_pages(self, rows: int, page_rows: int) -> bool:
        """Whether rows 0..rows-1 are mapped."""
        return rows <= len(self.pages) * page_rows

    # ---- windows ------------------------------------------------------------------------------------------------

    @property
    def given_rows(self) -> int:
        """Rows of the decode path below this one are fed given tokens: a Score's, or those of a reply that is replayed."""
        return len(self.tokens) if self.scoring is not None else self.replay_rows

    @property
    def window(self) -> int:
        """Rows of the next decode window: up to R_MAX where their tokens are given, else the one after the last token."""
        return min(R_MAX, self.given_rows - self.sent) if self.sent < self.given_rows else 1

    def token(self, row: int) -> int:
        """The token fed at a row: of the prompt, or of the reply so far."""
        return int(self.tokens[row]) if row < len(self.tokens) else self.generated[row - len(self.tokens)]

    # ---- progress ---------------------------------------------------------------------------------------------

    @property
    def rows_to_place(self) -> int:
        """Rows of the prompt path that come next before its state is kept, or before the end of it."""
        places = self.keeping.places
        return (places[0].at if places else self.prompt_rows) - self.sent

    def admit(self, owner: int, pages: list[int], now: float, borrowed: Sequence[int] = ()) -> None:
        self.owner = owner
        self.pages = pages
        self.borrowed = list(borrowed)
        self.phase = Phase.FILLING
        self.times.admitted = self.times.admitted or now

    def advance(self, rows: int) -> None:
        """Rows are sent."""
        self.sent += rows
        if self.phase is Phase.FILLING and self.sent == self.prompt_rows and not self.idle:
            self.phase = Phase.DECODING

    def resume_from(self, resume: pool_manager_pb2.Resumable, page_rows: int) -> None:
        """It was admitted with the pages of a kept state before its own; with those alone where it will be carried first."""
        keeping = self.keeping
        keeping.resume, keeping.at, keeping.mark = resume, resume.at, resume.mark
        keeping.awaits_carry = len(self.pages) == -(-resume.at // page_rows)

    def resumed(self) -> pool_manager_pb2.Resumable:
        """The workers are told what it goes on from."""
        resume, self.keeping.resume = self.keeping.resume, None
        assert resume is not None
        self.sent = resume.at
        return resume

    def arrive(self) -> None:
        """Its rows are with their new owner, and so are the tables of the workers that know it."""
        assert self.carry is not None
        self.owner, self.pages = self.carry.owner, self.carry.pages
        self.tabled = self.carry.sent
        self.carry = None

    def come_back(self) -> None:
        """It has left its lane and holds nothing: it waits again, and everything it ran will be run again."""
        self.phase = Phase.WAITING
        self.lane = self.ahead = -1
        self.bound = self.leaving = False
        self.recalled = False
        self.pages, self.borrowed, self.carry = [], [], None
        self.tabled = self.asked_rows = self.sent = self.answered = 0
        self.dry_until = 0.0
        self.keeping.come_back()
        self.parked += 1
        self.replay_rows = self.tokens_so_far - 1 if self.generated else 0

    def take(self, token: int, now: float) -> router_pb2.FinishReason.ValueType | None:
        """A token of the reply was sampled. Returns why the reply ends with it, if it does."""
        if not self.generated:
            self.times.first_token = now
        self.generated.append(token)
        if token in self.stops:
            return router_pb2.FINISH_REASON_STOP
        if self.stop_finder is not None and (stop := self.stop_finder.push(token)) is not None:
            self.stop = stop
            return router_pb2.FINISH_REASON_STOP
        if self.tokens_so_far >= self.limit:
            return router_pb2.FINISH_REASON_LENGTH
        return None


class Book:
    """Conversations that live: waiting ones in the order in which they will be served, running ones by lane. A lane is free,
    taken, or resting until the round that frees it is answered. Idle ones that wait are no part of the queue."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.ids = itertools.count(1)
        self.queue: list[Conversation] = []
        self.idle: list[Conversation] = []
        """Those that wait, the oldest first."""
        self.seated: dict[int, Conversation] = {}
        self._free = list(range(lanes))
        self._given_way: set[int] = set()

    def __iter__(self) -> Iterator[Conversation]:
        yield from self.seated.values()
        yield from self.queue
        yield from self.idle

    @property
    def taken(self) -> int:
        """Lanes that are taken by conversations for which somebody waits."""
        return sum(not c.idle for c in self.seated.values())

    @property
    def coming(self) -> int:
        """Lanes that idle conversations gave back, and that rest."""
        return len(self._given_way)

    @property
    def short(self) -> int:
        """Conversations in the queue for which no lane is free, or rests."""
        return len(self.queue) - (self.lanes - len(self.seated))

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to do but for idle conversations: nobody is here for whom somebody waits and reads."""
        return not self.queue and all(c.idle or (c.stalled and c.carry is None) for c in self.seated.values())

    @property
    def may_idle(self) -> bool:
        """Whether an idle conversation may have a lane: one at a time, and only while it can run."""
        return bool(self.idle) and self.quiet and not any(c.idle for c in self.seated.values())

    def idlers(self) -> list[Conversation]:
        """All idle conversations, those with a lane first."""
        return [c for c in self if c.idle]

    def find(self, conversation: int) -> Conversation | None:
        """The seated conversation of that id, or None."""
        return next((c for c in self.seated.values() if c.id == conversation), None)

    @property
    def lane_free(self) -> bool:
        return bool(self._free)

    def enqueue(self, conversation: Conversation) -> None:
        bisect.insort(self.queue, conversation, key=lambda c: c.order)

    def seat(self) -> Conversation:
        """Gives the first in the queue, or else the newest that is idle, the lowest free lane."""
        conversation = self.queue.pop(0) if self.queue else self.idle.pop()
        conversation.lane = self._free.pop(0)
        self.seated[conversation.lane] = conversation
        return conversation

    def leave(self, conversation: Conversation) -> None:
        """Takes it out, wherever it is. Its lane, if it had one, rests until `rest_over`."""
        conversation.phase = Phase.ENDED
        if conversation.lane >= 0:
            del self.seated[conversation.lane]
            if conversation.idle:
                self._given_way.add(conversation.lane)
        else:
            (self.idle if conversation.idle else self.queue).remove(conversation)

    def come_back(self, conversation: Conversation) -> None:
        """From its lane to the queue again. The lane rests until `rest_over`."""
        del self.seated[conversation.lane]
        conversation.come_back()
        self.enqueue(conversation)

    def rest_over(self, lane: int) -> None:
        self._given_way.discard(lane)
        bisect.insort(self._free, lane)

    def running(self, phase: Phase) -> list[Conversation]:
        """Seated conversations in a phase, in the order in which they are served; idle ones are not among them."""
        return sorted((c for c in self.seated.values() if c.phase is phase and not c.idle), key=lambda c: c.order)

    def fail(self, error: LatentPoolError) -> None:
        """Ends every stream."""
        for conversation in list(self):
            conversation.mailbox.fail(error)
            self.leave(conversation)
