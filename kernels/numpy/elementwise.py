"""Sums and functions that other operations share. Everything is float32 and contiguous.

Overflow to infinity and -inf - -inf in entries that are masked are meant; whoever runs operations tells NumPy to be quiet once
a thread (`np.errstate` costs more than a small operation).

Bits must not depend on shape or position, so elementwise functions see contiguous arrays only, and the only reductions are
dot products of NumPy over the last axis (one BLAS call a row, its length fixed by the geometry).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kernels.rows import Array

ONE = np.float32(1.0)
TWO = np.float32(2.0)


def sigmoid(x: Array, out: Array) -> None:
    """1 / (1 + exp(-x)); out may be x."""
    np.negative(x, out)
    np.exp(out, out)  # inf gives 0, which is right
    np.add(out, ONE, out)
    np.reciprocal(out, out)


def silu(x: Array, out: Array) -> None:
    """x / (1 + exp(-x)); out is not x."""
    np.negative(x, out)
    np.exp(out, out)
    np.add(out, ONE, out)
    np.divide(x, out, out)


def mean_square(x: Array) -> Array:
    """Mean of squares over the last axis of a contiguous array."""
    total = np.vecdot(x, x)
    total /= np.float32(x.shape[-1])
    return total


def ascending_sum(parts: Array) -> Array:
    """parts[0] + parts[1] + ... over the first axis, in that order."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def slabs(rows: int) -> Iterator[slice]:
    """Row ranges small enough that an operation of many passes stays in the processor's cache."""
    for start in range(0, rows, 64):
        yield slice(start, min(start + 64, rows))
