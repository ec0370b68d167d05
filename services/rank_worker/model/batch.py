"""What one forward pass runs on: rows of one path, with their lanes, positions and addresses.

Made by the round executor from an operation; the model only reads it. Everything here is known to the host from the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kernels.api import Path
from latentpool.geometry import BLOCK
from services.rank_worker.arena import Arena

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class Pools:
    """Index pools that complete within the pass, and where their keys go.

    On the prompt path pool i's members are rows i * P .. of the pass itself (a chunk starts at a multiple of 64, which the
    pool divides). On the decode path they are at ring positions members[i * P ..] of lanes member_lanes[i * P ..].
    """

    count: int
    pages: Int32
    offsets: Int32
    member_lanes: Int32
    members: Int32


@dataclass(frozen=True)
class Batch:
    """T rows in `windows` windows of `width` rows each; window i belongs to lane window_lanes[i] and starts at position
    starts[i]. Padding rows (prompt only, from `rows` on) have position -1 and write to the discard page, as do rows that
    another rank keeps."""

    path: Path
    rows: int
    tokens: Int32  # [T]
    lanes: Int32  # [T]
    positions: Int32  # [T]
    pages: Int32  # [T] latent page of each row
    offsets: Int32  # [T]
    windows: int
    width: int
    window_lanes: Int32  # [windows]
    starts: Int32  # [windows]
    source: Int32  # [windows] place of the KDA state read
    target: Int32  # [windows] place of the KDA state written
    pools: Pools

    @cached_property
    def total(self) -> int:
        return len(self.tokens)


def prompt_batch(arena: Arena, lane: int, start: int, tokens: Sequence[int], parity: int) -> Batch:
    """Rows start.. of one conversation, padded to whole blocks. The KDA state is updated in place."""
    rows = len(tokens)
    total = -(-rows // BLOCK) * BLOCK
    ids = np.zeros(total, np.int32)
    ids[:rows] = tokens
    positions = np.full(total, -1, np.int32)
    positions[:rows] = np.arange(start, start + rows, dtype=np.int32)
    lanes = np.full(total, lane, np.int32)
    pages, offsets = arena.latent_places(lanes, positions)
    place = np.array([2 * lane + parity], np.int32)
    return Batch(
        Path.PROMPT, rows, ids, lanes, positions, pages, offsets,
        windows=1, width=total, window_lanes=np.array([lane], np.int32), starts=np.array([start], np.int32),
        source=place, target=place, pools=_prompt_pools(arena, lane, start, rows),
    )  # fmt: skip


def decode_batch(
    arena: Arena, lanes: Sequence[int], starts: Sequence[int], tokens: Sequence[int], width: int, parities: Sequence[int]
) -> Batch:
    """Windows of `width` rows, `tokens` lane-major [len(lanes) * width]. Each window reads its lane's committed parity and
    writes the other."""
    window_lanes = np.array(lanes, np.int32)
    first = np.array(starts, np.int32)
    row_lanes: Int32 = np.repeat(window_lanes, width)
    positions: Int32 = np.add.outer(first, np.arange(width, dtype=np.int32)).reshape(-1)
    pages, offsets = arena.latent_places(row_lanes, positions)
    parity = np.array(parities, np.int32)
    return Batch(
        Path.DECODE, len(positions), np.array(tokens, np.int32), row_lanes, positions, pages, offsets,
        windows=len(lanes), width=width, window_lanes=window_lanes, starts=first,
        source=2 * window_lanes + parity, target=2 * window_lanes + 1 - parity,
        pools=_decode_pools(arena, row_lanes, positions),
    )  # fmt: skip


def _prompt_pools(arena: Arena, lane: int, start: int, rows: int) -> Pools:
    count = rows // arena.geometry.pool
    pools = start // arena.geometry.pool + np.arange(count, dtype=np.int32)
    pages, offsets = arena.pool_places(np.full(count, lane, np.int32), pools)
    none = np.empty(0, np.int32)
    return Pools(count, pages, offsets, none, none)


def _decode_pools(arena: Arena, lanes: Int32, positions: Int32) -> Pools:
    size = arena.geometry.pool
    last = np.flatnonzero((positions + 1) % size == 0)
    pages, offsets = arena.pool_places(lanes[last], positions[last] // size)
    members: Int32 = np.subtract.outer(positions[last], np.arange(size - 1, -1, -1, dtype=np.int32))
    member_lanes: Int32 = np.repeat(lanes[last], size)
    return Pools(len(last), pages, offsets, member_lanes, members.reshape(-1))
