"""The rank worker as the group sees it: joins the pool manager, serves rounds, and holds the engine that computes.

A life: start the engine, learn what it will compute (Prepared), join the group, load the shard, lay out the arena of the
plan, serve rounds, end. Whatever ends first - engine, manager, operator - ends the whole (design sections 2, 8, 9).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from latentpool import __version__, net
from latentpool.errors import ConfigError, EpochError, LatentPoolError, LinkError, SetupError
from latentpool.metrics import Sample
from latentpool.v1 import pool_manager_pb2 as pb
from latentpool.v1 import rank_worker_pb2, rank_worker_pb2_grpc
from services.rank_worker import convert, frames
from services.rank_worker.engine_link import ENGINE_MODULE, EngineLink
from services.rank_worker.membership import Membership
from services.rank_worker.metrics import Work, samples
from services.rank_worker.round_stream import RoundStream

if TYPE_CHECKING:  # a front computes nothing and does not load NumPy
    from services.rank_worker.exchange.inproc import Hub

log = structlog.get_logger()

_NAME = rank_worker_pb2.DESCRIPTOR.services_by_name["RankWorker"].full_name
_FLUSH = 5.0
_REMIND = 5.0
_GRACE = 1.0
_PATIENCE = 2
"""Times dead_after that an engine may say nothing in a round. A peer that waits for it gives up after one and knows better:
this is for the engine that nobody waits for."""

_Frame = TypeVar("_Frame", bound=frames.ToFront)


@dataclass(frozen=True)
class RankWorkerSettings:
    """What one rank worker is told. `dtype` and `kv_cache` None: the checkpoint's and dtype's; `memory_bytes` None: the
    engine's share of what is available; `dead_after` in seconds."""

    model: Path
    rank: int
    world: int
    manager: str
    bind: str = "127.0.0.1:0"
    advertise: str | None = None
    secret: bytes = field(default=b"", repr=False)
    dtype: Literal["f32", "bf16"] | None = None
    kv_cache: Literal["f32", "bf16"] | None = None
    memory_bytes: int | None = None
    page_rows: int = 512
    chunk_rows: int = 2048
    staging_rows: int = 32768
    audit: bool = False
    transport: Literal["ucx", "inproc"] = "ucx"
    net_devices: str = "lo"
    dead_after: float = 30.0

    def check(self) -> None:
        """Raises ConfigError naming the first value that is not allowed."""
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank {self.rank} of world {self.world}: ranks are 0 to {self.world - 1}")
        host = self.bind.rpartition(":")[0]
        if self.advertise is None and host in ("0.0.0.0", "[::]", ""):
            raise ConfigError(
                f"rank worker binds {self.bind}, which others cannot dial: bind an address of this host, or --advertise it"
            )
        net.check_secret(self.secret, [self.bind, self.manager], "rank worker")

    def engine(self) -> dict[str, Any]:
        """The engine's settings, as JSON takes them."""
        return {
            "model": str(self.model),
            "rank": self.rank,
            "world": self.world,
            "dtype": self.dtype,
            "kv_cache": self.kv_cache,
            "memory_bytes": self.memory_bytes,
            "page_rows": self.page_rows,
            "chunk_rows": self.chunk_rows,
            "transport": self.transport,
            "net_devices": self.net_devices,
            "dead_after": self.dead_after,
            "staging_rows": self.staging_rows,
            "audit": self.audit,
        }


