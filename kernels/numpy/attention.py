"""Sparse attention over latent rows in absorbed form (specification 3.5; design 3.4 and 3.5).

A list is cut in tiles of 64 keys, padded with rows of the null page, and in chunks of 512. A tile's products are BLAS calls
of one shape; sums inside a tile run over the contiguous last axis, tiles and chunks are added in list order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kernels.api import KEY_CHUNK, KEY_TILE, Path
from kernels.numpy.cached_rows import gather
from kernels.numpy.products import BLOCK
from kernels.numpy.rounding import Round, widen
from kernels.rows import Array, RowView

TILES = KEY_CHUNK // KEY_TILE
LISTED_KEYS = 4 * KEY_CHUNK
"""Keys that rows with lists of their own gather at a time: what stays in the processor's cache."""
MINUS_INF = np.float32(-np.inf)
_ONES = np.ones(KEY_TILE, np.float32)


def attend(
    path: Path, q: Array, view: RowView, lanes: Array, positions: Array, lists: Array, counts: Array, scale: float,
    out: Array, tiles: Sequence[int], rounded: Round,
) -> None:  # fmt: skip
    heads = [slice(stop - count, stop) for count, stop in zip(tiles, np.cumsum(tiles), strict=True)] or [slice(None)]
    alone = counts > 0
    if path is Path.PROMPT:
        dense = alone & (counts == positions + 1)
        alone &= ~dense
        out[counts == 0] = 0
        for start in range(0, len(counts), BLOCK):
            here = slice(start, start + BLOCK)
            if dense[here].any():
                keys, seen = _dense_keys(view, lanes[here], lists[here], counts[here], dense[here])
                for tile in heads:
                    _dense_block(q[here, tile], keys, seen, dense[here], np.float32(scale), out[here, tile])
    elif not alone.all():
        out[~alone] = 0
    for rows, key_tiles in _groups(np.flatnonzero(alone), counts):
        if len(rows) == 1:
            row = rows[0]
            keys = gather(view, int(lanes[row]), lists[row, : counts[row]], KEY_TILE)[None]
        else:
            keys = _listed_keys(view, lanes[rows], lists[rows], counts[rows], key_tiles)
        for tile in heads:
            out[rows, tile] = _chunks(q[rows, tile], keys, counts[rows, None, None], np.float32(scale))
    rounded(out)


def _groups(rows: Array, counts: Array) -> Iterator[tuple[Array, int]]:
    """Rows whose lists fill equally many tiles, and that number: their products have the same shapes alone and together."""
    by_tiles: dict[int, list[int]] = {}
    for row, count in zip(rows.tolist(), counts[rows].tolist(), strict=True):
        by_tiles.setdefault(-(-count // KEY_TILE), []).append(row)
    for tiles, group in by_tiles.items():
        step = max(1, LISTED_KEYS // (tiles * KEY_TILE))
        for first in range(0, len(group), step):
            yield np.array(group[first : first + step]), tiles


def _listed_keys(view: RowView, lanes: Array, lists: Array, counts: Array, tiles: int) -> Array:
    """The rows that each list names, float32 [G, tiles, 64, width], filled up with rows of the null page."""
    width = min(tiles * KEY_TILE, lists.shape[1])
    ids = np.zeros((len(lanes), tiles * KEY_TILE), np.intp)
    ids[:, :width] = lists[:, :width]
    slots, offsets = np.divmod(ids, view.rows)
    listed = np.arange(tiles * KEY_TILE) < counts[:, None]
    pages = np.where(listed, view.tables[lanes[:, None], np.where(listed, slots, 0)], view.null_page)
    return widen(view.values[pages, offsets]).reshape(len(lanes), tiles, KEY_TILE, -1)


def _dense_keys(view: RowView, lanes: Array, lists: Array, counts: Array, dense: Array) -> tuple[Array, Array]:
    """Keys [tiles, 64, r] of a block's longest dense row, and how many of them each of its rows sees [64]."""
    rows = np.flatnonzero(dense)
    longest = rows[np.argmax(counts[rows])]
    keys = gather(view, int(lanes[longest]), lists[longest, : counts[longest]], KEY_TILE)
    return keys, np.where(dense, counts, 1)


def _dense_block(q: Array, keys: Array, seen: Array, dense: Array, scale: np.float32, out: Array) -> None:
    """The dense rows of a block, multiplied with a tile together; a row sees the keys its count covers."""
    _, heads, r = q.shape
    attended = _chunks(q.reshape(1, BLOCK * heads, r), keys[None], np.repeat(seen, heads)[None, :, None], scale)
    out[dense] = attended.reshape(BLOCK, heads, r)[dense]


def _chunks(q: Array, keys: Array, seen: Array, scale: np.float32) -> Array:
    """Attention of query vectors q [G, M, r] over keys [G, tiles, 64, r]; vector m of group g sees its first seen[g, m] keys
    (seen [G, M or 1, 1]). [G, M, r]."""
    top, total, acc = _chunk(q, keys[:, :TILES], seen, scale)
    for first in range(TILES, keys.shape[1], TILES):
        here = _chunk(q, keys[:, first : first + TILES], seen - first * KEY_TILE, scale)
        top, total, acc = _merge((top, total, acc), here)
    acc /= total[..., None]
    return acc


State = tuple[Array, Array, Array]


def _chunk(q: Array, keys: Array, seen: Array, scale: np.float32) -> State:
    """(max [G, M], sum [G, M], accumulator [G, M, r]) of one chunk; max is -inf where a vector sees nothing of it."""
    tiles = keys.shape[1]
    p = np.matmul(q[:, None], keys.transpose(0, 1, 3, 2))  # [G, tiles, M, 64]
    p *= scale
    index = np.arange(tiles * KEY_TILE).reshape(tiles, 1, KEY_TILE)
    np.copyto(p, MINUS_INF, where=index >= seen[:, None])
    top = np.maximum.reduce(np.maximum.reduce(p, axis=-1), axis=1)
    p -= top[:, None, :, None]  # -inf - -inf in rows of another kind, which are dropped
    np.exp(p, out=p)  # an unseen key gets exp(-inf) = 0, whatever its score was
    totals = np.vecdot(p, _ONES)
    parts = np.matmul(p, keys)
    total, acc = totals[:, 0].copy(), parts[:, 0].copy()
    for tile in range(1, tiles):
        total += totals[:, tile]
        acc += parts[:, tile]
    return top, total, acc


def _merge(a: State, b: State) -> State:
    """Two chunks in list order; a chunk in which a vector sees nothing changes nothing."""
    top = np.maximum(a[0], b[0])
    left, right = np.exp(a[0] - top), np.exp(b[0] - top)
    total = a[1] * left + b[1] * right
    acc = a[2] * left[..., None]
    acc += b[2] * right[..., None]
    return top, total, acc
