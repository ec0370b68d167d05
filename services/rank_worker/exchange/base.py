"""The data plane between engines: fixed channels of registered link buffers, and nothing else.

A channel is prepared once with its maxima and used every round. Both sides derive from the round how many rows travel, so
no counts cross the link. Nothing is ever received into the arena: only into link buffers, which an abort abandons.
Source: design sections 8 and 12; measured facts in docs/data_plane.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Slot(Protocol):
    """One parity of one channel: what may be in flight at a time.

    send  [W, *shape] where each peer gets its own block (`each=True`), or [*shape]: one block for all peers
    recv  [W, *shape]; recv[rank] (one's own) is neither sent nor written by the exchange

    Between `enqueue` and the return of `wait` the buffers belong to the exchange: send must not be written, recv must not be
    read. After `wait` recv holds until the next `enqueue` of the same slot.
    """

    send: NDArray[np.generic]
    recv: NDArray[np.generic]


class Exchange(Protocol):
    """All-to-all blocks between `world` ranks. One thread owns it. Every rank prepares the same channels in the same order."""

    rank: int
    world: int

    def prepare(self, name: str, shape: Sequence[int], dtype: np.dtype[np.generic], *, each: bool = False) -> tuple[Slot, Slot]:
        """Makes a channel and gives its two parities. `shape` is the largest block: [max rows, ...]. May be called before or
        after `connect`. Raises ValueError for a name used before."""

    def connect(self, addresses: Sequence[bytes], epoch: int, deadline: float) -> None:
        """Connects to all peers and exchanges one greeting with each. `addresses` in rank order, as given by their
        `address`; `deadline` in seconds from now. Raises LinkError naming the rank that did not answer."""

    @property
    def address(self) -> bytes:
        """What peers need to connect to this rank; opaque."""

    def enqueue(self, slot: Slot, send: Sequence[int], recv: Sequence[int]) -> None:
        """Starts sending the first send[p] rows of peer p's block and receiving the first recv[p] rows from p; entries at
        one's own rank are ignored, 0 rows send nothing. Returns at once. Raises LinkError if the link is already broken,
        ValueError if a count is above the maximum or the slot is in flight."""

    def wait(self, slot: Slot, deadline: float) -> None:
        """Until everything of `slot` has been received and its send buffer may be written again; never before all peers that
        share rows of it with this rank have enqueued it too. Raises LinkError naming the rank that the trouble began with:
        at once (over shared memory within UCX's keepalive interval) when any peer is gone, after `deadline` seconds when one
        of this slot's is silent. After a LinkError the exchange stays broken: abort it and make another."""

    def close(self) -> None:
        """Flushes what is in flight, says goodbye, releases everything. Idempotent."""

    def abort(self) -> None:
        """Drops what is in flight and abandons endpoints and buffers. Safe from any state; idempotent."""
