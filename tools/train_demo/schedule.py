"""What each training step sees: learning rate, dense or sparse attention, kind of text, length. No clock decides anything."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from tools.train_demo.batches import TALK_LENGTH

PEAK, LEAST, WARM_UP = 2e-3, 0.05, 150
SPARSE_FROM = 0.8
TALK_PART = 0.06
_FIRST_LENGTH = 512
_GROW_AT, _GROW_STEPS = 0.8, 30
_KEEP = 0.9


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then half a cosine down to 5 % of the peak."""
    if step < WARM_UP:
        return PEAK * (step + 1) / WARM_UP
    along = min(1.0, (step - WARM_UP) / max(1, steps - WARM_UP))
    return PEAK * (LEAST + (1 - LEAST) * (1 + math.cos(math.pi * along)) / 2)


@dataclass(slots=True)
class Curriculum:
    """Lengths double when the copied tokens of the present length are mostly right."""

    seed: int
    longest: int
    length: int = _FIRST_LENGTH
    seen: int = 0
    right: float = 0.0

    def draw(self, step: int) -> tuple[int, str]:
        """Length and kind of a step's batch: half at the present length, the rest at a half and a quarter of it."""
        rng = Random(f"{self.seed}:{step}:length")
        if rng.random() < TALK_PART:
            return TALK_LENGTH, "talk"
        part = rng.choices((1, 2, 4), (0.5, 0.25, 0.25))[0]
        return max(_FIRST_LENGTH, self.length // part), "documents"

    def learn(self, length: int, right: float) -> None:
        """Takes note of how many copied tokens of a batch were right."""
        if length != self.length or math.isnan(right):
            return
        self.seen += 1
        self.right = right if self.seen == 1 else _KEEP * self.right + (1 - _KEEP) * right
        if self.right > _GROW_AT and self.seen >= _GROW_STEPS and self.length < self.longest:
            self.length, self.seen, self.right = self.length * 2, 0, 0.0

    def state(self) -> dict[str, Any]:
        return asdict(self)
