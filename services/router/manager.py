"""The router's stream to the pool manager: the term, then admissions, extensions, moves and ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence

import grpc
import grpc.aio
import structlog

from latentpool import handshake, net
from latentpool.errors import EpochError, HandshakeError
from latentpool.v1 import pool_manager_pb2 as pb
from latentpool.v1 import pool_manager_pb2_grpc
from services.router.kept import Place

log = structlog.get_logger()

_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED)
_TELL_EVERY = 5.0
_LONGEST_PAUSE = 1.0


class Session:
    """One open session. Requests are written by one task and answers read by another, which calls `on_answer` in order;
    requests never wait. `ended` is done when the stream is over: with None after an orderly end, else with why."""

    def __init__(self, address: str, secret: bytes, name: str, take_over: bool) -> None:
        self.address = address
        self.ended: asyncio.Future[EpochError | None] = asyncio.get_running_loop().create_future()
        self._secret = secret
        self._name = name
        self._take_over = take_over
        self._keys = itertools.count(1)
        self._outbox: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._channel = net.channel(address)
        self._call: grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ---- opening ------------------------------------------------------------------------------------------------

    async def open(self) -> pb.Granted:
        """Waits for the manager and for its ready group, proves the secret and is granted a term. Tries again while the
        manager is not there, saying so every few seconds. Raises HandshakeError in the manager's words if refused."""
        pause, told = 0.1, -_TELL_EVERY
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await self._open_once()
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    raise HandshakeError(error.details() or f"the pool manager at {self.address} refused this router") from None
                reason = error.details()
            except EOFError:
                reason = "it closed the session"
            if loop.time() - told >= _TELL_EVERY:
                told = loop.time()
                log.info("waiting for the pool manager", manager=self.address, reason=reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _open_once(self) -> pb.Granted:
        call = pool_manager_pb2_grpc.PoolManagerStub(self._channel).Session()
        try:
            challenge = (await self._read(call)).challenge
            nonce = handshake.nonce()
            mac = handshake.prove(self._secret, "router", challenge.nonce, nonce)
            opening = pb.OpenSession(nonce=nonce, mac=mac, name=self._name, take_over=self._take_over)
            with contextlib.suppress(asyncio.InvalidStateError):  # already refused: the read below says why
                await call.write(pb.SessionRequest(key=next(self._keys), open=opening))
            log.info("waiting for the group to be ready", manager=self.address)
            answer = await self._read(call)
            if answer.HasField("epoch_ended"):
                raise EpochError(answer.epoch_ended.reason)
            granted = answer.granted
            if not handshake.proven(self._secret, "manager", nonce, challenge.nonce, granted.mac):
                raise HandshakeError(f"the pool manager at {self.address} does not know this group's secret")
        except BaseException:
            call.cancel()
            raise
        self._call = call
        return granted

    @staticmethod
    async def _read(call: grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]) -> pb.SessionResponse:
        message = await call.read()
        if not isinstance(message, pb.SessionResponse):
            raise EOFError
        return message

    def attend(self, on_answer: Callable[[pb.SessionResponse], None]) -> None:
        """Starts reading answers and writing requests. Called once, after `open`."""
        assert self._call is not None
        self._tasks = [
            asyncio.create_task(self._read_answers(self._call, on_answer)),
            asyncio.create_task(self._write_requests(self._call)),
        ]

    async def close(self) -> None:
        """Sends what is queued, half-closes and releases the channel."""
        self._outbox.put_nowait(None)
        if self._tasks:
            reader, writer = self._tasks
            await asyncio.wait([writer], timeout=1.0)
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if not self.ended.done():
            self.ended.set_result(None)
        await self._channel.close()

    # ---- requests: none waits ------------------------------------------------------------------------------------

    def admit(
        self,
        conversation: int,
        lane: int,
        prompt_tokens: int,
        max_tokens: int | None,
        request_id: str,
        *,
        background: bool,
        returning: bool,
        blocks: bytes = b"",
        idle: bool = False,
    ) -> int:
        """Asks for pages; returns the key of the answers. `returning`: it was parked; prompt_tokens are all its tokens so
        far, max_tokens those that may still come. `blocks`, `idle`: as in the message."""
        return self._send(
            pb.SessionRequest(
                admit=pb.Admit(
                    conversation=conversation,
                    lane=lane,
                    prompt_tokens=prompt_tokens,
                    max_tokens=max_tokens,
                    request_id=request_id,
                    background=background,
                    returning=returning,
                    blocks=blocks,
                    idle=idle,
                )
            )
        )

    def extend(self, needs: list[pb.Need]) -> int:
        return self._send(pb.SessionRequest(extend=pb.Extend(needs=needs)))

    def finish(self, conversation: int, fence_seq: int) -> int:
        return self._send(pb.SessionRequest(finish=pb.Finish(conversation=conversation, fence_seq=fence_seq)))

    def released(self, conversation: int, fence_seq: int) -> int:
        return self._send(pb.SessionRequest(released=pb.Released(conversation=conversation, fence_seq=fence_seq)))

    def carried(self, conversation: int, fence_seq: int) -> int:
        return self._send(pb.SessionRequest(carried=pb.Carried(conversation=conversation, fence_seq=fence_seq)))

    def ask_keep(self, conversation: int, place: Place) -> int:
        return self._send(pb.SessionRequest(ask_keep=pb.AskKeep(conversation=conversation, at=place.at, mark=place.mark)))

    def kept(self, state: int) -> None:
        self._send(pb.SessionRequest(kept=pb.Kept(state=state)))

    def resumed(self, conversation: int, fence_seq: int) -> None:
        self._send(pb.SessionRequest(resumed=pb.Resumed(conversation=conversation, fence_seq=fence_seq)))

    def forgotten(self, states: Sequence[int], fence_seq: int) -> None:
        self._send(pb.SessionRequest(forgotten=pb.Forgotten(states=states, fence_seq=fence_seq)))

    def report(self, progress: Sequence[pb.Progress]) -> None:
        self._send(pb.SessionRequest(report=pb.Report(progress=progress)))

    def answered(self, seq: int) -> None:
        self._send(pb.SessionRequest(answered=pb.Answered(seq=seq)))

    def report_mismatch(self, message: str) -> None:
        self._send(pb.SessionRequest(mismatch=pb.ReportMismatch(message=message)))

    def _send(self, request: pb.SessionRequest) -> int:
        request.key = next(self._keys)
        self._outbox.put_nowait(request)
        return request.key

    # ---- the two tasks ---------------------------------------------------------------------------------------------

    async def _write_requests(self, call: grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader learns why
            while (request := await self._outbox.get()) is not None:
                await call.write(request)
            await call.done_writing()

    async def _read_answers(
        self,
        call: grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse],
        on_answer: Callable[[pb.SessionResponse], None],
    ) -> None:
        end: EpochError | None = None
        try:
            while True:
                answer = await self._read(call)
                if answer.HasField("epoch_ended"):
                    gone = answer.epoch_ended
                    end = None if gone.orderly else EpochError(gone.reason)
                    break
                on_answer(answer)
        except EOFError:
            pass
        except grpc.aio.AioRpcError as error:
            end = EpochError(f"the session with the pool manager at {self.address} broke: {error.details()}")
        except EpochError as error:
            end = error
        except Exception as bug:
            log.exception("the router failed at an answer of the pool manager")
            end = EpochError(f"the router failed: {bug!r}")
        finally:
            if not self.ended.done():
                self.ended.set_result(end)
