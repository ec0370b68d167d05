"""Kept states as the router knows them: digests that find them, marks where fills stop to keep one, and what is asked of the
manager (design section 6)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from latentpool.geometry import BLOCK
from latentpool.v1 import pool_manager_pb2 as pb

DIGEST_BYTES = 16
APART = 256
"""Tokens between kept states at least: what is nearer is computed again."""


# ---- digests ------------------------------------------------------------------------------------------------------


def scope(authorization: str) -> bytes:
    """Of a caller, from the `authorization` metadata of the call: callers with one bearer token share states, others must not
    see them in timings or counts. b"" without one."""
    scheme, _, token = authorization.strip().partition(" ")
    if scheme.lower() != "bearer":
        token = authorization.strip()
    return hashlib.sha256(token.strip().encode()).digest() if token else b""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Chained digests of the complete blocks of 64 tokens of a prompt. Equal ones mean equal tokens up to there, in the same
    scope and with the same arithmetic: `seed` holds both."""

    seed: bytes
    digests: bytes = b""

    @classmethod
    def seeded(cls, *parts: str | bytes) -> Blocks:
        """Of no tokens yet. `parts`: what states must have in common beside tokens."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            digest.update(len(data).to_bytes(4, "little") + data)
        return cls(digest.digest())

    @property
    def tokens(self) -> int:
        return len(self.digests) // DIGEST_BYTES * BLOCK

    def over(self, tokens: npt.NDArray[np.uint32], end: int) -> Blocks:
        """With the blocks before `end` of tokens (uint32 [n]) that begin with those that are digested."""
        last = self.digests[-DIGEST_BYTES:] or self.seed
        data = np.ascontiguousarray(tokens, dtype="<u4")
        digests = [self.digests]
        for start in range(self.tokens, end // BLOCK * BLOCK, BLOCK):
            last = hashlib.blake2b(last + data[start : start + BLOCK].tobytes(), digest_size=DIGEST_BYTES).digest()
            digests.append(last)
        return Blocks(self.seed, b"".join(digests))

    def begin(self, other: Blocks) -> bool:
        """Whether the other's prompt begins with this one's blocks."""
        return bool(self.digests) and self.seed == other.seed and other.digests.startswith(self.digests)


# ---- marks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where a fill stops to keep a state, a multiple of 64."""

    at: int
    mark: pb.Mark.ValueType


def places(wanted: Sequence[Place], keep_from: int, last: int) -> list[Place]:
    """Those of the wanted places (what serves most first) at which states are kept, ascending: not below `keep_from` tokens,
    not near the last state that the fill goes on from or kept (`last` tokens, 0: none), and of two near one another the one
    that serves more."""
    taken: list[Place] = []
    for place in wanted:
        near = any(abs(place.at - other.at) < APART for other in taken)
        if place.at >= max(keep_from, last + APART if last else BLOCK) and not near:
            taken.append(place)
    return sorted(taken, key=lambda place: place.at)


def fill_places(tokens: int, rewind: int, shared: int) -> list[Place]:
    """Of a prompt, what serves most first. Where prompts part serves all of them, where the newest message begins every wording
    of it, and the end its own continuation only; from either the way to the end is short where it is near. At least one token
    is left to run."""
    last = (tokens - 1) // BLOCK * BLOCK
    marks = ((shared, pb.MARK_SHARED), (rewind, pb.MARK_REWIND))
    return [
        *(Place(at // BLOCK * BLOCK, mark) for at, mark in marks if at // BLOCK * BLOCK < last),
        Place(last, pb.MARK_HISTORY),
    ]


# ---- states -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ask:
    """A question to the manager: may a state be kept here? Nothing is run for the conversation until it is answered."""

    place: Place
    state: int = 0
    """As granted; 0: not answered yet."""
    pages: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Keeping:
    """What a conversation has to do with kept states. `blocks` None: nothing."""

    blocks: Blocks | None = None
    rewind: int = 0
    """Tokens before the newest message, 0: unknown."""
    resume: pb.Resumable | None = None
    """What it goes on from, until the workers are told."""
    awaits_carry: bool = False
    """Its pages are the state's alone, and no row may be added: an order to carry it follows."""
    wanted: list[Place] = field(default_factory=list)
    """Where states would serve, the most first; what the manager refuses is wanted no longer."""
    places: list[Place] = field(default_factory=list)
    """Where states will be kept."""
    ask: Ask | None = None
    at: int = 0
    """Tokens of the longest state that it went on from or kept."""
    mark: pb.Mark.ValueType = pb.MARK_UNSPECIFIED
    """Of the state that it went on from."""
    began: bool = False
    """Whether a row was computed for it: what is resumed after parking was not there when it came."""
    cached: int = 0
    """Prompt tokens that were there when it came."""
    cached_from: pb.Mark.ValueType = pb.MARK_UNSPECIFIED

    @property
    def digests(self) -> bytes:
        return b"" if self.blocks is None else self.blocks.digests

    def come_back(self) -> None:
        """It holds nothing any more."""
        self.resume, self.ask, self.awaits_carry, self.at = None, None, False, 0
        self.wanted, self.places = [], []
