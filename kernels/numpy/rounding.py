"""The one place where values are rounded, and the carriers of compute and cache dtypes.

A `compute` array is a float32 array; in a bf16 run every value it holds is a bf16 number. Operations leave an f32 result in
their output and round it there, once.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from kernels.rows import Array

BF16 = np.dtype(ml_dtypes.bfloat16)

Round = Callable[[Array], None]
"""Rounds a contiguous float32 array to the compute dtype in place."""


def to_bf16(x: Array) -> None:
    """Nearest bf16 number, ties to even, NaN stays NaN, overflow becomes infinity. In place."""
    x[...] = x.astype(BF16)


def unchanged(x: Array) -> None:
    """A float32 run rounds nothing."""


ROUNDING: dict[str, Round] = {"f32": unchanged, "bf16": to_bf16}
CACHE_DTYPES: dict[str, np.dtype] = {"f32": np.dtype(np.float32), "bf16": BF16}


def widen(x: Array) -> Array:
    """Cached values, contiguous and nobody else's, as float32 (float32 itself as it is); every cache dtype widens exactly."""
    if x.dtype == BF16:
        # ml_dtypes converts element by element through its own loop; a bf16 is the upper half of its float32.
        bits = x.view(np.uint16).astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    return x
