"""Partial sums over ranks, in rank order everywhere (design 3.6).

Every rank sends its f32 partial to every other and adds all of them in order 0..W-1: one exchange a sum. The last product of
a sub-layer writes straight into the link buffer.
"""

from __future__ import annotations

import time

import numpy as np

from kernels.api import Kernels
from kernels.rows import Array
from services.rank_worker.exchange.base import Exchange, Slot


class Link:
    """An Exchange with the deadline and the clock that all its users share."""

    def __init__(self, exchange: Exchange, deadline: float) -> None:
        self.exchange = exchange
        self.deadline = deadline
        self.seconds = 0.0
        """Time spent inside the exchange since the last `take_seconds`."""

    def all_to_all(self, slot: Slot, rows: int) -> None:
        """The first `rows` rows of one's block to every peer, and theirs here. Raises LinkError."""
        if self.exchange.world == 1:
            return
        start = time.perf_counter()
        counts = [rows] * self.exchange.world
        self.exchange.enqueue(slot, counts, counts)
        self.exchange.wait(slot, self.deadline)
        self.seconds += time.perf_counter() - start

    def take_seconds(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Sums:
    """partial() gives the buffer for this rank's part; total() adds all ranks' parts and rounds once."""

    def __init__(self, kernels: Kernels, link: Link, rows: int, hidden: int) -> None:
        self._kernels = kernels
        self._link = link
        self._slots = link.exchange.prepare("sums", (rows, hidden), np.dtype(np.float32))
        self._parity = 0

    def partial(self, rows: int) -> Array:
        """f32 [rows, d], uninitialised; valid until total()."""
        return self._slots[self._parity].send[:rows]

    def total(self, rows: int, out: Array) -> None:
        """out compute [rows, d] = the rank-ordered sum. Raises LinkError."""
        slot = self._slots[self._parity]
        self._parity ^= 1
        self._link.all_to_all(slot, rows)
        rank = self._link.exchange.rank
        parts = [slot.send[:rows] if r == rank else slot.recv[r, :rows] for r in range(self._link.exchange.world)]
        self._kernels.sum_ranks(parts, out)
