"""One bidirectional stream as the manager sees it: one reader task, one queue, and the handler alone writes.

Nothing here ever cancels a read or a write of a living stream: cancelling either cancels the call (design section 11).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from latentpool.errors import HandshakeError

_HELLO_DEADLINE = 10.0

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


@dataclass(frozen=True, slots=True)
class _Taken:
    message: Any


@dataclass(frozen=True, slots=True)
class _Sent:
    message: Any


@dataclass(frozen=True, slots=True)
class _Closed:
    code: grpc.StatusCode
    details: str


class Stream(Generic[Incoming, Outgoing]):
    """`send` and `close` may be called from anywhere in the loop; they queue and return at once."""

    def __init__(self, context: grpc.aio.ServicerContext[Incoming, Outgoing]) -> None:
        self._context = context
        self._queue: asyncio.Queue[_Taken | _Sent | _Closed | None] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None

    def send(self, message: Outgoing) -> None:
        """Writes a message after those queued before."""
        self._queue.put_nowait(_Sent(message))

    def close(self, code: grpc.StatusCode = grpc.StatusCode.OK, details: str = "") -> None:
        """Ends the stream once everything queued before is written."""
        self._queue.put_nowait(_Closed(code, details))

    async def run(self, take: Callable[[Incoming], None]) -> None:
        """Hands each message to `take` and writes what is queued, until either side ends the stream. Raises AbortError
        where it was closed with a code."""
        self._reader = asyncio.create_task(self._read())
        while (event := await self._queue.get()) is not None:
            match event:
                case _Taken(message):
                    take(message)
                case _Sent(message):
                    await self._context.write(message)
                case _Closed(grpc.StatusCode.OK, _):
                    return
                case _Closed(code, details):
                    await self._context.abort(code, details)

    async def _read(self) -> None:
        try:
            while True:
                message = await self._context.read()
                if message is grpc.aio.EOF:
                    return
                self._queue.put_nowait(_Taken(message))
        except (grpc.aio.BaseError, asyncio.CancelledError):
            return  # the call is over; the queue's end says so
        finally:
            self._queue.put_nowait(None)


class UnprovenError(HandshakeError):
    """It does not know the group's secret."""


class GroupOverError(HandshakeError):
    """It comes too late."""


def greet(stream: Stream[Any, Any], challenge: object) -> asyncio.TimerHandle:
    """Sends the challenge; the returned timer ends the stream unless it is cancelled in time."""
    stream.send(challenge)
    text = f"no hello in {_HELLO_DEADLINE:g} s"
    return asyncio.get_running_loop().call_later(_HELLO_DEADLINE, stream.close, grpc.StatusCode.DEADLINE_EXCEEDED, text)


async def until_end(stream: Stream[Any, Any], take: Callable[[Any], None], context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Runs the stream; what `take` refuses ends it with a status that says why."""
    try:
        await stream.run(take)
    except UnprovenError as error:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
    except GroupOverError as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    except HandshakeError as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
