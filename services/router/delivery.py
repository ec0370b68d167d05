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
    """Reply tokens from index `first_index` on. The first `spoken` of them are text; a stop token behind them is not.
    `log_probs`: one a token where asked for, else empty."""

    first_index: int
    ids: list[int] = field(default_factory=list)
    spoken: int = 0
    log_probs: list[router_pb2.TokenLogProb] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return TOKEN_BYTES * len(self.ids) + sum(log_prob.ByteSize() for log_prob in self.log_probs)


Progress = router_pb2.Waiting | router_pb2.Filling
Event = Progress | Tokens | router_pb2.ScoredRows | router_pb2.Completion


class Mailbox:
    """Events of one stream, in order. Progress replaces undelivered progress of its kind since the last tokens, and tokens join
    undelivered tokens, so a slow reader gets fewer, larger messages. `wake` is called when a full mailbox was drained.

    What it holds is bounded: payload by LIMIT_BYTES and the events of the rounds (two at most) that were in flight when it
    became full, and at most two progress events between others."""

    def __init__(self, wake: asyncio.Event) -> None:
        self._events: deque[Event] = deque()
        self._bytes = 0
        self._error: LatentPoolError | None = None
        self._arrived = asyncio.Event()
        self._wake = wake

    @property
    def full(self) -> bool:
        """Whether the conversation must stop producing. Events of rounds in flight are taken in all the same."""
        return self._bytes >= LIMIT_BYTES

    @property
    def bytes(self) -> int:
        """Undelivered payload bytes."""
        return self._bytes

    def put(self, event: Event) -> None:
        self._bytes += _payload(event)
        last = self._events[-1] if self._events else None
        if isinstance(event, Tokens) and isinstance(last, Tokens):
            last.ids += event.ids
            last.spoken += event.spoken
            last.log_probs += event.log_probs
        else:
            if isinstance(event, Progress):
                self._forget(type(event))
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
        self._bytes -= _payload(event)
        if was_full and not self.full:
            self._wake.set()
        return event

    def _forget(self, kind: type[Progress]) -> None:
        """Drops progress of a kind that nothing but other progress followed."""
        for index in range(len(self._events) - 1, -1, -1):
            if not isinstance(self._events[index], Progress):
                return
            if isinstance(self._events[index], kind):
                del self._events[index]
                return


def _payload(event: Event) -> int:
    """Bytes that count towards the limit."""
    if isinstance(event, Tokens):
        return event.bytes
    return event.ByteSize() if isinstance(event, router_pb2.ScoredRows) else 0
