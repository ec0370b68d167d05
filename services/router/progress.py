"""What running conversations do, told to the manager for operators: what changed, at most twice a second."""

from __future__ import annotations

from collections.abc import Iterable

from latentpool.v1 import pool_manager_pb2 as pb
from services.router.conversations import Conversation, Phase

REPORT_SECONDS = 0.5


class Reports:
    def __init__(self) -> None:
        self._next = 0.0
        self._told: dict[int, tuple[int, bool]] = {}

    def due(self, conversations: Iterable[Conversation], now: float) -> list[pb.Progress]:
        """What to tell now; nothing too soon after the last time, or where nothing changed."""
        if now < self._next:
            return []
        stand = {c.id: (c.sent, c.phase is Phase.DECODING) for c in conversations if c.runs}
        changed = [(id_, *what) for id_, what in stand.items() if self._told.get(id_) != what]
        self._told = stand
        if changed:
            self._next = now + REPORT_SECONDS
        return [pb.Progress(conversation=id_, rows=rows, decoding=decoding) for id_, rows, decoding in changed]
