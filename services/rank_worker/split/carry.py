"""Carries: a conversation's rows move to another owner, slice by slice, while others run (design section 8).

Every rank copies the index parts to the new pages itself; only latent rows cross the link, old owner to new. Both hash what
they sent and what they hold then: a carry that loses rows ends the epoch, not a reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kernels.api import Kernels
from kernels.rows import Array, RowView
from services.rank_worker import frames
from services.rank_worker.arena import Arena
from services.rank_worker.link import Channel, Link
from services.rank_worker.split.audit import Audit
from services.rank_worker.split.fetch import PIECE_ROWS


@dataclass(slots=True)
class Carrying:
    """A lane's carry under way: the new owner, and its pages so far, of slots 0, 1, ..."""

    owner: int
    pages: list[int] = field(default_factory=list)


class Carrier:
    """Executes the slices of carries in one arena."""

    def __init__(self, kernels: Kernels, arena: Arena, link: Link, channel: Channel) -> None:
        self._kernels = kernels
        self._arena = arena
        self._link = link
        self._channel = channel

    def check(self, operation: frames.Carry, carrying: Carrying, rows: int) -> None:
        """Raises ValueError for a slice that does not follow those before, or a carry that ends before the lane's last row."""
        arena, lane = self._arena, operation.lane
        if not arena.split or operation.owner == arena.owners[lane]:
            raise ValueError(f"lane {lane} is carried to rank {operation.owner}, which keeps its rows already")
        if arena.borrowed[lane]:
            raise ValueError(f"lane {lane} is carried while it borrows pages")
        if operation.first_slot != len(carrying.pages) or operation.owner != carrying.owner:
            raise ValueError(
                f"lane {lane}: a slice from slot {operation.first_slot} to rank {operation.owner}, after "
                f"{len(carrying.pages)} slots to rank {carrying.owner}"
            )
        arena.check_owned(lane, operation.pages, operation.owner)
        covered = (operation.first_slot + len(operation.pages)) * arena.page_rows
        if operation.last and covered < rows:
            raise ValueError(f"lane {lane}: its carry ends at row {covered} of {rows}")

    def slice(self, operation: frames.Carry, rows: int) -> int:
        """Moves the rows below `rows` of a checked slice. Returns the hash of the latent rows on the two owners, else 0. Raises
        LinkError."""
        arena, lane = self._arena, operation.lane
        first = operation.first_slot * arena.page_rows
        count = min(rows - first, len(operation.pages) * arena.page_rows)
        if count <= 0:
            return 0
        used = -(-count // arena.page_rows)
        new = np.array(operation.pages[:used], np.int32)
        old = arena.index_tables[lane, operation.first_slot : operation.first_slot + used]
        self._kernels.copy_pages(arena.index, old, new)
        return self._move(lane, operation.owner, new, first, count)

    def _move(self, lane: int, target: int, new: Array, first: int, count: int) -> int:
        k, arena, rank = self._kernels, self._arena, self._link.rank
        source = int(arena.owners[lane])
        audit = Audit()
        for layer in range(arena.latent.shape[1]):
            view = arena.latent_view(layer)
            there = RowView(view.values, None, (new // arena.residues)[None])

            def fill(piece: slice, buffer: Array, view: RowView = view) -> None:
                places = _places(view, lane, range(first + piece.start, first + piece.stop))
                k.export_rows(view, *places, buffer)
                audit.rows(buffer)

            def take(piece: slice, buffer: Array, there: RowView = there) -> None:
                places = _places(there, 0, range(piece.start, piece.stop))
                k.import_rows(buffer, there, *places)
                audit.rows(k.read_rows(there, *places))

            self._channel.stream(source, [target], count, PIECE_ROWS, "carries", fill, take)
        return audit.value() if rank in (source, target) else 0


def _places(view: RowView, lane: int, rows: Sequence[int]) -> tuple[Array, Array]:
    """Pages and offsets of rows of a lane of `view`."""
    slots, offsets = np.divmod(np.array(rows, np.int32), np.int32(view.rows))
    return view.tables[lane, slots], offsets
