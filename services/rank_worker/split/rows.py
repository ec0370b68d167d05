"""Latent rows on this rank: its own pages, or copies in pages that other owners lend (design section 8)."""

from __future__ import annotations

import numpy as np

from kernels.rows import Array, RowView
from services.rank_worker.model.pass_ import Pass
from services.rank_worker.split.audit import Audit


def store(p: Pass, layer: int, rows: Array) -> None:
    """Writes the pass's rows, compute [T, r], to their pages, and digests what the arena holds then; of rows that another rank
    keeps, what it must hold there."""
    k, batch = p.kernels, p.batch
    view = p.arena.latent_view(layer)
    k.write_rows(rows, view, batch.pages, batch.offsets)
    pages = batch.pages[: batch.rows]
    kept = k.read_rows(view, pages, batch.offsets[: batch.rows])
    elsewhere = pages == view.discard_page
    if elsewhere.any():
        kept[elsewhere] = k.stored_rows(rows[: batch.rows][elsewhere], view)
    p.digest.rows(kept)


def attend(p: Pass, view: RowView, lanes: Array, rows: slice, lists: Array, q: Array, out: Array) -> None:
    """Attention of the batch rows `rows` with these lists (as of `view` and `lanes`)."""
    selection, batch = p.selection, p.batch
    assert selection is not None  # geometry: a shared layer follows a full one
    p.kernels.attend(
        batch.path, q[rows], view, lanes[rows], batch.positions[rows], lists, selection.counts[rows],
        p.geometry.nope_dim**-0.5, out[rows],
    )  # fmt: skip


class HereRows:
    """Every row that the pass reads is on this rank: a group that is not split, or a chunk on borrowed pages."""

    def __init__(self, audit: Audit | None = None) -> None:
        self._audit = audit

    def store(self, p: Pass, layer: int, rows: Array) -> None:
        store(p, layer, rows)

    def send_queries(self, p: Pass, q: Array) -> None:
        """They stay here."""

    def attend(self, p: Pass, layer: int, q: Array, out: Array) -> None:
        view, selection = p.arena.latent_view(layer), p.selection
        assert selection is not None
        attend(p, view, p.batch.lanes, slice(None), selection.lists, q, out)
        if self._audit is not None:
            self._audit.read(p.kernels, view, int(p.batch.lanes[0]), selection.lists, selection.lists, selection.counts)


def valid(lists: Array, counts: Array) -> Array:
    """Which entries of lists i32 [T, Lmax] are not padding, bool [T, Lmax]."""
    mask: Array = np.arange(lists.shape[1]) < counts[:, None]
    return mask
