"""The model that fake workers run is a hash: the logits after tokens t0..tn are random numbers seeded by them all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

VOCAB = 256
PAGE_ROWS = 64
_MASK = 2**64 - 1


def fold(state: int, tokens: Sequence[int]) -> int:
    for token in tokens:
        state = (state * 6364136223846793005 + int(token) + 1442695040888963407) & _MASK
    return state


def logits(state: int) -> np.ndarray:
    """float32 [V] after a prefix."""
    return np.random.default_rng(state).standard_normal(VOCAB).astype(np.float32)


def reply(prompt: Sequence[int], count: int) -> list[int]:
    """What the fake model says greedily, by its definition."""
    state, out = fold(0, prompt), []
    for _ in range(count):
        out.append(int(logits(state).argmax()))
        state = fold(state, out[-1:])
    return out
