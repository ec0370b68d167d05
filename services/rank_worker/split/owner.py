"""Owner decode: queries travel to the ranks that keep the rows, attended rows travel back (design section 8).

Two exchanges a latent layer, whatever the number of rows and owners; the first is under way while the selection is computed.
A block holds, row by row in the order of the batch, the
rows of one owner with the heads of one rank; both ends derive its size from the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.api import Kernels
from kernels.rows import Array
from latentpool.geometry import Geometry, shares
from services.rank_worker.exchange.base import Slot
from services.rank_worker.link import Link
from services.rank_worker.model.pass_ import Pass
from services.rank_worker.split.rows import store


def owner_bytes(geometry: Geometry, world: int, rows: int, element: int) -> int:
    """Bytes of OwnerRows' link buffers and scratch for so many decode rows; element: bytes of a compute value on the link."""
    block = rows * max(shares(geometry.heads, world)) * geometry.latent
    return 2 * 2 * 2 * world * block * element + 2 * rows * geometry.heads * geometry.latent * 4


@dataclass(frozen=True, slots=True)
class _Routes:
    """Batch rows by owner, [W] index arrays, of which `mine` are this rank's; `slot` holds the queries under way."""

    rows: Sequence[Array]
    mine: Array
    slot: Slot


class OwnerRows:
    """Decode windows of a split group. Prepares its channels once, on every rank alike, for at most `rows` rows."""

    def __init__(self, geometry: Geometry, kernels: Kernels, link: Link, rows: int) -> None:
        self._kernels = kernels
        self._link = link
        self._heads = shares(geometry.heads, link.world)
        stops = np.cumsum(self._heads).tolist()
        self._tiles = [slice(stop - heads, stop) for stop, heads in zip(stops, self._heads, strict=True)]
        shape = (rows * max(self._heads), geometry.latent)
        self._queries = link.channel("queries", shape, kernels.wire, "queries", each=True)
        self._outputs = link.channel("outputs", shape, kernels.wire, "outputs", each=True)
        self._q = kernels.empty((rows, geometry.heads, geometry.latent), "compute")
        self._out = kernels.empty((rows, geometry.heads, geometry.latent), "compute")
        self._under_way: _Routes | None = None

    def store(self, p: Pass, layer: int, rows: Array) -> None:
        store(p, layer, rows)

    def send_queries(self, p: Pass, q: Array) -> None:
        rank, heads = self._link.rank, self._heads[self._link.rank]
        owners = p.arena.owners[p.batch.lanes]
        by_owner = [np.flatnonzero(owners == owner) for owner in range(self._link.world)]
        mine, send = by_owner[rank], self._queries.slot.send
        for peer, rows in enumerate(by_owner):
            if peer != rank and len(rows):
                self._kernels.pack(q[rows].reshape(len(rows) * heads, -1), send[peer, : len(rows) * heads])
        slot = self._queries.start([len(rows) * heads for rows in by_owner], [len(mine) * count for count in self._heads])
        self._under_way = _Routes(by_owner, mine, slot)

    def attend(self, p: Pass, layer: int, q: Array, out: Array) -> None:
        routes, self._under_way = self._under_way, None
        assert routes is not None
        self._take_queries(q, routes)
        if len(routes.mine):
            self._attend_mine(p, layer, routes.mine)
        self._return_outputs(out, routes)

    def _take_queries(self, q: Array, routes: _Routes) -> None:
        """self._q [mine, all heads, r] of the rows that this rank owns; q compute [T, h, r] of its own heads."""
        self._link.wait(routes.slot)
        mine = len(routes.mine)
        if not mine:
            return
        for peer, (tile, count) in enumerate(zip(self._tiles, self._heads, strict=True)):
            if peer == self._link.rank:
                self._q[:mine, tile] = q[routes.mine]
            else:
                self._kernels.unpack(routes.slot.recv[peer, : mine * count].reshape(mine, count, -1), self._q[:mine, tile])

    def _attend_mine(self, p: Pass, layer: int, rows: Array) -> None:
        mine, batch, selection = len(rows), p.batch, p.selection
        assert selection is not None  # geometry: a shared layer follows a full one
        p.kernels.attend(
            batch.path, self._q[:mine], p.arena.latent_view(layer), batch.lanes[rows], batch.positions[rows],
            selection.lists[rows], selection.counts[rows], p.geometry.nope_dim**-0.5, self._out[:mine], self._heads,
        )  # fmt: skip

    def _return_outputs(self, out: Array, routes: _Routes) -> None:
        """out compute [T, h, r] of this rank's heads, each row from its owner."""
        k, rank, heads = self._kernels, self._link.rank, self._heads[self._link.rank]
        mine, send = len(routes.mine), self._outputs.slot.send
        if mine:
            out[routes.mine] = self._out[:mine, self._tiles[rank]]
            for peer, (tile, count) in enumerate(zip(self._tiles, self._heads, strict=True)):
                if peer != rank:
                    k.pack(self._out[:mine, tile], send[peer, : mine * count].reshape(mine, count, -1))
        slot = self._outputs.exchange([mine * count for count in self._heads], [len(rows) * heads for rows in routes.rows])
        for peer, rows in enumerate(routes.rows):
            if peer != rank and len(rows):
                back = self._kernels.empty((len(rows), *out.shape[1:]), "compute")
                k.unpack(slot.recv[peer, : len(rows) * heads].reshape(back.shape), back)
                out[rows] = back
