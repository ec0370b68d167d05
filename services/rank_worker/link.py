"""The exchange as the executor uses it: channels with two parities in turn, one deadline, one clock, bytes by kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from kernels.rows import Array
from services.rank_worker import frames
from services.rank_worker.exchange.base import Exchange, Slot


class Link:
    """An Exchange with what all its users share. Every rank makes the same channels in the same order."""

    def __init__(self, exchange: Exchange, deadline: float) -> None:
        self.exchange = exchange
        self.rank = exchange.rank
        self.world = exchange.world
        self.deadline = deadline
        self._seconds = 0.0
        self._sent = frames.LinkBytes()

    def channel(
        self, name: str, shape: Sequence[int], dtype: np.dtype[np.generic], kind: str, *, each: bool = False
    ) -> Channel:
        """A channel whose largest block is `shape` [max rows, ...]; `kind` names a field of frames.LinkBytes; with `each`
        every peer gets a block of its own."""
        return Channel(self, self.exchange.prepare(name, shape, dtype, each=each), kind)

    def enqueue(self, slot: Slot, send: Sequence[int], recv: Sequence[int], kind: str) -> None:
        """Starts an exchange; see Exchange.enqueue."""
        rows = sum(count for peer, count in enumerate(send) if peer != self.rank)
        setattr(self._sent, kind, getattr(self._sent, kind) + rows * slot.recv[0, :1].nbytes)
        start = time.perf_counter()
        self.exchange.enqueue(slot, send, recv)
        self._seconds += time.perf_counter() - start

    def wait(self, slot: Slot) -> None:
        """Ends an exchange; see Exchange.wait."""
        start = time.perf_counter()
        self.exchange.wait(slot, self.deadline)
        self._seconds += time.perf_counter() - start

    def take_seconds(self) -> float:
        """Seconds spent inside the exchange since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def take_sent(self) -> frames.LinkBytes:
        """Bytes sent to all peers since the last call."""
        sent, self._sent = self._sent, frames.LinkBytes()
        return sent


class Channel:
    """Two parities of link buffers. `slot` is the one whose send buffer may be filled now."""

    def __init__(self, link: Link, slots: tuple[Slot, Slot], kind: str) -> None:
        self.link = link
        self._slots = slots
        self._kind = kind
        self._parity = 0

    @property
    def slot(self) -> Slot:
        return self._slots[self._parity]

    def exchange(self, send: Sequence[int], recv: Sequence[int]) -> Slot:
        """The first send[p] rows of p's block to each peer p, recv[p] rows from it; returns the slot that holds them until
        the channel's next but one exchange. Raises LinkError."""
        if self.link.world == 1:
            return self._turn()
        slot = self.start(send, recv)
        self.link.wait(slot)
        return slot

    def start(self, send: Sequence[int], recv: Sequence[int]) -> Slot:
        """As `exchange`, for a caller that has something to do before it calls `link.wait(slot)`."""
        slot = self._turn()
        self.link.enqueue(slot, send, recv, self._kind)
        return slot

    def all_to_all(self, rows: int) -> Slot:
        """The first `rows` rows of one's block to every peer, and theirs here. Raises LinkError."""
        counts = [rows] * self.link.world
        return self.exchange(counts, counts)

    def stream(
        self, source: int, targets: Sequence[int], rows: int, piece_rows: int, kind: str,
        fill: Callable[[slice, Array], None], take: Callable[[slice, Array], None],
    ) -> None:  # fmt: skip
        """`rows` rows from `source` to `targets` in pieces, two under way: fill(piece, buffer) at the source, take(piece,
        buffer) at each target, in order. Every other rank may call it too, and does nothing. Raises LinkError."""
        under_way: tuple[Slot, slice] | None = None
        for first in range(0, rows, piece_rows):
            piece = slice(first, min(first + piece_rows, rows))
            count = piece.stop - first
            slot = self._turn()
            if self.link.rank == source:
                fill(piece, slot.send[:count])
            send = [count if self.link.rank == source and peer in targets else 0 for peer in range(self.link.world)]
            recv = [count if peer == source and self.link.rank in targets else 0 for peer in range(self.link.world)]
            self.link.enqueue(slot, send, recv, kind)
            if under_way is not None:
                self._land(*under_way, source, targets, take)
            under_way = slot, piece
        if under_way is not None:
            self._land(*under_way, source, targets, take)

    def _land(
        self, slot: Slot, piece: slice, source: int, targets: Sequence[int], take: Callable[[slice, Array], None]
    ) -> None:
        self.link.wait(slot)
        if self.link.rank in targets:
            take(piece, slot.recv[source, : piece.stop - piece.start])

    def _turn(self) -> Slot:
        slot = self._slots[self._parity]
        self._parity ^= 1
        return slot
