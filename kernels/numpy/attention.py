"""Sparse attention over latent rows in absorbed form (specification 3.5; design 3.4 and 3.5).

A list is cut in tiles of 64 keys, padded with rows of the null page, and in chunks of 512. A tile's products are BLAS calls
of one shape; sums inside a tile run over the contiguous last axis, tiles and chunks are added in list order.
"""

from __future__ import annotations

import numpy as np

from kernels.api import KEY_CHUNK, KEY_TILE, Path
from kernels.numpy.cached_rows import gather
from kernels.numpy.products import BLOCK
from kernels.numpy.rounding import Round
from kernels.rows import Array, RowView

TILES = KEY_CHUNK // KEY_TILE
MINUS_INF = np.float32(-np.inf)
_ONES = np.ones(KEY_TILE, np.float32)


def attend(
    path: Path, q: Array, view: RowView, lanes: Array, positions: Array, lists: Array, counts: Array, scale: float,
    out: Array, rounded: Round,
) -> None:  # fmt: skip
    dense = np.zeros(len(counts), bool)
    if path is Path.PROMPT:
        dense = (counts > 0) & (counts == positions + 1)
        for start in range(0, len(counts), BLOCK):
            here = slice(start, start + BLOCK)
            if dense[here].any():
                _dense_block(q[here], view, lanes[here], lists[here], counts[here], dense[here], np.float32(scale), out[here])
    for t in np.flatnonzero(~dense):
        n = int(counts[t])
        if n == 0:
            out[t] = 0
            continue
        keys = gather(view, int(lanes[t]), lists[t, :n], KEY_TILE)
        out[t] = _chunks(q[t], keys, np.array([n]), np.float32(scale))
    rounded(out)


def _dense_block(
    q: Array, view: RowView, lanes: Array, lists: Array, counts: Array, dense: Array, scale: np.float32, out: Array
) -> None:
    """The dense rows of a block, multiplied with a tile together; a row sees the keys its count covers."""
    rows = np.flatnonzero(dense)
    longest = rows[np.argmax(counts[rows])]
    keys = gather(view, int(lanes[longest]), lists[longest, : counts[longest]], KEY_TILE)
    _, heads, r = q.shape
    seen = np.repeat(np.where(dense, counts, 1), heads)
    attended = _chunks(q.reshape(BLOCK * heads, r), keys, seen, scale)
    out[rows] = attended.reshape(BLOCK, heads, r)[rows]


def _chunks(q: Array, keys: Array, seen: Array, scale: np.float32) -> Array:
    """Attention of query vectors q [M, r] over keys [tiles, 64, r]; vector m sees the first seen[m] keys (seen [M] or [1])."""
    top, total, acc = _chunk(q, keys[:TILES], seen, scale)
    for first in range(TILES, keys.shape[0], TILES):
        here = _chunk(q, keys[first : first + TILES], seen - first * KEY_TILE, scale)
        top, total, acc = _merge((top, total, acc), here)
    acc /= total[:, None]
    return acc


State = tuple[Array, Array, Array]


def _chunk(q: Array, keys: Array, seen: Array, scale: np.float32) -> State:
    """(max [M], sum [M], accumulator [M, r]) of one chunk; max is -inf where a vector sees nothing of it."""
    tiles = keys.shape[0]
    p = np.matmul(q, keys.transpose(0, 2, 1))  # [tiles, M, 64]
    p *= scale
    index = np.arange(tiles * KEY_TILE).reshape(tiles, 1, KEY_TILE)
    masked = index >= seen[:, None]
    np.copyto(p, MINUS_INF, where=masked)
    top = p.max(axis=-1).max(axis=0)
    p -= top[:, None]  # -inf - -inf in rows of another kind, which are dropped
    np.exp(p, out=p)  # an unseen key gets exp(-inf) = 0, whatever its score was
    totals = np.vecdot(p, _ONES)
    parts = np.matmul(p, keys)
    total, acc = totals[0].copy(), parts[0].copy()
    for tile in range(1, tiles):
        total += totals[tile]
        acc += parts[tile]
    return top, total, acc


def _merge(a: State, b: State) -> State:
    """Two chunks in list order; a chunk in which a vector sees nothing changes nothing."""
    top = np.maximum(a[0], b[0])
    left, right = np.exp(a[0] - top), np.exp(b[0] - top)
    total = a[1] * left + b[1] * right
    acc = a[2] * left[:, None]
    acc += b[2] * right[:, None]
    return top, total, acc
