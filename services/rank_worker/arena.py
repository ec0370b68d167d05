"""A rank's memory for conversations: pages of both planes, the tables that map lanes to them, and every lane's fixed part.

Each plane is page-major, [page][layer][row], with the null page (zeros, never written) and the discard page (written,
never read) as its last two; windows are runs of page ids, so one address formula serves both. In a split arena page id p has
its index part on every rank, and its latent part on rank p % W alone, at local page p // W. Source: design sections 4, 5
and 12.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.api import Kernels
from kernels.rows import Array, RowView
from latentpool.geometry import Geometry, shares

Int32 = NDArray[np.int32]


class Arena:
    """Allocated once a plan is known.

    latent  cache dtype [local pages + 2, L, page rows, r]
    index   f32 or bf16 [pages + 2, L_I, page rows / P, d_I]
    states  f32 [kda layers, 2 lanes, H, D, D]: place 2 * lane + parity
    conv    compute [kda layers, lanes, conv rows, 3 H D]: ring over positions
    rings   compute [index layers, lanes, ring rows, 2 d_I]: ring over positions, key then gate

    Tables i32 [lanes, slots]: `index_tables` hold a lane's own ids, `latent_tables` local pages: own, borrowed, null where
    nothing is mapped, discard where only the owner keeps the rows.
    """

    def __init__(
        self, geometry: Geometry, kernels: Kernels, kv_dtype: str, *, world: int, rank: int, pages: int, lanes: int,
        context: int, page_rows: int, split: bool = False,
    ) -> None:  # fmt: skip
        self.geometry = geometry
        self.kernels = kernels
        self.kv_dtype = kv_dtype
        self.rank = rank
        self.page_rows = page_rows
        self.pages = pages
        self.lanes = lanes
        self.split = split
        self.residues = world if split else 1
        self.local_pages = pages // self.residues
        slots = -(-context // page_rows) + 1
        index_dtype = "f32" if kv_dtype == "f32" else "bf16"
        heads = shares(geometry.kda_heads, world)[rank]
        dim = geometry.kda_head_dim
        kda = len(geometry.kda_layers)
        pools = page_rows // geometry.pool
        self.latent = kernels.cache((self.local_pages + 2, geometry.latent_layers, page_rows, geometry.latent), kv_dtype)
        self.index = kernels.cache((pages + 2, geometry.index_layers, pools, geometry.index_dim), index_dtype)
        self.index_tables: Int32 = np.full((lanes, slots), self.index_null, np.int32)
        self.latent_tables: Int32 = np.full((lanes, slots), self.latent_null, np.int32)
        self.states = kernels.empty((kda, 2 * lanes, heads, dim, dim), "f32")
        self.conv = kernels.cache((kda, lanes, geometry.conv_rows, 3 * heads * dim), kernels.dtype)
        self.rings = kernels.cache((geometry.index_layers, lanes, geometry.ring_rows, 2 * geometry.index_dim), kernels.dtype)
        self.owners: Int32 = np.zeros(lanes, np.int32)
        """The rank that alone keeps each lane's latent rows; means nothing where the arena is not split."""
        self.borrowed: list[int] = [0] * lanes
        """Slots of each lane, from the first on, of which every rank has a copy."""

    @property
    def index_null(self) -> int:
        return self.pages

    @property
    def latent_null(self) -> int:
        return self.local_pages

    @property
    def latent_discard(self) -> int:
        return self.local_pages + 1

    @property
    def pages_bytes(self) -> int:
        """Bytes of both planes' pages, null and discard pages aside."""
        return sum(int(plane.nbytes) // len(plane) * (len(plane) - 2) for plane in (self.latent, self.index))

    @property
    def nbytes(self) -> int:
        """Bytes allocated, null and discard pages included."""
        tables = (self.index_tables, self.latent_tables)
        return sum(int(a.nbytes) for a in (self.latent, self.index, *tables, self.states, self.conv, self.rings))

    def latent_view(self, layer: int) -> RowView:
        """Latent rows of the layer-th MLA layer."""
        return RowView(self.latent[:, layer], None, self.latent_tables)

    def index_view(self, layer: int) -> RowView:
        """Pooled keys of the layer-th layer with an indexer; row p of a lane is pool p."""
        return RowView(self.index[:, layer], None, self.index_tables)

    def keeps(self, lane: int) -> bool:
        """Whether this rank keeps the lane's latent rows."""
        return not self.split or int(self.owners[lane]) == self.rank

    # ---- lanes -----------------------------------------------------------------------------------------------

    def clear(self, lane: int, owner: int = 0) -> None:
        """A conversation of this owner begins: nothing mapped, KDA state zero in both parities. Rings need no clearing: rows
        before position 0 are never read. Raises ValueError for an owner that is no rank."""
        if not 0 <= owner < self.residues:
            raise ValueError(f"lane {lane}: its owner is rank {owner}, and owners are ranks 0 to {self.residues - 1}")
        self.index_tables[lane] = self.index_null
        self.latent_tables[lane] = self.latent_null
        self.owners[lane] = owner
        self.borrowed[lane] = 0
        self.states[:, 2 * lane : 2 * lane + 2] = 0

    def map(self, lane: int, first_slot: int, pages: Sequence[int]) -> None:
        """Maps slots first_slot, first_slot + 1, ... of a lane. Raises IndexError past the context's slots or pages,
        ValueError for a page of another owner."""
        slots = self._slots(lane, first_slot, len(pages))
        self.check_owned(lane, pages, int(self.owners[lane]))
        self.index_tables[lane, slots] = pages
        self.latent_tables[lane, slots] = self._local(pages) if self.keeps(lane) else self.latent_discard

    def remap(self, lane: int, owner: int, pages: Sequence[int]) -> None:
        """The lane's rows are on these pages of `owner` now, slots from 0 on; further slots are unmapped. Raises as `map`."""
        self.owners[lane] = owner
        self.index_tables[lane] = self.index_null
        self.latent_tables[lane] = self.latent_null
        self.map(lane, 0, pages)

    def borrow(self, lane: int, first_slot: int, pages: Sequence[int]) -> None:
        """Copies of slots first_slot.. go to these pages: in a slot one of every rank but the owner, ascending. Raises
        ValueError for pages that are not so, or slots that do not follow those borrowed before."""
        others = [rank for rank in range(self.residues) if rank != self.owners[lane]]
        if not others or len(pages) % len(others):
            raise ValueError(f"lane {lane}: {len(pages)} borrowed pages for {len(others)} ranks")
        count = len(pages) // len(others)
        slots = self._slots(lane, first_slot, count)
        if first_slot != self.borrowed[lane] or np.any(self.index_tables[lane, slots] == self.index_null):
            raise ValueError(f"lane {lane}: slots {first_slot}.. are not the next to borrow for, or have no page of their own")
        for place, rank in enumerate(others):
            self.check_owned(lane, pages[place :: len(others)], rank)
        self.borrowed[lane] += count
        if self.rank in others:
            self.latent_tables[lane, slots] = self._local(pages[others.index(self.rank) :: len(others)])

    def release(self, lane: int) -> None:
        """Ends the lane's borrowing. Raises ValueError where it borrows nothing."""
        if not self.borrowed[lane]:
            raise ValueError(f"lane {lane} borrows nothing")
        if not self.keeps(lane):
            self.latent_tables[lane, : self.borrowed[lane]] = self.latent_discard
        self.borrowed[lane] = 0

    def check_owned(self, lane: int, pages: Sequence[int], owner: int) -> None:
        """Raises IndexError for ids outside the pool, ValueError for one that is not `owner`'s."""
        for page in pages:
            if not 0 <= page < self.pages:
                raise IndexError(f"lane {lane}: page ids {list(pages)} are outside the pool of {self.pages}")
            if page % self.residues != owner:
                raise ValueError(f"lane {lane}: page {page} belongs to rank {page % self.residues}, not to rank {owner}")

    def _slots(self, lane: int, first_slot: int, count: int) -> slice:
        if not 0 <= lane < self.lanes or first_slot < 0 or first_slot + count > self.index_tables.shape[1]:
            raise IndexError(f"lane {lane}, slots {first_slot}..{first_slot + count - 1}: outside the tables")
        return slice(first_slot, first_slot + count)

    def _local(self, pages: Sequence[int]) -> Int32:
        return np.array(pages, np.int32) // self.residues

    # ---- addresses -------------------------------------------------------------------------------------------

    def latent_places(self, lanes: Int32, rows: Int32) -> tuple[Int32, Int32]:
        """Local pages and offsets of latent rows; rows < 0 (padding), and rows that only another rank keeps, have the discard
        page. Raises IndexError for a row without a page, and for one whose owner would discard it."""
        pages, offsets = _places(self.latent_tables, lanes, rows, self.page_rows, self.latent_null)
        if self.split:
            lost = (pages == self.latent_discard) & (self.owners[lanes] == self.rank)
            if lost.any():
                bad = int(np.argmax(lost))
                raise IndexError(f"lane {int(lanes[bad])}: row {int(rows[bad])} has no page on its owner, rank {self.rank}")
        return np.where(rows < 0, np.int32(self.latent_discard), pages), offsets

    def pool_places(self, lanes: Int32, pools: Int32) -> tuple[Int32, Int32]:
        """Pages and offsets of pooled keys. Raises IndexError for a pool without a page."""
        return _places(self.index_tables, lanes, pools, self.page_rows // self.geometry.pool, self.index_null)


def _places(tables: Array, lanes: Int32, rows: Int32, page_rows: int, null_page: int) -> tuple[Int32, Int32]:
    slots, offsets = np.divmod(np.maximum(rows, 0), np.int32(page_rows))
    pages: Int32 = tables[lanes, slots]
    missing = (pages == null_page) & (rows >= 0)
    if missing.any():
        bad = int(np.argmax(missing))
        raise IndexError(f"lane {int(lanes[bad])}: row {int(rows[bad])} has no page")
    return pages, offsets
