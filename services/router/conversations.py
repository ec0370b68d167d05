"""A conversation's life: waiting, filling, decoding, ended; and the book of all that live."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from latentpool.errors import LatentPoolError
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2
from services.router.delivery import Mailbox


class Phase(Enum):
    WAITING = "waiting"  # for a lane, then for pages
    FILLING = "filling"  # its prompt is being computed
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a Score asks for: tokens from `decode_from` on run on the decode path; raw: whole rows of logits."""

    decode_from: int
    raw: bool


@dataclass(slots=True)
class Times:
    """Moments on the loop's clock, in seconds."""

    arrived: float
    admitted: float = 0.0
    first_token: float = 0.0


@dataclass(eq=False, slots=True)
class Conversation:
    """One request between its arrival and its end. `tokens` is the prompt, or all that a Score runs (uint32). `seed` is the
    stated one or the one drawn."""

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
    phase: Phase = Phase.WAITING
    ahead: int = -1
    """Conversations ahead, as last told to the client."""
    lane: int = -1
    owner: int = 0
    bound: bool = False
    """Whether the workers were told (Bind was sent)."""
    admitted: bool = False
    """Whether the manager leased pages."""
    pages: list[int] = field(default_factory=list)
    tabled: int = 0
    """Pages that the workers were told of."""
    asked_rows: int = 0
    """Rows of the extension that the manager has not answered yet, or 0."""
    dry_until: float = 0.0
    """The manager had no page; it is not asked again before this moment."""
    position: int = 0
    """Rows computed: of the prompt, then of the reply."""
    generated: list[int] = field(default_factory=list)

    @property
    def prompt_rows(self) -> int:
        """Tokens of the prompt path."""
        return len(self.tokens) if self.scoring is None else self.scoring.decode_from

    @property
    def rows_at_end(self) -> int:
        """Rows when it ends at the latest. A Score runs its tokens; the last token of a reply is never run."""
        return len(self.tokens) if self.scoring is not None else self.limit - 1

    def has_pages(self, rows: int, page_rows: int) -> bool:
        """Whether rows 0..rows-1 are mapped."""
        return rows <= len(self.pages) * page_rows

    # ---- progress ---------------------------------------------------------------------------------------------

    def admit(self, owner: int, pages: list[int], now: float) -> None:
        self.admitted = True
        self.owner = owner
        self.pages = pages
        self.phase = Phase.FILLING
        self.times.admitted = now

    def advance(self, rows: int) -> None:
        """Rows were computed."""
        self.position += rows
        if self.phase is Phase.FILLING and self.position == self.prompt_rows:
            self.phase = Phase.DECODING

    def take(self, token: int, now: float) -> router_pb2.FinishReason.ValueType | None:
        """A token of the reply was sampled. Returns why the reply ends with it, if it does."""
        if not self.generated:
            self.times.first_token = now
        self.generated.append(token)
        if token in self.stops:
            return router_pb2.FINISH_REASON_STOP
        if len(self.tokens) + len(self.generated) >= self.limit:
            return router_pb2.FINISH_REASON_LENGTH
        return None


class Book:
    """Conversations that live: waiting ones in order of arrival, running ones by lane. A lane is free, taken, or resting
    until the round that frees it is answered."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.queue: deque[Conversation] = deque()
        self.seated: dict[int, Conversation] = {}
        self._free = list(range(lanes))

    def __iter__(self) -> Iterator[Conversation]:
        yield from self.seated.values()
        yield from self.queue

    def find(self, conversation: int) -> Conversation | None:
        """The seated conversation of that id, or None if it ended."""
        return next((c for c in self.seated.values() if c.id == conversation), None)

    @property
    def lane_free(self) -> bool:
        return bool(self._free)

    def seat(self) -> Conversation:
        """Gives the first in the queue the lowest free lane."""
        conversation = self.queue.popleft()
        conversation.lane = self._free.pop(0)
        self.seated[conversation.lane] = conversation
        return conversation

    def leave(self, conversation: Conversation) -> None:
        """Takes it out, wherever it is. Its lane, if it had one, rests until `rest_over`."""
        conversation.phase = Phase.ENDED
        if conversation.lane >= 0:
            del self.seated[conversation.lane]
        else:
            self.queue.remove(conversation)

    def rest_over(self, lane: int) -> None:
        self._free.append(lane)
        self._free.sort()

    def running(self, phase: Phase) -> list[Conversation]:
        """Seated conversations in a phase, in order of arrival."""
        return sorted((c for c in self.seated.values() if c.phase is phase), key=lambda c: c.id)

    def fail(self, error: LatentPoolError) -> None:
        """Ends every stream."""
        for conversation in list(self):
            conversation.mailbox.fail(error)
            self.leave(conversation)
