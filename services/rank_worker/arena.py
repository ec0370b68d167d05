"""A rank's memory for conversations: pages of both planes, the tables that map lanes to them, and every lane's fixed part.

Each plane is page-major, [page][layer][row], with the null page (zeros, never written) and the discard page (written,
never read) as its last two; windows are runs of page ids, so one address formula serves both. Source: design sections 4, 5
and 12.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.api import Kernels
from kernels.rows import RowView
from latentpool.geometry import Geometry, shares

Int32 = NDArray[np.int32]


class Arena:
    """Allocated once a plan is known; replicated pages and windows (one residue).

    states  f32 [kda layers, 2 lanes, H, D, D]: place 2 * lane + parity
    conv    compute [kda layers, lanes, conv rows, 3 H D]: ring over positions
    rings   compute [index layers, lanes, ring rows, 2 d_I]: ring over positions, key then gate
    """

    def __init__(
        self, geometry: Geometry, kernels: Kernels, kv_dtype: str, *, world: int, rank: int, pages: int, lanes: int,
        context: int, page_rows: int,
    ) -> None:  # fmt: skip
        self.geometry = geometry
        self.kernels = kernels
        self.page_rows = page_rows
        self.pages = pages
        self.lanes = lanes
        slots = -(-context // page_rows) + 1
        index_dtype = "f32" if kv_dtype == "f32" else "bf16"
        heads = shares(geometry.kda_heads, world)[rank]
        dim = geometry.kda_head_dim
        kda = len(geometry.kda_layers)
        pools = page_rows // geometry.pool
        self.latent = kernels.cache((pages + 2, geometry.latent_layers, page_rows, geometry.latent), kv_dtype)
        self.index = kernels.cache((pages + 2, geometry.index_layers, pools, geometry.index_dim), index_dtype)
        self.tables: Int32 = np.full((lanes, slots), self.null_page, np.int32)
        self.states = kernels.empty((kda, 2 * lanes, heads, dim, dim), "f32")
        self.conv = kernels.cache((kda, lanes, geometry.conv_rows, 3 * heads * dim), kernels.dtype)
        self.rings = kernels.cache((geometry.index_layers, lanes, geometry.ring_rows, 2 * geometry.index_dim), kernels.dtype)

    @property
    def null_page(self) -> int:
        return self.pages

    @property
    def discard_page(self) -> int:
        return self.pages + 1

    @property
    def nbytes(self) -> int:
        """Bytes allocated, null and discard pages included."""
        return sum(int(a.nbytes) for a in (self.latent, self.index, self.tables, self.states, self.conv, self.rings))

    def latent_view(self, layer: int) -> RowView:
        """Latent rows of the layer-th MLA layer."""
        return RowView(self.latent[:, layer], None, self.tables)

    def index_view(self, layer: int) -> RowView:
        """Pooled keys of the layer-th layer with an indexer; row p of a lane is pool p."""
        return RowView(self.index[:, layer], None, self.tables)

    # ---- lanes -----------------------------------------------------------------------------------------------

    def clear(self, lane: int) -> None:
        """A conversation begins: nothing mapped, KDA state zero in both parities. Rings need no clearing: rows before
        position 0 are never read."""
        self.tables[lane] = self.null_page
        self.states[:, 2 * lane : 2 * lane + 2] = 0

    def map(self, lane: int, first_slot: int, pages: Sequence[int]) -> None:
        """Maps slots first_slot, first_slot + 1, ... of a lane. Raises IndexError past the context's slots or pages."""
        if not 0 <= lane < self.lanes or first_slot < 0 or first_slot + len(pages) > self.tables.shape[1]:
            raise IndexError(f"lane {lane}, slots {first_slot}..{first_slot + len(pages) - 1}: outside the tables")
        if any(not 0 <= page < self.pages for page in pages):
            raise IndexError(f"lane {lane}: page ids {list(pages)} are outside the pool of {self.pages}")
        self.tables[lane, first_slot : first_slot + len(pages)] = pages

    def address(self, lanes: Int32, rows: Int32, page_rows: int) -> tuple[Int32, Int32]:
        """Pages and offsets of rows to be written; rows < 0 (padding) go to the discard page. Raises IndexError for a row
        whose slot is not mapped: a row is never written without a page."""
        slots = np.maximum(rows, 0) // page_rows
        pages = np.where(rows < 0, np.int32(self.discard_page), self.tables[lanes, slots])
        if np.any(pages == self.null_page):
            bad = int(np.argmax(pages == self.null_page))
            raise IndexError(f"lane {int(lanes[bad])}: row {int(rows[bad])} has no page")
        return pages.astype(np.int32), (np.maximum(rows, 0) % page_rows).astype(np.int32)
