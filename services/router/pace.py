"""How much work beside decoding goes into a round: prompt rows to compute, and rows to carry to another owner."""

from __future__ import annotations

from dataclasses import dataclass

from latentpool.geometry import BLOCK

GAP_SECONDS = 0.15
"""Target of the gap between a stream's tokens while other work is done beside it."""
MOST_CARRIED_ROWS = 16384
"""Of a round in which nobody decodes: whoever comes or leaves meanwhile waits for it."""
_EASING = 0.9


@dataclass(slots=True)
class Pace:
    """How many rows fit beside streams that decode, learned from rounds. Bits do not depend on it (E2). A round slower than
    expected counts at once and a faster one little by little: most gaps, not the average one, are to meet the target."""

    chunk_rows: int
    seconds_a_row: float = 0.0
    seconds_a_carried_row: float = 0.0
    decode_seconds: float = 0.0
    """Of a round with nothing else in it."""

    def rows(self, others_decode: bool, carried: int = 0) -> int:
        """Rows of prompt work a round, a multiple of 64, beside so many rows that it carries."""
        if not others_decode or not self.seconds_a_row:
            return self.chunk_rows
        left = self._gap - carried * self.seconds_a_carried_row
        fits = int(max(left, 0.0) / self.seconds_a_row) // BLOCK * BLOCK
        return min(max(fits, BLOCK), self.chunk_rows)

    def carried_rows(self, others_decode: bool) -> int:
        """Rows that a round may carry, possibly none: the caller takes whole pages, and at least one."""
        if not others_decode:
            return MOST_CARRIED_ROWS
        if not self.seconds_a_carried_row:
            return self.chunk_rows
        return min(int(self._gap / self.seconds_a_carried_row), MOST_CARRIED_ROWS)

    def learn(self, blocks: int, decodes: bool, seconds: float, carried: int = 0) -> None:
        """A round of so many prompt blocks (a short one costs a whole one) and rows carried, with or without decode windows,
        took so long. What is known of the one is taken off before the other is learned."""
        rows = blocks * BLOCK
        rest = seconds - (self.decode_seconds if decodes else 0.0)
        prompts, carries = rows * self.seconds_a_row, carried * self.seconds_a_carried_row
        if rows:
            self.seconds_a_row = max((rest - carries) / rows, _EASING * self.seconds_a_row)
        if carried:
            self.seconds_a_carried_row = max((rest - prompts) / carried, _EASING * self.seconds_a_carried_row)
        if decodes and not rows and not carried:
            self.decode_seconds = max(seconds, _EASING * self.decode_seconds)

    @property
    def _gap(self) -> float:
        """Seconds of a gap that decoding leaves."""
        return max(GAP_SECONDS - self.decode_seconds, 0.0)
