"""Link buffers: the two parities of a channel, and the checks that every exchange makes before it touches them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CHANNELS = 0x7FFF
"""Channels an exchange can have: 15 bits of the tag, the 16th being for receipts and channel 0 the exchange's own."""


def page_aligned(shape: Sequence[int], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Zeros [*shape], contiguous, writeable, beginning on a memory page."""
    size = math.prod(shape) * dtype.itemsize
    room = np.zeros(size + mmap.PAGESIZE, np.uint8)
    skip = -room.ctypes.data % mmap.PAGESIZE
    return room[skip : skip + size].view(dtype).reshape(shape)


class LinkSlot:
    """A `Slot` of base.py with what the transports need of it.

    send_bytes, recv_bytes  uint8 [max rows * row_bytes] a rank: flat views of that rank's block (of the one block, for
                            a broadcast). Transports use only these: not every dtype can be exported as a buffer.
    """

    def __init__(self, name: str, channel: int, world: int, shape: Sequence[int], dtype: np.dtype[np.generic], each: bool):
        self.name = name
        self.channel = channel
        self.max_rows = shape[0]
        self.row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self.send = self._made_send = page_aligned((world, *shape) if each else tuple(shape), dtype)
        self.recv = self._made_recv = page_aligned((world, *shape), dtype)
        self.send_bytes = [_flat(self.send[rank] if each else self.send) for rank in range(world)]
        self.recv_bytes = [_flat(self.recv[rank]) for rank in range(world)]
        self.in_flight = False

    def check(self, rank: int, send: Sequence[int], recv: Sequence[int]) -> None:
        """Raises ValueError for what `enqueue` refuses; `rank` is one's own, whose counts are ignored."""
        if self.in_flight:
            raise ValueError(f"channel {self.name}: this parity is in flight; wait for it before the next enqueue")
        if self.send is not self._made_send or self.recv is not self._made_recv:
            raise ValueError(f"channel {self.name}: its arrays were replaced; only the buffers made by prepare travel")
        if not (self.send.flags.c_contiguous and self.recv.flags.c_contiguous and self.recv.flags.writeable):
            raise ValueError(f"channel {self.name}: its buffers must be contiguous, and recv writeable")
        for what, counts in (("send", send), ("recv", recv)):
            if len(counts) != len(self.recv_bytes):
                raise ValueError(f"channel {self.name}: {len(counts)} {what} counts for {len(self.recv_bytes)} ranks")
            for peer, rows in enumerate(counts):
                if peer != rank and not 0 <= rows <= self.max_rows:
                    raise ValueError(
                        f"channel {self.name}: {what} of {rows} rows, rank {peer}: allowed are 0 to {self.max_rows}"
                    )


def _flat(block: NDArray[np.generic]) -> NDArray[np.uint8]:
    return block.reshape(-1).view(np.uint8)


class Channels:
    """The channels of one exchange, numbered from 1 in the order of `prepare`."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._names: set[str] = set()
        self.slots: list[LinkSlot] = []

    def prepare(self, name: str, shape: Sequence[int], dtype: np.dtype[np.generic], each: bool) -> tuple[LinkSlot, LinkSlot]:
        """Both parities of a new channel. Raises ValueError for a name used before and for what cannot travel."""
        dtype = np.dtype(dtype)
        if name in self._names:
            raise ValueError(f"channel {name} was prepared before")
        if len(self._names) == CHANNELS:
            raise ValueError(f"channel {name}: an exchange has at most {CHANNELS} channels")
        if not shape or min(shape) < 0:
            raise ValueError(f"channel {name}: shape {tuple(shape)} is not [max rows, ...]")
        if dtype.hasobject:
            raise ValueError(f"channel {name}: dtype {dtype} holds references, which cannot travel")
        self._names.add(name)
        number = len(self._names)
        pair = (
            LinkSlot(name, number, self._world, shape, dtype, each),
            LinkSlot(name, number, self._world, shape, dtype, each),
        )
        self.slots += pair
        return pair
