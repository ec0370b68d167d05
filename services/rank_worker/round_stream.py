"""RankWorker.Rounds: takes the router's rounds in order, keeps results until they are acknowledged (design section 7).

A front has one stream at a time. A broken one is reopened inside the epoch: the router sends again from the first round it
has no result of, and is answered from what was kept, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
import structlog

from latentpool.v1 import pool_manager_pb2, rank_worker_pb2_grpc
from latentpool.v1 import rank_worker_pb2 as pb
from services.rank_worker import convert, frames

log = structlog.get_logger()

_GRANT_PATIENCE = 5.0
"""Seconds a stream may wait for the manager's word of a term: it comes on another stream than the router's."""

_Context = grpc.aio.ServicerContext[pb.RoundsRequest, pb.RoundsResponse]


class _RefusedError(Exception):
    """Ends a stream with a status."""

    def __init__(self, code: grpc.StatusCode, words: str) -> None:
        super().__init__(words)
        self.code = code


_DONE = object()


def _over(term: int, granted: int) -> str:
    return f"term {term} is over: term {granted} was granted since"


class _Stream:
    """One open Rounds call. It answers every round from the first that was sent on it, in order: `next` is the result due,
    `asked` the highest round sent on it."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[pb.RoundResult | _RefusedError | object] = asyncio.Queue()
        self.next = 1
        self.asked = 0
        self.half_closed = False


