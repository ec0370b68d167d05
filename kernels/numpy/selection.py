"""Pooled keys and the selection of pools (specification 3.6; design 3.7 and 12)."""

from __future__ import annotations

import numpy as np

from kernels.api import KEY_TILE, Path
from kernels.numpy.cached_rows import gather
from kernels.numpy.elementwise import ascending_sum
from kernels.numpy.rounding import Round
from kernels.rows import Array, RowView


def pool_keys(keys: Array, gates: Array, ape: Array, out: Array, rounded: Round) -> None:
    shares = np.ascontiguousarray((gates + ape).transpose(1, 0, 2))  # members first
    top = shares[0].copy()
    for member in shares[1:]:
        np.maximum(top, member, out=top)
    shares -= top
    np.exp(shares, out=shares)
    shares /= ascending_sum(shares)
    rounded(shares)
    shares *= keys.transpose(1, 0, 2)
    rounded(shares)
    out[...] = ascending_sum(shares)
    rounded(out)


def select(
    path: Path, q: Array, weights: Array, view: RowView, lanes: Array, positions: Array, pool: int, kept: int,
    lists: Array, counts: Array,
) -> None:  # fmt: skip
    lists[...] = -1
    members = np.arange(pool)
    for t in range(len(positions)):
        length = int(positions[t]) + 1
        if length <= 0:
            counts[t] = 0
            continue
        if length <= kept * pool + pool - 1:
            lists[t, :length] = np.arange(length)
            counts[t] = length
            continue
        complete = length // pool
        chosen = best(scores(q[t], weights[t], view, int(lanes[t]), complete), kept)
        lists[t, : kept * pool] = (chosen[:, None] * pool + members).ravel()
        tail = np.arange(complete * pool, length)
        lists[t, kept * pool : kept * pool + len(tail)] = tail
        counts[t] = kept * pool + len(tail)


def scores(q: Array, weights: Array, view: RowView, lane: int, complete: int) -> Array:
    """Scores of pools 0..complete-1 for one query, float32: q [n_I, d_I], weights [n_I]."""
    keys = gather(view, lane, np.arange(complete), KEY_TILE)
    heads = np.matmul(keys, q.T)  # [tiles, 64, n_I]
    heads *= np.float32(1.0 / np.sqrt(q.shape[1]))
    np.maximum(heads, np.float32(0), out=heads)
    return np.vecdot(heads, weights).reshape(-1)[:complete]


def best(scores: Array, kept: int) -> Array:
    """The `kept` best, ascending, ties to the lower index; NaN counts as the worst."""
    scores = np.fmax(scores, np.float32(-np.inf))
    edge = np.partition(scores, len(scores) - kept)[len(scores) - kept]
    above = np.flatnonzero(scores > edge)
    level = np.flatnonzero(scores == edge)[: kept - len(above)]
    return np.sort(np.concatenate((above, level)))
