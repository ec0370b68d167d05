"""Pooled keys and the selection of pools (specification 3.6; design 3.7 and 12)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kernels.api import KEY_TILE, Path
from kernels.numpy.cached_rows import gather, leading
from kernels.numpy.elementwise import ascending_sum
from kernels.numpy.products import BLOCK
from kernels.numpy.rounding import Round
from kernels.rows import Array, RowView

BLOCK_POOLS = 8 * KEY_TILE
"""Pools a block is scored against at a time."""
ROW_POOLS = 32 * KEY_TILE
"""Pools that rows of their own are scored against at a time: what stays in the processor's cache."""
MINUS_INF = np.float32(-np.inf)


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
    longest = kept * pool + pool - 1
    every = np.arange(longest, dtype=np.int32)
    lengths = positions + 1
    np.copyto(lists, -1)
    np.copyto(lists, every, where=every < np.where(lengths <= longest, lengths, 0)[:, None])
    np.maximum(lengths, 0, out=counts)
    scored = np.flatnonzero(lengths > longest)
    complete = lengths // pool
    for rows, pools in _scores(path, q, weights, view, lanes, complete, scored):
        members = (best(pools, kept)[:, :, None] * pool + np.arange(pool)).reshape(len(rows), -1)
        tail = complete[rows, None] * pool + np.arange(pool - 1)
        lists[rows, : kept * pool] = members
        lists[rows, kept * pool :] = np.where(tail < lengths[rows, None], tail, -1)
        counts[rows] = kept * pool + lengths[rows] % pool


def _scores(
    path: Path, q: Array, weights: Array, view: RowView, lanes: Array, complete: Array, scored: Array
) -> Iterator[tuple[Array, Array]]:
    """Rows that go together, and their scores [rows, pools], -inf from each row's `complete` on."""
    if path is Path.DECODE:
        for rows in _together(scored, complete):
            yield rows, _row_scores(q[rows], weights[rows], view, lanes[rows], complete[rows])
        return
    for start in range(0, len(q), BLOCK):
        rows = scored[(scored >= start) & (scored < start + BLOCK)]
        if len(rows) > 0:
            block = slice(start, start + BLOCK)
            longest = int(complete[rows].max())
            pools = _block_scores(q[block], weights[block], view, int(lanes[rows[0]]), longest)[rows - start]
            np.copyto(pools, MINUS_INF, where=np.arange(longest) >= complete[rows, None])
            yield rows, pools


def _together(scored: Array, complete: Array) -> Iterator[Array]:
    """Consecutive rows with ROW_POOLS pools among them, or one row with more."""
    rows: list[int] = []
    pools = 0
    for row, count in zip(scored.tolist(), complete[scored].tolist(), strict=True):
        if rows and pools + count > ROW_POOLS:
            yield np.array(rows)
            rows, pools = [], 0
        rows.append(row)
        pools += count
    if rows:
        yield np.array(rows)


def _row_scores(q: Array, weights: Array, view: RowView, lanes: Array, complete: Array) -> Array:
    """Scores [G, longest] of pools 0..complete[g] - 1 for each row, -inf behind: q [G, n_I, d_I], weights [G, n_I]. The tiles
    of all rows stand one after another, each multiplied with its row's queries."""
    pools = complete.tolist()
    tiles = [-(-count // KEY_TILE) for count in pools]
    keys = leading(view, lanes.tolist(), pools, KEY_TILE)
    owner = np.repeat(np.arange(len(pools)), tiles)
    heads = np.matmul(keys, q[owner].transpose(0, 2, 1))  # [tiles, 64, n_I]
    flat = _weigh(heads, weights[owner, None], q.shape[2]).reshape(-1)
    scores = np.full((len(pools), max(pools)), MINUS_INF, np.float32)
    first = 0
    for row, count in enumerate(pools):
        scores[row, :count] = flat[first : first + count]
        first += tiles[row] * KEY_TILE
    return scores


def _block_scores(q: Array, weights: Array, view: RowView, lane: int, longest: int) -> Array:
    """Scores [64, pools] of a block of one lane, q [64, n_I, d_I]: all its rows are multiplied with a tile together."""
    rows, heads, width = q.shape
    queries = q.reshape(rows * heads, width).T
    scores = np.empty((rows, longest), np.float32)
    for first in range(0, longest, BLOCK_POOLS):
        ids = np.arange(first, min(first + BLOCK_POOLS, longest))
        keys = gather(view, lane, ids, KEY_TILE)
        part = np.matmul(keys, queries).reshape(-1, rows, heads)  # [pools, 64, n_I]
        scores[:, ids] = _weigh(part, weights, width)[: len(ids)].T
    return scores


def _weigh(heads: Array, weights: Array, width: int) -> Array:
    """Σ_i weights_i relu(heads_i / sqrt(d_I)) over the last axis; heads is overwritten."""
    heads *= np.float32(1.0 / np.sqrt(width))
    np.maximum(heads, np.float32(0), out=heads)
    total: Array = np.vecdot(heads, weights)
    return total


def best(scores: Array, kept: int) -> Array:
    """The `kept` best columns of each row, ascending, ties to the lower one; NaN counts as the worst. [G, kept]."""
    scores = np.fmax(scores, MINUS_INF)
    edge = np.partition(scores, scores.shape[1] - kept, axis=1)[:, scores.shape[1] - kept, None]
    above, level = scores > edge, scores == edge
    missing = kept - np.count_nonzero(above, axis=1, keepdims=True)
    above |= level & (np.cumsum(level, axis=1) <= missing)
    return np.nonzero(above)[1].reshape(len(scores), kept)
