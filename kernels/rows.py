"""Row views: how every operation sees cached rows, whatever holds them.

Pages, windows, staging buffers and borrowed copies are all row views. One view is one layer of one plane of the arena
(the latent plane, or the index plane of pooled keys) and the tables that map each lane's slots to pages of that plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Array = Any
"""An array of the backend's device: numpy.ndarray for NumPy, cupy.ndarray for CUDA."""


@dataclass(frozen=True, slots=True)
class RowView:
    """Rows of one layer.

    values  [pages, rows, width] in the cache dtype; the last two pages are the null page (zeros, never written) and the
            discard page (written, never read)
    scales  [pages, rows] float32 where rows are FP8 codes, else None
    tables  [lanes, slots] int32: page of each slot; unmapped slots name the null page. Row i of a lane is row
            i % rows of the page in slot i // rows
    """

    values: Array
    scales: Array | None
    tables: Array

    @property
    def rows(self) -> int:
        """Rows a page holds."""
        return int(self.values.shape[1])

    @property
    def null_page(self) -> int:
        return int(self.values.shape[0]) - 2

    @property
    def discard_page(self) -> int:
        return int(self.values.shape[0]) - 1
