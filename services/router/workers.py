"""The round streams to the fronts: one reader task each, every worker gets the same round."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import grpc
import grpc.aio

from latentpool import net
from latentpool.errors import EpochError
from latentpool.v1 import rank_worker_pb2 as pb
from latentpool.v1 import rank_worker_pb2_grpc

Call = grpc.aio.StreamStreamCall[pb.RoundsRequest, pb.RoundsResponse]

_OPEN_SECONDS = 10.0
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION)


class RoundStream:
    """The stream to one rank. Results arrive in `results`, in order; after the last one an EpochError."""

    def __init__(self, rank: int, address: str) -> None:
        self.rank = rank
        self.address = address
        self.results: asyncio.Queue[pb.RoundResult | EpochError] = asyncio.Queue()
        self._channel = net.channel(address)
        self._call: Call | None = None
        self._reader: asyncio.Task[None] | None = None

    async def open(self, term: int, epoch: int, key: bytes) -> None:
        """Opens the stream in this term. A front may hear of the term a moment after the router: refusals are tried again
        for some seconds. Raises EpochError."""
        opening = pb.RoundsRequest(open=pb.OpenRounds(term=term, epoch=epoch, key=key))
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + _OPEN_SECONDS, 0.02
        while True:
            call = rank_worker_pb2_grpc.RankWorkerStub(self._channel).Rounds(wait_for_ready=True)
            try:
                with contextlib.suppress(asyncio.InvalidStateError):  # already refused: the read says why
                    await call.write(opening)
                answer = await call.read()
                if isinstance(answer, pb.RoundsResponse) and answer.HasField("opened"):
                    break
                raise self._broken("it closed the stream")
            except grpc.aio.AioRpcError as error:
                if error.code() not in _REFUSALS or loop.time() > until:
                    raise self._broken(error.details()) from None
            except BaseException:
                call.cancel()
                raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)
        self._call = call
        self._reader = asyncio.create_task(self._read(call))

    async def write(self, message: pb.RoundsRequest) -> None:
        assert self._call is not None
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader learns why and says so in `results`

    async def result(self, seq: int) -> pb.RoundResult:
        """The next result. Raises EpochError if the stream broke or the result is of another round."""
        result = await self.results.get()
        if isinstance(result, EpochError):
            raise result
        if result.seq != seq:
            raise EpochError(f"rank {self.rank} answered round {result.seq} where round {seq} was asked")
        return result

    async def close(self) -> None:
        if self._call is not None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.done_writing()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=1.0)
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def _read(self, call: Call) -> None:
        try:
            while isinstance(answer := await call.read(), pb.RoundsResponse):
                self.results.put_nowait(answer.result)
            self.results.put_nowait(self._broken("it closed the stream"))
        except grpc.aio.AioRpcError as error:
            self.results.put_nowait(self._broken(error.details()))

    def _broken(self, reason: str | None) -> EpochError:
        return EpochError(f"the round stream to rank {self.rank} at {self.address} broke: {reason}")


class Workers:
    """All ranks of the group, in one term and epoch. seq starts at 1."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._streams = [RoundStream(rank, address) for rank, address in enumerate(addresses)]
        self._term = 0
        self._epoch = 0
        self.seq = 0
        """Of the last round sent."""

    async def open(self, term: int, epoch: int, key: bytes) -> None:
        """Opens all streams. Raises EpochError naming a rank."""
        self._term, self._epoch = term, epoch
        await asyncio.gather(*(stream.open(term, epoch, key) for stream in self._streams))

    async def send(self, operations: Sequence[pb.Operation]) -> pb.Round:
        """Sends the next round to every rank. The one before it was collected, so it is acknowledged."""
        acknowledged, self.seq = self.seq, self.seq + 1
        round_ = pb.Round(
            term=self._term, epoch=self._epoch, seq=self.seq, acknowledged_seq=acknowledged, operations=operations
        )
        message = pb.RoundsRequest(round=round_)
        await asyncio.gather(*(stream.write(message) for stream in self._streams))
        return round_

    async def collect(self, round_: pb.Round) -> list[pb.RoundResult]:
        """Every rank's result of the round, in rank order. Raises EpochError, as soon as one rank cannot answer."""
        waits = [asyncio.ensure_future(stream.result(round_.seq)) for stream in self._streams]
        try:
            results = await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
        for rank, result in enumerate(results):
            if len(result.results) != len(round_.operations):
                raise EpochError(
                    f"rank {rank} answered {len(result.results)} operations of round {round_.seq}, which has "
                    f"{len(round_.operations)}"
                )
        return results

    async def close(self) -> None:
        await asyncio.gather(*(stream.close() for stream in self._streams))
