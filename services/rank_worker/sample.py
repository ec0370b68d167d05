"""Sampling on every rank from all ranks' candidates (design 3.7): the same token everywhere, in one to three exchanges.

Rows without a cut need each rank's one best. Rows with top_k, top_p or min_p need each rank's WIDTH best logits, and for top_p
the exact probability mass of the whole vocabulary. Where a cut reaches past the candidates (a flat distribution over a large
vocabulary), twice as many are asked for. A token does not depend on how many candidates carried it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from kernels.api import Kernels
from kernels.rows import Array
from services.rank_worker.link import Link

WIDTH = 1024
"""Candidates a rank gives at first where there is a cut; top_k is at most this."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters of some rows, each [T]: temperature, top_p, min_p f64, top_k i32, seed u64, position u64 of the
    token to be drawn."""

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    seed: NDArray[np.uint64]
    position: NDArray[np.uint64]

    def __getitem__(self, rows: slice) -> Draws:
        return Draws(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def cut(self) -> NDArray[np.bool_]:
        """Rows that need more than each rank's best candidate."""
        cuts: NDArray[np.bool_] = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)
        return cuts & (self.temperature > 0)


class Sampler:
    """Prepares its channels once, on every rank alike. `columns` are the vocabulary columns of each rank, `rows` the most
    rows of one call."""

    def __init__(self, kernels: Kernels, link: Link, columns: Sequence[int], rows: int) -> None:
        rank = link.exchange.rank
        self._kernels = kernels
        self._link = link
        self._columns = np.array(columns, np.int32)
        self._first_id = sum(columns[:rank])
        self._channels = {"mass": link.channel("mass", (rows, 1), np.dtype(np.uint64), "samples")}
        widths = [1, WIDTH]
        while widths[-1] < max(columns):
            widths.append(2 * widths[-1])
        for width in widths:
            # rows that ask for more than WIDTH go one by one: link buffers stay small
            count = rows if width <= WIDTH else 1
            name = f"best-{width}"
            self._channels[name] = link.channel(name, (count, 2, width), np.dtype(np.float64), "samples")

    def sample(self, logits: Array, draws: Draws) -> NDArray[np.int32]:
        """Tokens i32 [T] for logits compute [T, V_r] of this rank's columns. Raises LinkError."""
        width = WIDTH if draws.cut.any() else 1
        tokens = self._draw(logits, draws, width)
        for row in np.flatnonzero(tokens < 0):
            one, wider = slice(int(row), int(row) + 1), width
            while tokens[row] < 0:
                wider *= 2
                tokens[one] = self._draw(logits[one], draws[one], wider)
        return tokens

    def best(self, logits: Array, count: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """The `count` largest logits of this rank's columns in each row, descending, ties to the lower id: ids u32 and
        logits f32 [T, count], padded with 2^32 - 1 and -inf."""
        rows = logits.shape[0]
        none = np.zeros(rows)
        scores, ids = self._candidates(logits, none, np.full(rows, count, np.int32), none.astype(np.uint64), none, count)
        return ids.astype(np.uint32), scores.astype(np.float32)

    # ---- parts -------------------------------------------------------------------------------------------------

    def _draw(self, logits: Array, draws: Draws, width: int) -> NDArray[np.int32]:
        """Tokens, -1 where `width` candidates a rank do not cover the cut."""
        k, rows, cut = self._kernels, len(draws.top_k), draws.cut
        kept = np.where(cut, np.where(draws.top_k > 0, draws.top_k, width), 0).astype(np.int32)
        scores, ids = self._candidates(logits, draws.temperature, kept, draws.seed, draws.position, width)
        # token ids are exact in f64: one block travels instead of two
        blocks = self._gather(f"best-{width}", np.stack([scores, ids], axis=1))
        scores, ids = np.ascontiguousarray(blocks[:, :, 0]), blocks[:, :, 1].astype(np.int32)
        masses = np.zeros((len(self._columns), rows), np.uint64)
        if (cut & (draws.top_k == 0) & (draws.top_p < 1)).any():
            mine = k.empty((rows,), "u64")
            k.mass(logits, scores[:, :, 0].max(axis=0), np.where(cut, draws.temperature, 0.0), mine)
            masses = self._gather("mass", k.host(mine)[:, None])[:, :, 0]
        tokens = k.empty((rows,), "i32")
        k.draw(
            scores, ids, self._columns, masses, draws.temperature, draws.top_k, draws.top_p, draws.min_p,
            draws.seed, draws.position, tokens,
        )  # fmt: skip
        return np.array(k.host(tokens), np.int32)

    def _candidates(
        self, logits: Array, temperature: Array, kept: Array, seed: Array, position: Array, width: int
    ) -> tuple[Array, Array]:
        k, rows = self._kernels, logits.shape[0]
        scores, ids = k.empty((rows, width), "f64"), k.empty((rows, width), "i32")
        k.candidates(logits, self._first_id, temperature, kept, seed, position, scores, ids)
        return k.host(scores), k.host(ids)

    def _gather(self, channel: str, mine: Array) -> Array:
        """All ranks' blocks of a channel, [W, *mine.shape]."""
        rows = len(mine)
        self._channels[channel].slot.send[:rows] = mine
        slot = self._channels[channel].all_to_all(rows)
        return np.stack([mine if r == self._link.rank else slot.recv[r, :rows] for r in range(self._link.world)])