class RankWorker:
    """One rank of a group (latentpool.service.Service)."""

    def __init__(
        self,
        settings: RankWorkerSettings,
        hub: Hub | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        engine_module: str = ENGINE_MODULE,
    ) -> None:
        """`hub` joins the workers of one process where transport is "inproc". `on_progress(loaded, total)`, in bytes, is
        called while the shard loads."""
        if (hub is not None) != (settings.transport == "inproc"):
            raise ValueError("a hub goes with transport inproc, and only with it")
        self._settings = settings
        self._rank = settings.rank
        self._on_progress = on_progress
        exchange = hub.member(settings.rank) if hub is not None else None
        self._engine = EngineLink(settings.rank, settings.engine(), engine_module, exchange)
        self._membership = Membership(settings.manager, settings.secret, settings.rank)
        self._rounds = RoundStream(settings.rank, self._engine.send)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._address = ""
        self._from_engine: asyncio.Queue[frames.ToFront] = asyncio.Queue()
        self._lay_out: asyncio.Future[pb.LayOut] | None = None
        self._laid_out = False
        self._progress = 0
        self._heard = 0.0
        self._work = Work()
        self._waiting_for = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._bringing_up: asyncio.Task[None] | None = None
        self._outcome: LatentPoolError | None = None
        self._over = False
        self._ended = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None

    # ---- Service ---------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """host:port it listens on; valid after `start`."""
        return self._address

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id; None for a thread."""
        return self._engine.pid

    async def start(self) -> None:
        """Binds, starts the engine and begins to join. Raises SetupError."""
        self._settings.check()
        self._lay_out = asyncio.get_running_loop().create_future()
        self._server = net.server()
        rank_worker_pb2_grpc.add_RankWorkerServicer_to_server(self._rounds, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        await self._set_health(False)
        self._address = net.bind(self._server, self._settings.bind, f"rank worker {self._rank}")
        await self._server.start()
        await self._engine.start()
        self._spawn(self._follow_engine())
        self._bringing_up = self._spawn(self._bring_up())
        self._spawn(self._remind())
        self._spawn(self._watch_engine())

    async def ended(self) -> LatentPoolError | None:
        """Waits until this worker ends by itself: None if the manager asked for it in order, else why."""
        await self._ended.wait()
        return self._outcome

    def metrics(self) -> Iterable[Sample]:
        return samples(self._rank, self._work, self._membership.heartbeat)

    async def stop(self) -> None:
        """Lets the engine finish what it has taken, then releases everything. Idempotent; safe at any stage."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._shut_down())
        await asyncio.shield(self._stopping)

    # ---- a life ----------------------------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        self._waiting_for = "the engine to read the checkpoint's headers"
        prepared = await self._expect(frames.Prepared)
        self._waiting_for = f"the pool manager at {self._settings.manager}"
        epoch = await self._membership.join(self._identity(prepared), self._advertised(), socket.gethostname())
        log.info("joined", rank=self._rank, manager=self._settings.manager, epoch=epoch)
        self._spawn(self._follow_manager())
        self._spawn(self._membership.beat())

        self._waiting_for = "the engine to load its shard"
        self._say(state="loading", total_bytes=prepared.total_bytes)
        await self._engine.send(frames.Load())
        loaded = await self._expect(frames.Loaded)
        self._say(state="loaded", loaded_bytes=self._membership.heartbeat.total_bytes, resident_bytes=loaded.resident_bytes)
        self._membership.send(
            pb.JoinRequest(
                loaded=pb.Loaded(
                    room_bytes=loaded.room_bytes,
                    resident_bytes=loaded.resident_bytes,
                    link_address=loaded.link_address,
                    assumed_memory_bytes=loaded.assumed_memory_bytes,
                )
            )
        )

        self._waiting_for = "the other ranks to load"
        assert self._lay_out is not None
        lay_out = await self._lay_out
        self._waiting_for = "the engine to lay out its arena and reach the other ranks"
        self._laid_out = True
        self._say(state="laying out")
        await self._engine.send(convert.lay_out_to_frame(lay_out))
        ready = await self._expect(frames.Ready)
        self._waiting_for = ""
        self._rounds.open(lay_out.epoch)
        await self._set_health(True)
        self._say(state="serving", resident_bytes=ready.resident_bytes)
        self._membership.send(pb.JoinRequest(ready=pb.Ready()))
        log.info("ready", rank=self._rank, epoch=lay_out.epoch, pages=lay_out.plan.pages)

    def _identity(self, prepared: frames.Prepared) -> pb.Identity:
        return pb.Identity(
            build=__version__,
            checkpoint_digest=prepared.checkpoint_digest,
            config_json=prepared.config_json,
            dtype=prepared.dtype,
            kv_dtype=prepared.kv_dtype,
            numerics_digest=prepared.numerics_digest,
            world=self._settings.world,
            page_rows=prepared.page_rows,
            drafts=False,
            transport=self._settings.transport,
        )

    def _advertised(self) -> str:
        advertise = self._settings.advertise or self._address
        return advertise if ":" in advertise else f"{advertise}:{self._address.rpartition(':')[2]}"

    async def _follow_engine(self) -> None:
        while True:
            frame = await self._engine.read()
            self._heard = asyncio.get_running_loop().time()
            match frame:
                case frames.RoundResult():
                    self._rounds.deliver(frame)
                    self._count(frame.sent)
                    self._work.add(frame)
                    self._advance(len(frame.results))
                case frames.Progress():
                    self._advance(1)
                case frames.Loading():
                    self._say(loaded_bytes=frame.loaded_bytes, total_bytes=frame.total_bytes)
                    if self._on_progress is not None:
                        self._on_progress(frame.loaded_bytes, frame.total_bytes)
                case frames.Failed():
                    raise _failure(frame)
                case _:
                    self._from_engine.put_nowait(frame)

    async def _watch_engine(self) -> None:
        """Raises EpochError once an engine that is frozen, and still there, owes a round. A front that slept itself (its
        machine was suspended) has not listened: the engine gets that time back."""
        loop, patience = asyncio.get_running_loop(), _PATIENCE * self._settings.dead_after
        looked = self._heard = loop.time()
        while True:
            await asyncio.sleep(patience / 16)
            now = loop.time()
            if now - looked > patience / 4 or not self._rounds.executing:
                self._heard = now
            looked = now
            if now - self._heard > patience:
                raise EpochError(
                    f"engine of rank {self._rank} does not answer: it has said nothing of round {self._rounds.executing} for "
                    f"{patience:g} s (twice --dead-after)"
                )

    async def _expect(self, kind: type[_Frame]) -> _Frame:
        frame = await self._from_engine.get()
        if not isinstance(frame, kind):
            raise EpochError(f"engine of rank {self._rank} sent {type(frame).__name__} where {kind.__name__} was due")
        return frame

    async def _follow_manager(self) -> None:
        assert self._lay_out is not None
        said = await self._membership.follow(self._take_lay_out, self._rounds.grant)
        if isinstance(said, LatentPoolError):
            raise said
        if not self._over:
            self._rounds.end(said.reason)
        await self._finish(None if said.orderly else EpochError(said.reason))

    def _take_lay_out(self, message: pb.LayOut) -> None:
        assert self._lay_out is not None
        if not self._lay_out.done():
            self._lay_out.set_result(message)

    def _advance(self, signs_of_work: int) -> None:
        self._progress += signs_of_work
        self._say(engine_progress=self._progress)

    def _count(self, sent: frames.LinkBytes) -> None:
        total = self._membership.heartbeat.sent
        for name in sent.__struct_fields__:
            setattr(total, name, getattr(total, name) + getattr(sent, name))

    def _say(self, **news: Any) -> None:
        for name, value in news.items():
            setattr(self._membership.heartbeat, name, value)
        self._membership.tell()

    async def _remind(self) -> None:
        while True:
            await asyncio.sleep(_REMIND)
            if self._waiting_for:
                log.info("waiting", rank=self._rank, waits_for=self._waiting_for)

    async def _set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", _NAME):
            await self._health.set(name, status)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guard(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except LatentPoolError as error:
            await self._fail(error)
        except Exception as error:
            log.exception("rank worker failed", rank=self._rank)
            await self._fail(EpochError(f"rank worker {self._rank} failed: {type(error).__name__}: {error}"))

    async def _fail(self, error: LatentPoolError) -> None:
        if not self._over:
            self._rounds.end(str(error))
        peer = error.rank if isinstance(error, LinkError) else None
        await self._finish(error, pb.Failed(message=str(error), peer=peer))

    async def _finish(self, outcome: LatentPoolError | None, farewell: pb.Failed | None = None) -> None:
        """This worker is over: leaves the group with `farewell`. Only the first call counts."""
        if self._over:
            return
        self._over, self._outcome = True, outcome
        await self._set_health(False)
        starting = self._bringing_up
        if starting is not None and starting is not asyncio.current_task() and not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
        await self._membership.leave(farewell)
        self._ended.set()

    async def _shut_down(self) -> None:
        reason = f"rank {self._rank} was stopped by its operator"
        self._rounds.close(reason)
        leaving = asyncio.create_task(self._finish(None, pb.Failed(message="stopped by its operator")))
        # Nothing but links needs to be flushed, and a loading engine does not read.
        await self._engine.stop(within=_FLUSH if self._laid_out else 0.0)
        await leaving
        await self._ended.wait()
        self._rounds.end(reason)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(_GRACE)


def _failure(frame: frames.Failed) -> LatentPoolError:
    if frame.setup:
        return SetupError(frame.message)
    if frame.peer >= 0:
        return LinkError(frame.message, frame.peer)
    return EpochError(frame.message)
