"""Products with weights: one BLAS call a block of 64 rows on the prompt path, one gemv a row on the decode path.

Why gemv: a row's bits must be the same alone and in company. Measured on one thread against padded tiles of 8 rows, a
stacked gemv of one row takes a half of the time at 64 square and a sixth or less from 256 square on, and from there it is
no slower for 8 rows either (gemm packs the weights anew in every call).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels.api import Path
from kernels.rows import Array

BLOCK = 64
"""Rows of a block of the prompt path (design 3.2)."""


def product(path: Path, x: Array, w: Array, out: Array) -> None:
    """out = x wᵀ in float32: x [T, K], w [N, K], out [T, N]."""
    if path is Path.DECODE:
        gemv_rows(w, x, out)
    else:
        blocks = x.shape[0] // BLOCK
        np.matmul(x.reshape(blocks, BLOCK, -1), w.T, out=out.reshape(blocks, BLOCK, -1))


def gemv_rows(w: Array, x: Array, out: Array) -> None:
    """out[t] = w x[t]: the same gemv for every row; one row skips the setting up of a stack of products."""
    if len(x) == 1:
        w.dot(x[0], out[0])
    else:
        np.matmul(w, x[:, :, None], out[:, :, None])


def head_product(path: Path, q: Array, w: Array, out: Array) -> None:
    """out[t, head] = w[head] q[t, head] in float32: q [T, h, a], w [h, b, a], out [T, h, b]."""
    if path is Path.DECODE:
        np.matmul(w, q[..., None], out=out[..., None])
        return
    rows, heads, a = q.shape
    blocks = rows // BLOCK
    by_head = np.matmul(q.reshape(blocks, BLOCK, heads, a).transpose(0, 2, 1, 3), w.transpose(0, 2, 1))
    out.reshape(blocks, BLOCK, heads, -1)[...] = by_head.transpose(0, 2, 1, 3)


def embed(tokens: Array, table: Array, first_id: int, out: Array) -> None:
    local = tokens.astype(np.int64) - first_id
    here = (local >= 0) & (local < table.shape[0])
    out[...] = 0
    out[here] = table[local[here]]


def sum_ranks(parts: Sequence[Array], out: Array) -> None:
    if len(parts) == 1:
        out[...] = parts[0]
        return
    np.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part
