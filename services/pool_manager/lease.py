"""The nouns of leasing: what a conversation asks for, what it holds, and what the router is told.

Source: design sections 5 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager.kept import State


@dataclass(frozen=True, slots=True)
class Request:
    """What a conversation asks for. max_tokens None: until the limit. returning: it was parked; prompt_tokens are all its
    tokens so far and max_tokens those that may still come. blocks: chained digests of its complete prompt blocks; empty:
    nothing is looked up or kept. idle: nobody waits for it."""

    conversation: int
    lane: int
    prompt_tokens: int
    max_tokens: int | None = None
    request_id: str = ""
    background: bool = False
    returning: bool = False
    blocks: bytes = field(default=b"", repr=False)
    idle: bool = False

    @property
    def turn(self) -> tuple[bool, bool, bool, int]:
        """Its place in the queue: foreground before background before idle, in a class those that return first, and of them
        the oldest; equals in order of arrival."""
        return self.idle, self.background, not self.returning, self.conversation if self.returning else 0


@dataclass(frozen=True, slots=True)
class Move:
    """A carry under way: page ids of slots 0, 1, ... at the new owner, leased beside those at the old one."""

    conversation: int
    owner: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Resume:
    """The kept state that a conversation goes on from, as it was at admission."""

    state: int
    at: int
    mark: pb.Mark.ValueType


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request can be admitted now, and how many pages it takes of `owner`; of `to` instead, where the state that it
    goes on from must be carried there first."""

    owner: int
    pages: int
    state: State | None = None
    to: int | None = None


@dataclass(slots=True)
class Lease:
    """A running conversation: page ids of its slots 0, 1, ..., all of one owner's residue.

    borrowed: ids that other owners lend for its fill, slot by slot from slot 0, in a slot one of every other residue,
    ascending. recalled: they come back without another order. move: it is on its way to another owner.
    resume: the state that it goes on from. shared: its first so many pages are that state's, and are only read.
    shared_prefix: tokens that earlier prompts had too and no state ends. rows, decoding: as last reported; rows None: never.
    """

    request: Request
    owner: int
    quota: int
    pages: list[int]
    since: float
    borrowed: list[int] = field(default_factory=list)
    recalled: bool = False
    move: Move | None = None
    resume: Resume | None = None
    shared: int = 0
    shared_prefix: int = 0
    rows: int | None = None
    decoding: bool = False

    def ids(self) -> Iterator[int]:
        """Everything it holds."""
        yield from self.pages
        yield from self.borrowed
        if self.move is not None:
            yield from self.move.pages


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
class Orders:
    """What the router must do soon, in the order decided: conversations that give back borrowed pages, that move to another
    owner, that park; kept states that end."""

    recall: list[int] = field(default_factory=list)
    carry: list[Move] = field(default_factory=list)
    park: list[int] = field(default_factory=list)
    forget: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ask:
    """A conversation wants its state kept. evicted: victims were chosen for it, and it waits for their pages."""

    conversation: int
    at: int
    mark: pb.Mark.ValueType
    evicted: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """state None: it is not kept, for `reason`."""

    conversation: int
    state: State | None
    reason: str = ""
