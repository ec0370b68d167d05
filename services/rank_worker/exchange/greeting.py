"""What peers tell each other over the link itself: a greeting at connect, and a parting at close or abort."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import latentpool

_GREETING = struct.Struct("<4sHHQ48s")
_PARTING = struct.Struct("<4sHh")
_MAGIC = b"LPx1"

GREETING_BYTES = _GREETING.size
PARTING_BYTES = _PARTING.size


@dataclass(frozen=True, slots=True)
class Greeting:
    """Who speaks: compared in words, so that a wrong address list or a stale process is named and not waited for."""

    rank: int
    world: int
    epoch: int
    build: str = latentpool.__version__

    def pack(self) -> bytes:
        """GREETING_BYTES bytes."""
        return _GREETING.pack(_MAGIC, self.rank, self.world, self.epoch, self.build.encode()[:48])

    @staticmethod
    def unpack(data: bytes) -> Greeting | None:
        """The greeting in `data`, or None if it is not one."""
        magic, rank, world, epoch, build = _GREETING.unpack(data)
        if magic != _MAGIC:
            return None
        return Greeting(rank, world, epoch, build.rstrip(b"\0").decode(errors="replace"))

    def refusal(self, peer: int, theirs: Greeting | None) -> str | None:
        """Why what rank `peer` said cannot be the other end of this link, in words; None if it can."""
        if theirs is None:
            return f"what answers as rank {peer} does not speak this link's protocol (build {self.build} here)"
        differences = [
            f"{what} {told} there, {expected} here"
            for what, told, expected in (
                ("rank", theirs.rank, peer),
                ("world", theirs.world, self.world),
                ("epoch", theirs.epoch, self.epoch),
                ("build", theirs.build, self.build),
            )
            if told != expected
        ]
        return f"rank {peer} belongs to another group: {'; '.join(differences)}" if differences else None


@dataclass(frozen=True, slots=True)
class Parting:
    """The last message on a link. failed: None after a close; after an abort the rank that made it abort (one's own if it
    was asked to)."""

    failed: int | None

    def pack(self) -> bytes:
        """PARTING_BYTES bytes."""
        return _PARTING.pack(_MAGIC, 0, -1 if self.failed is None else self.failed)

    @staticmethod
    def unpack(data: bytes) -> Parting:
        """The parting in `data`; anything else counts as an abort without a reason."""
        magic, _, failed = _PARTING.unpack(data)
        return Parting(None if magic == _MAGIC and failed < 0 else failed)


def dropped(peer: int, failed: int) -> str:
    """The sentence for a peer that aborted because of rank `failed`."""
    return f"rank {peer} dropped its links" if failed == peer else f"rank {peer} dropped its links because of rank {failed}"
