"""When a request that found the queue full may try again."""

from __future__ import annotations

import math

LEAST_SECONDS, MOST_SECONDS = 1, 60
_WEIGHT = 0.2
_SHARE = 8


class Turnover:
    """How long conversations keep a lane, learned from those that end."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def learn(self, seconds: float) -> None:
        """A conversation left its lane after so long."""
        self._seconds += (seconds - self._seconds) * (_WEIGHT if self._seconds else 1.0)

    def delay(self, waiting: int, lanes: int) -> int:
        """Whole seconds, 1 to 60, in which an eighth of those who wait (at least one) can be expected to have got a lane:
        whoever comes back then finds places, and not all come back for the first one."""
        seconds = max(1.0, waiting / _SHARE) * self._seconds / lanes
        return min(max(math.ceil(seconds), LEAST_SECONDS), MOST_SECONDS)
