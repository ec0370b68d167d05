"""How much prompt work goes into a round while others decode."""

from __future__ import annotations

from dataclasses import dataclass

from latentpool.geometry import BLOCK

GAP_SECONDS = 0.15
"""Target of the gap between a stream's tokens while prompts are computed beside it."""
_EASING = 0.9


@dataclass(slots=True)
class Pace:
    """How many prompt rows fit beside streams that decode, learned from rounds. Bits do not depend on it (E2). A round slower
    than expected counts at once and a faster one little by little: most gaps, not the average one, are to meet the target."""

    chunk_rows: int
    seconds_a_row: float = 0.0
    decode_seconds: float = 0.0
    """Of a round without prompt rows."""

    def rows(self, others_decode: bool) -> int:
        """Rows of prompt work a round, a multiple of 64."""
        if not others_decode or not self.seconds_a_row:
            return self.chunk_rows
        fits = int(max(GAP_SECONDS - self.decode_seconds, 0.0) / self.seconds_a_row) // BLOCK * BLOCK
        return min(max(fits, BLOCK), self.chunk_rows)

    def learn(self, blocks: int, decodes: bool, seconds: float) -> None:
        """A round of so many prompt blocks (a short one costs a whole one), with or without decode windows, took so long."""
        if blocks:
            beside = self.decode_seconds if decodes else 0.0
            self.seconds_a_row = max(max(seconds - beside, 0.0) / (blocks * BLOCK), _EASING * self.seconds_a_row)
        elif decodes:
            self.decode_seconds = max(seconds, _EASING * self.decode_seconds)
