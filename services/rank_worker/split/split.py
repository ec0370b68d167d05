"""What a split group's executor needs beyond a replicated one: owner decode, borrowed and fetched chunks, carries."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.api import Kernels
from latentpool.geometry import R_MAX, Geometry
from services.rank_worker import frames
from services.rank_worker.arena import Arena
from services.rank_worker.link import Link
from services.rank_worker.model.pass_ import LatentRows
from services.rank_worker.split.audit import Audit
from services.rank_worker.split.carry import Carrier
from services.rank_worker.split.fetch import FetchedRows, Staging, fetch_bytes, rows_channel
from services.rank_worker.split.owner import OwnerRows, owner_bytes
from services.rank_worker.split.rows import HereRows


class Split:
    """Buffers and channels of one rank of a split group, made once, on every rank alike."""

    def __init__(
        self, geometry: Geometry, kernels: Kernels, link: Link, arena: Arena, chunk_rows: int, staging_rows: int
    ) -> None:
        self._arena = arena
        self._link = link
        self._owner_rows = OwnerRows(geometry, kernels, link, R_MAX * arena.lanes)
        self._channel = rows_channel(geometry, arena.latent.dtype, link)
        self._staging = Staging(geometry, kernels, arena.kv_dtype, chunk_rows, staging_rows)
        self.carrier = Carrier(kernels, arena, link, self._channel)

    def decode(self, lanes: Sequence[int]) -> LatentRows:
        """Raises ValueError for a lane that still borrows pages: what it writes now must be on its owner alone."""
        for lane in lanes:
            if self._arena.borrowed[lane]:
                raise ValueError(f"lane {lane} decodes while it borrows pages")
        return self._owner_rows

    def chunk(self, operation: frames.Prompt, count: int, audit: Audit | None) -> LatentRows:
        """The rows of a chunk of `count` tokens. Raises ValueError where the mode does not fit what the lane borrows."""
        lane, end = operation.lane, operation.start + count
        borrowed = self._arena.borrowed[lane] * self._arena.page_rows
        if operation.mode == frames.BORROWED:
            if end > borrowed:
                raise ValueError(f"lane {lane}: a borrowed chunk up to row {end}, with borrowed pages up to row {borrowed}")
            return HereRows(audit)
        if operation.mode != frames.FETCH:
            raise ValueError(f"mode {operation.mode} in a split group")
        if borrowed:
            raise ValueError(f"lane {lane}: a fetched chunk while it borrows pages")
        owner = int(self._arena.owners[lane])
        return FetchedRows(self._link, self._channel, self._staging, operation.start, owner, audit)


def split_bytes(geometry: Geometry, kv_dtype: str, dtype_bytes: int, world: int, chunk_rows: int, staging_rows: int) -> int:
    """Bytes of buffers and link buffers of a split group, for decode windows of up to 16 lanes; more take a little more."""
    row = geometry.latent_bytes(kv_dtype) // geometry.latent_layers
    return owner_bytes(geometry, world, 16 * R_MAX, dtype_bytes) + fetch_bytes(geometry, world, chunk_rows, staging_rows, row)
