"""A front's hold on its engine: a child process, or a thread for the in-process data plane, behind one socketpair.

Both kinds speak the same frames and end in the same way: the socket's end is how a front learns that its engine is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import structlog

from latentpool.errors import EpochError
from services.rank_worker import frames

if TYPE_CHECKING:
    from services.rank_worker.exchange.base import Exchange

log = structlog.get_logger()

ENGINE_MODULE = "services.rank_worker.engine"
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_STREAM_BUFFER = 1 << 20
_POLL = 0.01


class _Body(Protocol):
    """What runs the engine."""

    pid: int | None

    def alive(self) -> bool: ...

    def kill(self) -> None:
        """Ends it by force. Returns at once."""

    def verdict(self) -> str:
        """How it ended, to stand after "engine of rank 1 "; valid once it is not alive."""


class _Child:
    """An engine in a process of its own."""

    def __init__(self, module: str, settings: bytes, end: socket.socket) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "services.rank_worker.engine_start"),
                *(str(os.getpid()), module, settings.decode(), str(end.fileno())),
            ],
            pass_fds=(end.fileno(),),
            stdin=subprocess.DEVNULL,
            env=os.environ | _ONE_THREAD,
        )
        end.close()
        self.pid: int | None = self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def verdict(self) -> str:
        code = self._process.returncode
        if code >= 0:
            return f"exited with {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (was this host out of memory?)" if name == "SIGKILL" else "")


class _Thread:
    """An engine in a thread of this process."""

    pid: int | None = None

    def __init__(self, module: str, settings: bytes, end: socket.socket, exchange: Exchange) -> None:
        self._verdict = "ended"
        self._exchange = exchange
        self._end = end
        self._thread = threading.Thread(target=self._run, args=(module, settings), name=f"engine {exchange.rank}", daemon=True)
        self._thread.start()

    def _run(self, module: str, settings: bytes) -> None:
        try:
            engine = importlib.import_module(module)
            code = engine.serve(self._end, msgspec.json.decode(settings, type=engine.EngineSettings), self._exchange)
            self._verdict = f"ended with {code}"
        except Exception as error:
            self._verdict = f"failed: {type(error).__name__}: {error}"
            log.exception("engine failed", rank=self._exchange.rank)
        finally:
            # A shutdown, not only a close: the engine's reader may still hold the socket.
            with contextlib.suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)
            self._end.close()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def kill(self) -> None:
        self._exchange.abort()

    def verdict(self) -> str:
        return self._verdict


class EngineLink:
    """One engine: started once, read by one task, stopped once. All methods belong to one event loop."""

    def __init__(self, rank: int, settings: dict[str, Any], module: str = ENGINE_MODULE, exchange: Exchange | None = None):
        """`settings` are the EngineSettings of `module`; with an `exchange` the engine is a thread, else a child process."""
        self._name = f"engine of rank {rank}"
        self._settings = msgspec.json.encode(settings)
        self._module = module
        self._exchange = exchange
        self._body: _Body | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id; None for a thread or before `start`."""
        return self._body.pid if self._body else None

    async def start(self) -> None:
        """Starts the engine. Raises OSError if the process cannot be made."""
        ours, theirs = socket.socketpair()
        try:
            if self._exchange is None:
                self._body = _Child(self._module, self._settings, theirs)
            else:
                self._body = _Thread(self._module, self._settings, theirs, self._exchange)
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_STREAM_BUFFER)
        except BaseException:
            ours.close()
            if self._body is None:
                theirs.close()
            raise

    async def read(self) -> frames.ToFront:
        """The next frame. Raises EpochError in words once the engine is gone or sends what is not a frame."""
        assert self._reader is not None
        try:
            length = frames.frame_length(await self._reader.readexactly(4))
            return frames.decode_to_front(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._wait_dead(within=2.0)
            raise EpochError(self._obituary()) from None
        except (ValueError, msgspec.DecodeError) as error:
            raise EpochError(f"{self._name} sent what is not a frame: {error}") from error

    async def send(self, frame: frames.ToEngine) -> None:
        """Queues a frame at once, in call order; returns when the socket has room again. A gone engine is `read`'s to tell."""
        if self._writer is None or self._writer.is_closing():
            return
        self._writer.write(frames.encode(frame))
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def stop(self, within: float) -> None:
        """Asks the engine to finish what is queued and end; kills it after `within` seconds. Leaves no process and no
        socket. Idempotent; safe before `start` has finished."""
        if self._body is not None and self._body.alive():
            if within > 0 and self._writer is not None and not self._writer.is_closing():
                self._writer.write(frames.encode(frames.Close()))
                await self._wait_dead(within)
            if within and self._body.alive():
                log.warning("engine is ended by force", engine=self._name, after_seconds=within)
        if self._writer is not None:
            self._writer.transport.abort()  # a thread engine ends at the socket's end
        if self._body is not None and self._body.alive():
            self._body.kill()
            await self._wait_dead(within=5.0)
            if self._body.alive():
                log.error("engine does not end", engine=self._name)

    async def _wait_dead(self, within: float) -> None:
        assert self._body is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        while self._body.alive() and loop.time() < deadline:  # noqa: ASYNC110 - a child's end sets no event
            await asyncio.sleep(_POLL)

    def _obituary(self) -> str:
        assert self._body is not None
        if self._body.alive():
            return f"{self._name} closed its pipe without ending"
        return f"{self._name} {self._body.verdict()}"
