"""Sampling on every rank from all ranks' candidates (design 3.7): one exchange, the same token everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.api import Kernels
from kernels.rows import Array
from services.rank_worker.model.sums import Link

MAX_TOP_K = 1024


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters of some rows: temperature f64 [T], top_k i32 [T], seed u64 [T], position u64 [T] of the token to
    be drawn."""

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int32]
    seed: NDArray[np.uint64]
    position: NDArray[np.uint64]


class Sampler:
    """Prepares its channels once: one candidate a row where no row has a top_k, MAX_TOP_K otherwise. A token does not depend
    on which of the two carried it."""

    def __init__(self, kernels: Kernels, link: Link, first_id: int, rows: int) -> None:
        self._kernels = kernels
        self._link = link
        self._first_id = first_id
        prepare = link.exchange.prepare
        self._slots = {
            width: prepare(f"candidates-{width}", (rows, 2, width), np.dtype(np.float64)) for width in (1, MAX_TOP_K)
        }
        self._parity = dict.fromkeys(self._slots, 0)

    def sample(self, logits: Array, draws: Draws) -> NDArray[np.int32]:
        """Tokens i32 [T] for logits compute [T, V_r] of this rank's columns. Raises LinkError."""
        k, rows = self._kernels, len(draws.top_k)
        width = MAX_TOP_K if draws.top_k.any() else 1
        slot = self._slots[width][self._parity[width]]
        self._parity[width] ^= 1
        scores, ids = k.empty((rows, width), "f64"), k.empty((rows, width), "i32")
        k.candidates(logits, self._first_id, draws.temperature, draws.top_k, draws.seed, draws.position, scores, ids)
        block = slot.send[:rows]
        block[:, 0] = scores
        block[:, 1] = ids  # token ids are exact in f64: one block travels instead of two
        self._link.all_to_all(slot, rows)
        rank = self._link.exchange.rank
        blocks = np.stack([block if r == rank else slot.recv[r, :rows] for r in range(self._link.exchange.world)])
        tokens = k.empty((rows,), "i32")
        k.draw(
            np.ascontiguousarray(blocks[:, :, 0]), blocks[:, :, 1].astype(np.int32),
            draws.temperature, draws.top_k, draws.seed, draws.position, tokens,
        )  # fmt: skip
        return np.array(k.host(tokens), np.int32)
