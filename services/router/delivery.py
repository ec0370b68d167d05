"""One bounded, coalescing mailbox a stream: between the round loop, which never waits, and a client, which may."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from latentpool.errors import LatentPoolError
from latentpool.v1 import router_pb2

TOKEN_BYTES = 4
LIMIT_BYTES = 8 << 10
"""Undelivered bytes from which a conversation stops decoding: about 2,000 tokens."""


@dataclass(slots=True)
class Tokens:
    """Reply tokens from index `first_index` on. The first `spoken` of them are text; a stop token behind them is not."""

    first_index: int
    ids: list[int] = field(default_factory=list)
    spoken: int = 0


Event = router_pb2.Waiting | router_pb2.Filling | Tokens | router_pb2.ScoredRows | router_pb2.Completion


class Mailbox:
    """Events of one stream, in order. Progress replaces undelivered progress of its kind and tokens join undelivered
    tokens, so a slow reader gets fewer, larger messages. `wake` is called when a full mailbox was drained."""

    def __init__(self, wake: asyncio.Event) -> None:
        self._events: deque[Event] = deque()
        self._bytes = 0
        self._error: LatentPoolError | None = None
        self._arrived = asyncio.Event()
        self._wake = wake

    @property
    def full(self) -> bool:
        """Whether the conversation must stop producing. One round's events are taken in all the same."""
        return self._bytes >= LIMIT_BYTES

    @property
    def bytes(self) -> int:
        """Undelivered payload bytes."""
        return self._bytes

    def put(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, Tokens):
            self._bytes += TOKEN_BYTES * len(event.ids)
            if isinstance(last, Tokens):
                last.ids += event.ids
                last.spoken += event.spoken
                event = last
        elif isinstance(event, router_pb2.ScoredRows):
            self._bytes += event.ByteSize()
        progress = isinstance(event, router_pb2.Waiting | router_pb2.Filling) and type(last) is type(event)
        if progress or event is last:
            self._events.pop()
        self._events.append(event)
        self._arrived.set()

    def fail(self, error: LatentPoolError) -> None:
        """Ends the stream with an error once what is in the mailbox is delivered."""
        self._error = self._error or error
        self._arrived.set()

    async def get(self) -> Event:
        """Takes the next event. Raises the error that ended the stream. Only one task may wait."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        was_full = self.full
        if isinstance(event, Tokens):
            self._bytes -= TOKEN_BYTES * len(event.ids)
        elif isinstance(event, router_pb2.ScoredRows):
            self._bytes -= event.ByteSize()
        if was_full and not self.full:
            self._wake.set()
        return event
