"""What the sub-layers of one forward pass share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kernels.api import Kernels
from kernels.rows import Array
from latentpool.geometry import Geometry
from services.rank_worker.arena import Arena
from services.rank_worker.digest import Digest
from services.rank_worker.model.batch import Batch
from services.rank_worker.model.sums import Sums
from services.rank_worker.model.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Selection:
    """T_t of every row, as kernels.api.select gives it: lists i32 [T, Lmax], counts i32 [T]."""

    lists: Array
    counts: Array


class LatentRows(Protocol):
    """Where the latent rows of a pass are written and read; `layer` counts MLA layers."""

    def store(self, p: Pass, layer: int, rows: Array) -> None:
        """Keeps the pass's new rows, compute [T, r], and digests them as they are kept."""

    def send_queries(self, p: Pass, q: Array) -> None:
        """Starts the journey of q compute [T, h, r] to the rank that has the rows, if that is another one: p.selection is
        computed meanwhile. Raises LinkError."""

    def attend(self, p: Pass, layer: int, q: Array, out: Array) -> None:
        """Behind send_queries of the same q: out compute [T, h, r] = attention of this rank's heads q compute [T, h, r] over
        the rows that p.selection names. Raises LinkError."""


@dataclass(slots=True)
class Pass:
    """One forward pass of one batch. `selection` is the newest full MLA layer's, for the shared layers after it."""

    geometry: Geometry
    kernels: Kernels
    arena: Arena
    workspace: Workspace
    sums: Sums
    batch: Batch
    digest: Digest
    latent_rows: LatentRows
    tick: Callable[[], None]
    selection: Selection | None = None

    def take(self, name: str) -> Array:
        """Scratch of one row a batch row."""
        return self.workspace.take(name, self.batch.total)
