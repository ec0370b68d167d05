"""A worker's place in its group: one stream to the pool manager, open as long as the worker lives.

Nothing here ever cancels a read or a write of a stream that should live on: cancelling either cancels the call. One task
reads, one writes from a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio
import structlog

from latentpool import handshake, net
from latentpool.errors import EpochError, HandshakeError, LatentPoolError
from latentpool.v1 import pool_manager_pb2 as pb
from latentpool.v1 import pool_manager_pb2_grpc

log = structlog.get_logger()

_FIRST_BACKOFF = 0.1
_LAST_BACKOFF = 1.0
_BEAT = 1.0
_LEAST_BETWEEN_BEATS = 0.2
_FAREWELL = 2.0
_NOT_THERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

_Call = grpc.aio.StreamStreamCall[pb.JoinRequest, pb.JoinResponse]


@dataclass(frozen=True)
class Stopped:
    """The manager's Stop: `orderly` where the operator asked for it."""

    reason: str
    orderly: bool


class Membership:
    """`join` once, then `follow` and `beat` as tasks beside whatever `send`s; `leave` at the end. One event loop."""

    def __init__(self, address: str, secret: bytes, rank: int) -> None:
        self._address = address
        self._secret = secret
        self._rank = rank
        self._channel: grpc.aio.Channel | None = None
        self._call: _Call | None = None
        self._outgoing: asyncio.Queue[pb.JoinRequest | None] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self.heartbeat = pb.Heartbeat()
        """What the next heartbeat says. Fill in place, then `tell`."""

    # ---- joining ---------------------------------------------------------------------------------------------------

    async def join(self, identity: pb.Identity, own_address: str, host: str) -> int:
        """Waits for the manager to be there, proves the secret both ways and returns the epoch. Raises HandshakeError with
        the manager's words if it refuses this worker."""
        self._channel = net.channel(self._address)
        stub = pool_manager_pb2_grpc.PoolManagerStub(self._channel)
        backoff = _FIRST_BACKOFF
        while True:
            call: _Call = stub.Join()
            try:
                epoch = await self._shake_hands(call, identity, own_address, host)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _NOT_THERE:
                    raise HandshakeError(self._refusal(error)) from error
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _LAST_BACKOFF)
            except BaseException:
                call.cancel()
                raise
            else:
                self._call = call
                self._writer = asyncio.create_task(self._write(call))
                return epoch

    async def _shake_hands(self, call: _Call, identity: pb.Identity, own_address: str, host: str) -> int:
        challenge = (await self._receive(call, "challenge")).challenge
        nonce = handshake.nonce()
        hello = pb.Hello(
            rank=self._rank,
            identity=identity,
            nonce=nonce,
            mac=handshake.prove(self._secret, "worker", challenge.nonce, nonce, detail=str(self._rank).encode()),
            address=own_address,
            host=host,
        )
        with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended; the read says how
            await call.write(pb.JoinRequest(hello=hello))
        welcome = (await self._receive(call, "welcome")).welcome
        if not handshake.proven(self._secret, "manager", nonce, challenge.nonce, welcome.mac):
            raise HandshakeError(
                f"the pool manager at {self._address} does not know this group's secret: "
                "give every member the same --secret-file"
            )
        return welcome.epoch

    async def _receive(self, call: _Call, kind: str) -> pb.JoinResponse:
        message = await call.read()
        if not isinstance(message, pb.JoinResponse):
            raise HandshakeError(f"the pool manager at {self._address} closed the stream where its {kind} was due")
        got = message.WhichOneof("message")
        if got == "stop":
            raise HandshakeError(f"the pool manager at {self._address} refuses rank {self._rank}: {message.stop.reason}")
        if got != kind:
            raise HandshakeError(f"the pool manager at {self._address} sent {got} where its {kind} was due")
        return message

    def _refusal(self, error: grpc.aio.AioRpcError) -> str:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return f"{self._address} is not a pool manager: {error.details()}"
        return f"the pool manager at {self._address} refuses rank {self._rank}: {error.details()}"

    # ---- a member's life -------------------------------------------------------------------------------------------

    async def follow(
        self, on_lay_out: Callable[[pb.LayOut], None], on_term: Callable[[pb.TermGranted], None]
    ) -> Stopped | LatentPoolError:
        """Reads the manager's messages until it says stop or is lost, and returns which."""
        call = self._call
        assert call is not None
        try:
            while isinstance(message := await call.read(), pb.JoinResponse):
                match message.WhichOneof("message"):
                    case "lay_out":
                        on_lay_out(message.lay_out)
                    case "term":
                        on_term(message.term)
                    case "stop":
                        return Stopped(message.stop.reason, message.stop.orderly)
                    case other:
                        return EpochError(f"the pool manager at {self._address} sent {other} out of turn")
        except grpc.aio.AioRpcError as error:
            return EpochError(f"lost the pool manager at {self._address}: {error.details()}")
        return EpochError(f"lost the pool manager at {self._address}: it closed the stream")

    def send(self, message: pb.JoinRequest) -> None:
        """Queues a message; they travel in call order."""
        self._outgoing.put_nowait(message)

    def tell(self) -> None:
        """`heartbeat` has news: it travels soon, at most five times a second."""
        self._news.set()

    async def beat(self) -> None:
        """Sends heartbeats until cancelled: every second, and soon after news."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEAT):
                    await self._news.wait()
            self._news.clear()
            if self._outgoing.empty():  # a manager that does not read must not make a backlog
                beat = pb.Heartbeat()
                beat.CopyFrom(self.heartbeat)
                self.send(pb.JoinRequest(heartbeat=beat))
            await asyncio.sleep(_LEAST_BETWEEN_BEATS)

    async def _write(self, call: _Call) -> None:
        try:
            while (message := await self._outgoing.get()) is not None:
                await call.write(message)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the call has ended; `follow` says how

    # ---- leaving ---------------------------------------------------------------------------------------------------

    async def leave(self, failed: pb.Failed | None = None) -> None:
        """Says why, if something failed, closes the stream and the channel. Idempotent; safe at any stage."""
        call, self._call = self._call, None
        if call is not None and self._writer is not None:
            if failed is not None:
                self.send(pb.JoinRequest(failed=failed))
            self._outgoing.put_nowait(None)
            await asyncio.wait({self._writer}, timeout=_FAREWELL)
            if not call.done():
                await asyncio.wait({asyncio.create_task(call.code())}, timeout=_FAREWELL)
            call.cancel()
            self._writer.cancel()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()
