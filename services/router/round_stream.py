"""The round stream to one front. A broken one is reopened inside the epoch, and what was not answered is sent again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

import grpc
import grpc.aio
import structlog

from latentpool import net
from latentpool.errors import EpochError
from latentpool.v1 import rank_worker_pb2 as pb
from latentpool.v1 import rank_worker_pb2_grpc
from services.router.counters import Counters

Call = grpc.aio.StreamStreamCall[pb.RoundsRequest, pb.RoundsResponse]

log = structlog.get_logger()

_GRANT_SECONDS = 10.0
_LONGEST_PAUSE = 1.0
_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
)


class RoundStream:
    """Rounds go out and results come in, in order. `on_result` gets each result once; `on_end` an EpochError once the stream
    is refused, answers nonsense, or stays broken for `dead_after` seconds."""

    def __init__(
        self,
        rank: int,
        address: str,
        dead_after: float,
        counters: Counters,
        on_result: Callable[[int, pb.RoundResult], None],
        on_end: Callable[[EpochError], None],
    ) -> None:
        self.rank = rank
        self.address = address
        self._dead_after = dead_after
        self._counters = counters
        self._on_result = on_result
        self._on_end = on_end
        self._clock = asyncio.get_running_loop().time
        self._channel = net.channel(address)
        self._opening = pb.RoundsRequest()
        self._call: Call | None = None
        """The open stream; None while it is broken."""
        self._unanswered: deque[pb.RoundsRequest] = deque()
        self._written = 0
        self._broken_since: float | None = None
        """When it broke first since the last result."""
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    # ---- use ----------------------------------------------------------------------------------------------------

    async def open(self, term: int, epoch: int, key: bytes) -> None:
        """Opens the stream in this term. A front may hear of the term a moment after the router: refusals are tried again
        for some seconds. Raises EpochError."""
        self._opening = pb.RoundsRequest(open=pb.OpenRounds(term=term, epoch=epoch, key=key))
        until, pause = self._clock() + _GRANT_SECONDS, 0.02
        while True:
            try:
                self._call = await self._dial()
                break
            except grpc.aio.AioRpcError as error:
                if error.code() not in _REFUSALS or self._clock() > until:
                    raise self._broken(error.details()) from None
            except EOFError:
                raise self._broken("it closed the stream") from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._task = asyncio.create_task(self._attend(self._call))

    async def write(self, message: pb.RoundsRequest) -> None:
        """Sends a round; on a broken stream, once it is open again. Called by one task, in order of seq."""
        self._unanswered.append(message)
        if self._call is not None:
            await self._put(self._call, message)

    async def close(self) -> None:
        self._closing = True
        if self._call is not None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.done_writing()
        if self._task is not None:
            if self._call is not None:
                await asyncio.wait([self._task], timeout=1.0)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    # ---- its life -----------------------------------------------------------------------------------------------

    async def _attend(self, call: Call) -> None:
        try:
            while True:
                code, reason = await self._read(call)
                self._call = None
                if self._closing:
                    return
                call = await self._reopen(code, reason)
        except EpochError as error:
            self._on_end(error)

    async def _read(self, call: Call) -> tuple[grpc.StatusCode, str]:
        """Takes results until the stream ends; returns how it did."""
        try:
            while isinstance(answer := await call.read(), pb.RoundsResponse):
                self._take(answer.result)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or error.code().name
        except asyncio.CancelledError:
            if _stopped():
                raise
            return grpc.StatusCode.CANCELLED, "its call was cancelled"
        return grpc.StatusCode.OK, "it closed the stream"

    def _take(self, result: pb.RoundResult) -> None:
        due = self._unanswered[0].round.seq if self._unanswered else self._written + 1
        if result.seq < due:
            return  # a repeat
        if result.seq > due or not self._unanswered:
            raise EpochError(f"rank {self.rank} answered round {result.seq} where round {due} was due")
        self._unanswered.popleft()
        self._broken_since = None
        self._on_result(self.rank, result)

    async def _reopen(self, code: grpc.StatusCode, reason: str) -> Call:
        """A new stream on which everything unanswered was sent again."""
        if self._broken_since is None:
            self._broken_since = self._clock()
            log.warning("round stream broke", rank=self.rank, reason=reason)
        pause = 0.02
        # `close` cancels this task, and grpc loses a cancellation that comes while it prepares a call
        while code not in _REFUSALS and not self._closing and (left := self._due()) > 0:
            try:
                async with asyncio.timeout(left):
                    call = await self._dial()
                    await self._send_again(call)
                    return call
            except grpc.aio.AioRpcError as error:
                code, reason = error.code(), error.details() or error.code().name
            except EOFError:
                reason = "it closed the stream"
            except TimeoutError:
                break
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise self._broken(reason)

    def _due(self) -> float:
        """Seconds in which a broken stream must be open again."""
        assert self._broken_since is not None
        return self._broken_since + self._dead_after - self._clock()

    async def _send_again(self, call: Call) -> None:
        again = 0
        while again < len(self._unanswered):  # which may grow meanwhile
            message = self._unanswered[again]
            self._counters.resent_rounds += message.round.seq <= self._written
            await self._put(call, message)
            again += 1
        self._call = call

    async def _dial(self) -> Call:
        """Raises AioRpcError, or EOFError where the front ends the stream without a word."""
        call = rank_worker_pb2_grpc.RankWorkerStub(self._channel).Rounds(wait_for_ready=True)
        try:
            with contextlib.suppress(asyncio.InvalidStateError):  # already refused: the read says why
                await call.write(self._opening)
            answer = await call.read()
            if not isinstance(answer, pb.RoundsResponse) or not answer.HasField("opened"):
                raise EOFError
        except BaseException:
            call.cancel()
            raise
        return call

    async def _put(self, call: Call, message: pb.RoundsRequest) -> None:
        self._written = max(self._written, message.round.seq)
        try:
            await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader learns why
        except asyncio.CancelledError:
            if _stopped():
                raise

    def _broken(self, reason: str | None) -> EpochError:
        return EpochError(f"the round stream to rank {self.rank} at {self.address} broke: {reason}")


def _stopped() -> bool:
    """Whether a CancelledError means this task: a call that is cancelled raises it too, and is only one more broken stream."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
