"""The nouns of leasing: what a conversation asks for, what it holds, and what the router is told.

Source: design section 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


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


@dataclass(frozen=True, slots=True)
class Move:
    """A carry under way: page ids of slots 0, 1, ... at the new owner, leased beside those at the old one."""

    conversation: int
    owner: int
    pages: list[int]


@dataclass(slots=True)
class Lease:
    """A running conversation: page ids of its slots 0, 1, ..., all of one owner's residue.

    borrowed: ids that other owners lend for its fill, slot by slot from slot 0, in a slot one of every other residue,
    ascending. recalled: they come back without another order. move: it is on its way to another owner.
    """

    request: Request
    owner: int
    quota: int
    pages: list[int]
    since: float
    borrowed: list[int] = field(default_factory=list)
    recalled: bool = False
    move: Move | None = None

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
    owner, that park."""

    recall: list[int] = field(default_factory=list)
    carry: list[Move] = field(default_factory=list)
    park: list[int] = field(default_factory=list)
