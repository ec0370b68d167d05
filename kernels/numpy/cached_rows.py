"""Rows of pages and of a lane's rings: written in the cache dtype, read back exactly."""

from __future__ import annotations

import numpy as np

from kernels.numpy.rounding import widen
from kernels.rows import Array, RowView


def write_rows(rows: Array, view: RowView, pages: Array, offsets: Array) -> None:
    view.values[pages, offsets] = rows.astype(view.values.dtype)


def gather(view: RowView, lane: int, ids: Array, tile: int) -> Array:
    """Rows `ids` of a lane in order, float32 [tiles, tile, width], the last tile filled up with rows of the null page."""
    n = ids.shape[0]
    tiles = -(-n // tile)
    pages = np.full(tiles * tile, view.null_page, np.intp)
    offsets = np.zeros(tiles * tile, np.intp)
    slots, offsets[:n] = np.divmod(ids, view.rows)
    pages[:n] = view.tables[lane][slots]
    return widen(view.values[pages, offsets]).reshape(tiles, tile, -1)


def read_ring(ring: Array, lanes: Array, positions: Array, out: Array) -> None:
    out[...] = widen(ring[lanes, positions % ring.shape[1]])
    np.copyto(out, 0, where=(positions < 0)[:, None])


def write_ring(rows: Array, ring: Array, lanes: Array, positions: Array) -> None:
    ring[lanes, positions % ring.shape[1]] = rows.astype(ring.dtype)
