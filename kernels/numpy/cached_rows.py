"""Rows of pages and of a lane's rings: written in the cache dtype, read back exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def leading(view: RowView, lanes: list[int], counts: list[int], tile: int) -> Array:
    """The first counts[i] rows of lanes[i], each filled up to whole tiles with zeros, as the null page has them: one after
    another, float32 [tiles of all, tile, width]."""
    sizes = [-(-count // tile) * tile for count in counts]
    rows = np.zeros((sum(sizes), view.values.shape[2]), view.values.dtype)
    first = 0
    for lane, count, size in zip(lanes, counts, sizes, strict=True):
        slots = -(-count // view.rows)
        for slot, page in enumerate(view.tables[lane, :slots].tolist()):
            start = slot * view.rows
            stop = min(count, start + view.rows)
            rows[first + start : first + stop] = view.values[page, : stop - start]
        first += size
    return widen(rows).reshape(-1, tile, rows.shape[1])


def read_ring(ring: Array, lanes: Array, positions: Array, out: Array) -> None:
    out[...] = widen(ring[lanes, positions % ring.shape[1]])
    before = positions < 0
    if before.any():
        out[before] = 0


def write_ring(rows: Array, ring: Array, lanes: Array, positions: Array) -> None:
    ring[lanes, positions % ring.shape[1]] = rows.astype(ring.dtype)


def save_bytes(parts: Sequence[Array], plane: Array, pages: Array) -> None:
    for mine, theirs in _stretches(parts, plane, pages):
        theirs[...] = mine


def load_bytes(plane: Array, pages: Array, parts: Sequence[Array]) -> None:
    for mine, theirs in _stretches(parts, plane, pages):
        mine[...] = theirs


def _stretches(parts: Sequence[Array], plane: Array, pages: Array) -> Iterator[tuple[Array, Array]]:
    """Equally long stretches of bytes of parts and pages, views of both, until the parts end."""
    size = plane[0].nbytes
    at = 0
    for part in parts:
        mine = part.reshape(-1).view(np.uint8)
        done = 0
        while done < len(mine):
            place, first = divmod(at, size)
            count = min(len(mine) - done, size - first)
            theirs = plane[pages[place]].reshape(-1).view(np.uint8)
            yield mine[done : done + count], theirs[first : first + count]
            done += count
            at += count
