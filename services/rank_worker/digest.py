"""The 64-bit value a rank gives for each operation; ranks must agree on it before a token leaves the group (design 3.8)."""

from __future__ import annotations

import hashlib

import numpy as np

from kernels.rows import Array


class Digest:
    """Hashes, in order, what an operation did: ids, selections, rows as read back from the arena, hidden rows, tokens."""

    def __init__(self, label: str) -> None:
        self._hash = hashlib.sha256(label.encode())

    def integers(self, *values: int) -> None:
        self._hash.update(np.array(values, np.uint64).tobytes())

    def rows(self, array: Array) -> None:
        """A host array of any dtype, in C order."""
        self._hash.update(np.ascontiguousarray(array).view(np.uint8).data)

    def value(self) -> int:
        """Unsigned 64-bit."""
        return int.from_bytes(self._hash.digest()[:8], "little")
