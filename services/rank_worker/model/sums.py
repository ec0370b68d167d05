"""Partial sums over ranks, in rank order everywhere (design 3.6).

Every rank sends its f32 partial to every other and adds all of them in order 0..W-1: one exchange a sum. The last product of
a sub-layer writes straight into the link buffer.
"""

from __future__ import annotations

import numpy as np

from kernels.api import Kernels
from kernels.rows import Array
from services.rank_worker.link import Link


class Sums:
    """partial() gives the buffer for this rank's part; total() adds all ranks' parts and rounds once."""

    def __init__(self, kernels: Kernels, link: Link, rows: int, hidden: int) -> None:
        self._kernels = kernels
        self._link = link
        self._channel = link.channel("sums", (rows, hidden), np.dtype(np.float32), "sums")

    def partial(self, rows: int) -> Array:
        """f32 [rows, d], uninitialised; valid until total()."""
        return self._channel.slot.send[:rows]

    def total(self, rows: int, out: Array) -> None:
        """out compute [rows, d] = the rank-ordered sum. Raises LinkError."""
        slot = self._channel.all_to_all(rows)
        parts = [slot.send[:rows] if r == self._link.rank else slot.recv[r, :rows] for r in range(self._link.world)]
        self._kernels.sum_ranks(parts, out)