class RoundStream(rank_worker_pb2_grpc.RankWorkerServicer):
    """The servicer. `to_engine` queues a round in call order and returns when the pipe has room."""

    def __init__(self, rank: int, to_engine: Callable[[frames.Round], Awaitable[None]]) -> None:
        self._rank = rank
        self._to_engine = to_engine
        self._shut: str | None = f"rank {rank} is not ready yet"
        self._over = False
        self._epoch = 0
        self._granted = pool_manager_pb2.TermGranted()
        self._changed = asyncio.Event()
        self._stream: _Stream | None = None
        self._executing: deque[tuple[int, int]] = deque()
        """(term, seq) of the rounds in the engine: its results come in this order and do not name the term."""
        self._begin()

    def _begin(self) -> None:
        self._last_seq = 0
        self._acknowledged = 0
        self._kept: dict[int, pb.RoundResult] = {}

    # ---- what the front says -----------------------------------------------------------------------------------------

    def open(self, epoch: int) -> None:
        """The engine is ready: streams of this epoch are admitted."""
        self._epoch = epoch
        if not self._over:
            self._shut = None

    def close(self, reason: str) -> None:
        """No stream and no new round is admitted any more; rounds that were taken are still answered. The first reason
        stays."""
        if not self._over:
            self._over, self._shut = True, reason
            self._announce()

    def end(self, reason: str) -> None:
        """Closes, and ends the open stream with UNAVAILABLE after the results it already holds."""
        self.close(reason)
        self._replace_stream(None, _RefusedError(grpc.StatusCode.UNAVAILABLE, self._shut or reason))

    def grant(self, message: pool_manager_pb2.TermGranted) -> None:
        """The manager granted a router a term. A stream of a lower term ends at once."""
        if message.term > self._granted.term:
            self._replace_stream(
                None, _RefusedError(grpc.StatusCode.FAILED_PRECONDITION, _over(self._granted.term, message.term))
            )
            self._granted = message
            self._begin()
            self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def executing(self) -> int:
        """Seq of the round that the engine is to answer next; 0: it owes none."""
        return self._executing[0][1] if self._executing else 0

    def deliver(self, frame: frames.RoundResult) -> None:
        """The engine's next result. Raises ValueError if it is not of the round that is due."""
        if not self._executing or self._executing[0][1] != frame.seq:
            due = f"round {self._executing[0][1]}" if self._executing else "no round"
            raise ValueError(f"the engine answered round {frame.seq} where {due} was due")
        term, seq = self._executing.popleft()
        if term == self._granted.term and seq > self._acknowledged:
            self._kept[seq] = convert.result_to_proto(frame, with_tokens=self._rank == 0)
            self._flow()

    # ---- the stream ----------------------------------------------------------------------------------------------------

    async def Rounds(  # type: ignore[override]  # noqa: N802 - a coroutine that writes, and the service's name
        self, request_iterator: AsyncIterator[pb.RoundsRequest], context: _Context
    ) -> None:
        stream = _Stream()
        taking: asyncio.Task[None] | None = None
        requests = aiter(request_iterator)
        try:
            await self._admit(await anext(requests, pb.RoundsRequest()), stream)
            await context.write(pb.RoundsResponse(opened=pb.RoundsOpened(last_seq=self._last_seq)))
            taking = asyncio.create_task(self._take_all(requests, stream))
            while (item := await stream.outgoing.get()) is not _DONE:
                if isinstance(item, _RefusedError):
                    raise item
                assert isinstance(item, pb.RoundResult)
                await context.write(pb.RoundsResponse(result=item))
        except _RefusedError as refusal:
            log.warning("round stream ends", reason=str(refusal))
            await context.abort(refusal.code, str(refusal))
        finally:
            if self._stream is stream:
                self._stream = None
            if taking is not None:
                taking.cancel()

    async def _admit(self, request: pb.RoundsRequest, stream: _Stream) -> None:
        """Makes `stream` the one stream, or raises _RefusedError."""
        if request.WhichOneof("message") != "open":
            raise _RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "a round stream begins with OpenRounds")
        opening = request.open
        await self._wait_granted(opening.term)
        self._check_open()
        granted = self._granted
        if granted.term == 0 or opening.term > granted.term:
            raise _RefusedError(
                grpc.StatusCode.PERMISSION_DENIED,
                f"term {opening.term} was not granted: the highest that rank {self._rank} knows is {granted.term}",
            )
        if opening.term < granted.term:
            raise _RefusedError(grpc.StatusCode.FAILED_PRECONDITION, _over(opening.term, granted.term))
        if not hmac.compare_digest(opening.key, granted.key):
            raise _RefusedError(grpc.StatusCode.PERMISSION_DENIED, f"the key is not the one granted for term {opening.term}")
        if opening.epoch != self._epoch:
            raise _RefusedError(
                grpc.StatusCode.FAILED_PRECONDITION, f"rank {self._rank} is in epoch {self._epoch}, not {opening.epoch}"
            )
        self._replace_stream(stream, _RefusedError(grpc.StatusCode.ABORTED, f"a newer stream of term {opening.term} took over"))

    async def _wait_granted(self, term: int) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + _GRANT_PATIENCE
        while self._shut is None and term > self._granted.term and (left := deadline - clock()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _check_open(self) -> None:
        if self._shut is not None:
            raise _RefusedError(grpc.StatusCode.UNAVAILABLE, self._shut)

    def _replace_stream(self, stream: _Stream | None, farewell: _RefusedError) -> None:
        if self._stream is not None:
            self._stream.outgoing.put_nowait(farewell)
        self._stream = stream

    async def _take_all(self, requests: AsyncIterator[pb.RoundsRequest], stream: _Stream) -> None:
        try:
            async for request in requests:
                if self._stream is not stream:
                    return
                if request.WhichOneof("message") != "round":
                    raise _RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "an open round stream takes rounds only")
                await self._take(request.round, stream)
            stream.half_closed = True
            self._flow()
        except _RefusedError as refusal:
            stream.outgoing.put_nowait(refusal)
        except grpc.aio.BaseError:
            pass  # the call is over, and its handler knows
        except Exception as error:
            log.exception("round stream failed")
            stream.outgoing.put_nowait(_RefusedError(grpc.StatusCode.INTERNAL, f"rank {self._rank}: {error!r}"))

    async def _take(self, message: pb.Round, stream: _Stream) -> None:
        if (message.term, message.epoch) != (self._granted.term, self._epoch):
            raise _RefusedError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"round {message.seq} is of term {message.term}, epoch {message.epoch}: "
                f"this stream is of term {self._granted.term}, epoch {self._epoch}",
            )
        self._acknowledge(message.acknowledged_seq)
        seq = message.seq
        if not 1 <= seq <= self._last_seq + 1:
            raise _RefusedError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"round {seq} leaves a gap: rank {self._rank} has taken rounds up to {self._last_seq}",
            )
        if seq <= stream.asked:  # a repeat: acknowledged, kept, or still running and answered when it is done
            if seq in self._kept:
                stream.outgoing.put_nowait(self._kept[seq])
            return
        if not stream.asked:
            stream.next = seq
        stream.asked = seq
        if seq > self._last_seq:
            await self._execute(message)
        self._flow()

    async def _execute(self, message: pb.Round) -> None:
        self._check_open()
        try:
            frame = convert.round_to_frame(message)
        except ValueError as error:
            raise _RefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        self._last_seq = message.seq
        self._executing.append((message.term, message.seq))
        await self._to_engine(frame)

    def _acknowledge(self, seq: int) -> None:
        for number in range(self._acknowledged + 1, min(seq, self._last_seq) + 1):
            self._kept.pop(number, None)
            self._acknowledged = number

    def _flow(self) -> None:
        """Gives the stream what it is owed and can have; ends it when the router has closed its side and nothing is owed."""
        stream = self._stream
        if stream is None:
            return
        stream.next = max(stream.next, self._acknowledged + 1)
        while stream.asked and stream.next in self._kept:  # its first round says from where on it is owed results
            stream.outgoing.put_nowait(self._kept[stream.next])
            stream.next += 1
        if stream.half_closed and stream.next > stream.asked:
            stream.outgoing.put_nowait(_DONE)
