"""Prompt chunks whose history another rank keeps: the rows that the chunk selects travel to every rank (design section 8).

Every rank knows the selection, so every rank computes the same sorted union of selected history rows, row block by row block
(halved while the union exceeds the staging buffer). The owner sends those rows in pieces; the others read them, and the
chunk's own rows, through lists renumbered into the staging buffer. List order is kept, so the bits are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kernels.api import Kernels
from kernels.rows import Array, RowView
from latentpool.geometry import BLOCK, Geometry
from services.rank_worker.link import Channel, Link
from services.rank_worker.model.pass_ import Pass, Selection
from services.rank_worker.split.audit import Audit
from services.rank_worker.split.rows import attend, store

PIECE_ROWS = 2048
"""Rows of a piece: large enough for the link's bandwidth, small enough that gathering, sending and storing overlap."""


def rows_channel(geometry: Geometry, dtype: np.dtype[np.generic], link: Link) -> Channel:
    """The channel on which latent rows travel, of fetched chunks and of carries: [PIECE_ROWS, r] of the cache dtype."""
    return link.channel("rows", (PIECE_ROWS, geometry.latent), dtype, "rows")


def least_staging_rows(geometry: Geometry) -> int:
    """History rows that must fit: those of a block with dense rows, which is never cut, and of any one row."""
    return -(-(geometry.list_length + BLOCK) // BLOCK) * BLOCK


def fetch_bytes(geometry: Geometry, world: int, chunk_rows: int, staging_rows: int, row: int) -> int:
    """Bytes of staging and link buffers; row: bytes of a latent row of one layer."""
    return (chunk_rows + staging_rows + 2 * BLOCK + 2 * (1 + world) * PIECE_ROWS) * row


@dataclass(frozen=True, slots=True)
class Part:
    """Batch rows that are attended together: the history positions that they select, ascending, and their renumbered lists
    i32 [rows, Lmax]."""

    rows: slice
    union: Array
    lists: Array


class Staging:
    """The chunk's own rows, from 0 on, and behind them the fetched ones; one layer at a time. A row view of one lane."""

    def __init__(self, geometry: Geometry, kernels: Kernels, kv_dtype: str, chunk_rows: int, rows: int) -> None:
        self.rows = rows
        self.first = -(-chunk_rows // BLOCK) * BLOCK
        """Place of the first fetched row."""
        pages = -(-(self.first + rows) // BLOCK)
        self.values = kernels.cache((pages + 2, BLOCK, geometry.latent), kv_dtype)
        self.view = RowView(self.values, None, np.arange(pages, dtype=np.int32)[None])

    def places(self, first: int, count: int) -> tuple[Array, Array]:
        """Pages and offsets of rows first.. of the buffer."""
        pages, offsets = np.divmod(np.arange(first, first + count, dtype=np.int32), np.int32(BLOCK))
        return pages, offsets


class FetchedRows:
    """A chunk of one lane in fetch mode. Made for each chunk; the staging buffer and the channel are everybody's."""

    def __init__(self, link: Link, channel: Channel, staging: Staging, start: int, owner: int, audit: Audit | None) -> None:
        self._link = link
        self._channel = channel
        self._staging = staging
        self._start = start
        self._owner = owner
        self._audit = audit
        self._selection: Selection | None = None
        self._parts: list[Part] = []

    def store(self, p: Pass, layer: int, rows: Array) -> None:
        store(p, layer, rows)
        if self._link.rank != self._owner:
            pages, offsets = self._staging.places(0, p.batch.rows)
            p.kernels.write_rows(rows[: p.batch.rows], self._staging.view, pages, offsets)

    def send_queries(self, p: Pass, q: Array) -> None:
        """They stay here: rows travel."""

    def attend(self, p: Pass, layer: int, q: Array, out: Array) -> None:
        selection = p.selection
        assert selection is not None
        if selection is not self._selection:
            self._selection, self._parts = selection, list(self._cut(selection, slice(0, p.batch.total)))
        for part in self._parts:
            self._fetch(p, layer, part)
            if self._link.rank == self._owner:
                self._read(p, p.arena.latent_view(layer), p.batch.lanes, part, selection.lists[part.rows], q, out)
            else:
                self._read(p, self._staging.view, np.zeros_like(p.batch.lanes), part, part.lists, q, out)

    def _read(self, p: Pass, view: RowView, lanes: Array, part: Part, lists: Array, q: Array, out: Array) -> None:
        selection = p.selection
        assert selection is not None
        attend(p, view, lanes, part.rows, lists, q, out)
        if self._audit is not None:
            here = part.rows
            self._audit.read(p.kernels, view, int(lanes[0]), selection.lists[here], lists, selection.counts[here])

    def _cut(self, selection: Selection, rows: slice) -> Iterator[Part]:
        """Parts of these batch rows whose unions fit, in order; whole blocks as long as possible."""
        lists, count = selection.lists[rows], rows.stop - rows.start
        history = np.zeros(self._start + 1, bool)
        history[np.clip(lists, -1, self._start)] = True  # -1 and what is not history meet in the last place
        union = np.flatnonzero(history[: self._start]).astype(np.int32)
        if len(union) <= self._staging.rows:
            yield Part(rows, union, self._renumber(lists, union))
            return
        half = count // 2 if count <= BLOCK else -(-count // BLOCK) // 2 * BLOCK
        middle = rows.start + half
        yield from self._cut(selection, slice(rows.start, middle))
        yield from self._cut(selection, slice(middle, rows.stop))

    def _renumber(self, lists: Array, union: Array) -> Array:
        """Positions to places in the staging buffer; padding stays -1."""
        places = np.empty(self._start + self._staging.first, np.int32)
        places[union] = self._staging.first + np.arange(len(union), dtype=np.int32)
        places[self._start :] = np.arange(self._staging.first, dtype=np.int32)
        renumbered: Array = np.where(lists < 0, np.int32(-1), places[lists])
        return renumbered

    def _fetch(self, p: Pass, layer: int, part: Part) -> None:
        """The part's history rows, from the owner to every other rank's staging buffer. Raises LinkError."""
        k = p.kernels
        lane = np.full(len(part.union), p.batch.lanes[0], np.int32)

        def fill(piece: slice, buffer: Array) -> None:
            pages, offsets = p.arena.latent_places(lane[piece], part.union[piece])
            k.export_rows(p.arena.latent_view(layer), pages, offsets, buffer)

        def take(piece: slice, buffer: Array) -> None:
            places = self._staging.places(self._staging.first + piece.start, piece.stop - piece.start)
            k.import_rows(buffer, self._staging.view, *places)

        others = [rank for rank in range(self._link.world) if rank != self._owner]
        self._channel.stream(self._owner, others, len(part.union), PIECE_ROWS, "rows", fill, take)
