"""Kept states on this rank: what a conversation needs to go on from a multiple of 64 tokens (design section 6).

Rows stay in the pages that they were written to: nothing below the state's end is written again, since the lane that computed
them appends behind, and a lane that resumes copies a partly filled last page. What is fixed is copied to pages of its own, with
a checksum that is compared whenever it is restored. A state ends where no pool is open, so index rings are not part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kernels.api import Kernels
from kernels.rows import Array
from latentpool.errors import EpochError
from services.rank_worker import frames
from services.rank_worker.arena import Arena
from services.rank_worker.split.audit import Audit


@dataclass(frozen=True, slots=True)
class Kept:
    """A state of `at` tokens. pages: ids of its slots 0, 1, ... ; store: local pages of its fixed part; checksum: of that part;
    rows: hash of its latent rows where they are audited, else 0; key: what computed it."""

    at: int
    owner: int
    pages: tuple[int, ...]
    store: Array
    checksum: bytes
    rows: int
    key: str


class Inventory:
    """The kept states of one arena. key: numerics and dtypes, the same for all states of an epoch; audit: whether latent rows
    are hashed when they are kept and compared when they are resumed."""

    def __init__(self, kernels: Kernels, arena: Arena, key: str, audit: bool) -> None:
        self._kernels = kernels
        self._arena = arena
        self._key = key
        self._audit = audit
        self.states: dict[int, Kept] = {}

    def keep(self, operation: frames.Keep, place: int) -> None:
        """Keeps a lane at its position, its KDA state being at `place`. Raises ValueError for pages that do not fit."""
        arena, lane = self._arena, operation.lane
        if operation.state in self.states:
            raise ValueError(f"kept state {operation.state} exists already")
        slots = -(-operation.at // arena.page_rows)
        pages = arena.index_tables[lane, :slots].tolist()
        if arena.index_null in pages:
            raise ValueError(f"lane {lane}: slot {pages.index(arena.index_null)} is not mapped")
        store = self._store(operation)
        parts = [part for part, _ in self._fixed(lane, place, operation.at)]
        if sum(part.nbytes for part in parts) > len(store) * arena.latent[0].nbytes:
            raise ValueError(f"kept state {operation.state}: {len(store)} pages a rank are too few for its fixed part")
        self._kernels.save_bytes(parts, arena.latent, store)
        rows = self._rows(lane, operation.at)
        self.states[operation.state] = Kept(
            operation.at, int(arena.owners[lane]), tuple(pages), store, _checksum(parts), rows, self._key
        )

    def resume(self, operation: frames.Resume, place: int) -> None:
        """Puts a lane that is bound and mapped where the state ended. Raises ValueError where state and lane do not fit,
        EpochError where the state is damaged."""
        kept = self._find(operation)
        arena, lane = self._arena, operation.lane
        if arena.owners[lane] != kept.owner or arena.borrowed[lane]:
            mine = int(arena.owners[lane])
            raise ValueError(f"lane {lane} is rank {mine}'s, and kept state {operation.state} is rank {kept.owner}'s")
        self._take_pages(lane, operation, kept)
        fixed = list(self._fixed(lane, place, kept.at))
        parts = [part for part, _ in fixed]
        self._kernels.load_bytes(arena.latent, kept.store, parts)
        if _checksum(parts) != kept.checksum or self._rows(lane, kept.at) != kept.rows:
            raise EpochError(f"kept state {operation.state} of {kept.at} tokens is not what was kept: its checksum differs")
        for part, target in fixed:
            target[...] = part

    def forget(self, operation: frames.Forget) -> None:
        """Raises ValueError for a state that does not exist."""
        for state in operation.states:
            if self.states.pop(state, None) is None:
                raise ValueError(f"kept state {state} does not exist")

    # ---- parts -------------------------------------------------------------------------------------------------

    def _find(self, operation: frames.Resume) -> Kept:
        kept = self.states.get(operation.state)
        if kept is None:
            raise ValueError(f"kept state {operation.state} does not exist")
        if kept.at != operation.at:
            raise ValueError(f"kept state {operation.state} has {kept.at} tokens, not {operation.at}")
        if kept.key != self._key:
            raise ValueError(
                f"kept state {operation.state} was computed with {kept.key}, and this group computes with {self._key}"
            )
        return kept

    def _store(self, operation: frames.Keep) -> Array:
        """This rank's local pages of those that the state is given: equally many of every residue."""
        arena = self._arena
        share, rest = divmod(len(operation.pages), arena.residues)
        if rest or not share:
            raise ValueError(f"kept state {operation.state}: {len(operation.pages)} pages for {arena.residues} residues")
        for residue in range(arena.residues):
            arena.check_owned(operation.lane, operation.pages[residue * share : (residue + 1) * share], residue)
        first = (arena.rank if arena.split else 0) * share
        return np.array(operation.pages[first : first + share], np.int32) // arena.residues

    def _take_pages(self, lane: int, operation: frames.Resume, kept: Kept) -> None:
        """Checks that the lane has the state's full pages, and copies a partly filled last one, unless it has that too."""
        arena, full = self._arena, kept.at // self._arena.page_rows
        table = arena.index_tables[lane]
        if table[:full].tolist() != list(kept.pages[:full]):
            raise ValueError(f"lane {lane} has other pages than the {full} full ones of kept state {operation.state}")
        if full == len(kept.pages):
            return
        source, target = kept.pages[-1], int(table[full])
        if target == arena.index_null:
            raise ValueError(f"lane {lane}: slot {full} is not mapped")
        if source == target:
            return
        self._kernels.copy_pages(arena.index, np.array([source]), np.array([target]))
        if arena.keeps(lane):
            local = np.array([source, target]) // arena.residues
            self._kernels.copy_pages(arena.latent, local[:1], local[1:])

    def _fixed(self, lane: int, place: int, at: int) -> Iterator[tuple[Array, Array]]:
        """The fixed part of a lane at position `at`: (a contiguous copy, the place in the arena that it is a copy of)."""
        arena = self._arena
        for layer in range(len(arena.states)):
            yield arena.states[layer, place].copy(), arena.states[layer, place]
        for layer in range(len(arena.conv)):
            ring = arena.conv[layer, lane]
            for row in range(at - arena.geometry.conv_taps + 1, at):
                yield ring[row % len(ring)].copy(), ring[row % len(ring)]

    def _rows(self, lane: int, at: int) -> int:
        """Hash of the lane's latent rows below `at` on the ranks that keep them, under audit; else 0."""
        arena = self._arena
        if not self._audit or not arena.keeps(lane):
            return 0
        rows = np.arange(at, dtype=np.int32)
        pages, offsets = arena.latent_places(np.full(at, lane, np.int32), rows)
        audit = Audit()
        for layer in range(arena.latent.shape[1]):
            audit.rows(self._kernels.read_rows(arena.latent_view(layer), pages, offsets))
        return audit.value()


def _checksum(parts: Sequence[Array]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.reshape(-1).view(np.uint8).data)
    return digest.digest()
