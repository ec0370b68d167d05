"""Hashes of latent rows on the way from where they are kept to where they are read (design 3.8).

What attention gives ends in sums that all ranks share: a wrong row read on one rank makes all ranks wrong alike, and their
digests stay equal. So ranks that read or move the same rows hash them, and the router compares.
"""

from __future__ import annotations

import hashlib

import numpy as np

from kernels.api import Kernels
from kernels.rows import Array, RowView


class Audit:
    """A running hash of rows; equal on ranks that saw the same rows in the same order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def rows(self, rows: Array) -> None:
        """Rows [n, r] of the cache dtype."""
        self._hash.update(np.ascontiguousarray(rows).view(np.uint8).data)

    def read(self, kernels: Kernels, view: RowView, lane: int, lists: Array, places: Array, counts: Array) -> None:
        """Every row that lists i32 [T, Lmax] name, once, as it is found at its place: places i32 [T, Lmax] are the lists that
        attention reads of `lane` in `view`, lists the positions that they stand for."""
        entries = np.arange(lists.shape[1]) < counts[:, None]
        pairs = np.unique(lists[entries].astype(np.int64) << 32 | places[entries])
        found = (pairs & 0xFFFFFFFF).astype(np.int32)
        slots, offsets = np.divmod(found, np.int32(view.rows))
        self._hash.update((pairs >> 32).tobytes())
        self.rows(kernels.read_rows(view, view.tables[lane, slots], offsets))

    def value(self) -> int:
        """Unsigned 64-bit, never 0: that says that there is no hash."""
        return int.from_bytes(self._hash.digest()[:8], "little") or 1
