"""How fast a group is: what its counters gained over the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping

from latentpool.v1 import pool_admin_pb2 as pb

_SPAN = 5.0
"""Seconds that a rate looks back at most; counters are reported by heartbeats and twice a second, which must not show."""


class Rates:
    """Rates of growing counters, by key. A counter that falls has begun anew, and has no rate until it is seen again."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[Hashable, int]]] = deque()

    def add(self, now: float, counters: Mapping[Hashable, int]) -> None:
        """What the counters are at `now` seconds; keys that are missing have ended."""
        if self._seen:
            last = self._seen[-1][1]
            begun = {key for key, value in counters.items() if value < last.get(key, 0)}
            for _, older in self._seen:
                for key in begun:
                    older.pop(key, None)
        self._seen.append((now, dict(counters)))
        while len(self._seen) > 2 and now - self._seen[0][0] > _SPAN:
            self._seen.popleft()

    def of(self, key: Hashable) -> float | None:
        """A second; None where it was not seen twice."""
        if not self._seen or key not in self._seen[-1][1]:
            return None
        now, latest = self._seen[-1]
        for then, counters in self._seen:
            if key in counters and now > then:
                return (latest[key] - counters[key]) / (now - then)
        return None

    def sum(self, keys: Iterable[Hashable]) -> float | None:
        """Of all that have one; None where none has."""
        known = [rate for key in keys if (rate := self.of(key)) is not None]
        return sum(known) if known else None


def counters(told: pb.WatchResponse) -> dict[Hashable, int]:
    """What `latentpool top` shows as rates: ("reading" | "replying", conversation): rows that were computed; ("sent", rank):
    bytes."""
    found: dict[Hashable, int] = {}
    for entry in told.conversations.conversations:
        if entry.state != pb.CONVERSATION_STATE_WAITING:
            found[doing(entry), entry.conversation] = max(entry.rows - entry.cached_tokens, 0)
    for rank in told.ranks.ranks:
        found["sent", rank.rank] = sum(value for _, value in rank.sent.ListFields())
    return found


def doing(entry: pb.ConversationInfo) -> str:
    """A conversation reads its prompt, then replies: two speeds that must not be added up."""
    return "reading" if entry.rows < entry.prompt_tokens or entry.idle else "replying"
