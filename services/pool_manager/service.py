"""The pool manager: workers join it, one router leases pages from it, operators read it. One port for all of them."""

# ruff: noqa: N802  # gRPC names its handlers

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from latentpool import handshake, net
from latentpool.errors import ConfigError, HandshakeError, LatentPoolError, SetupError
from latentpool.geometry import MAX_WORLD, Geometry
from latentpool.metrics import Sample
from latentpool.v1 import pool_admin_pb2_grpc, pool_manager_pb2_grpc
from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager.admin import Admin
from services.pool_manager.agreement import geometry_of
from services.pool_manager.group import Group, Member
from services.pool_manager.kept import Rules, fixed_pages, rules_of
from services.pool_manager.leases import Leases
from services.pool_manager.metrics import samples
from services.pool_manager.plan import Choice, Order, Plan, check_context, choose, decide, lane_fixed, to_proto
from services.pool_manager.session import Session
from services.pool_manager.state import State
from services.pool_manager.stream import GroupOverError, Stream, UnprovenError, greet, until_end

log = structlog.get_logger()

_GRACE = 2.0
_NAMES = ("latentpool.v1.PoolManager", "latentpool.v1.PoolAdmin")

_WorkerStream = Stream[pb.JoinRequest, pb.JoinResponse]
_RouterStream = Stream[pb.SessionRequest, pb.SessionResponse]


@dataclass(frozen=True)
class PoolManagerSettings:
    """context None: the model's longest. cache_bytes: budget for kept states; keep_from: tokens of the shortest one;
    carry_from: of the shortest one whose rows move to another rank. headroom: rows of a reply that admission reserves. borrow:
    lend free pages of other owners to prompts that are being computed. Durations in seconds. state_dir None: nothing outlives
    this process (temporary groups)."""

    world: int
    context: int | None
    parallel: int = 1
    kv_pages: Choice = "auto"
    split: Choice = "auto"
    borrow: bool = True
    cache_bytes: int = 16 << 30
    keep_from: int = 4096
    carry_from: int = 2048
    plan_order: Order = "new"
    secret: bytes = b""
    bind: str = "127.0.0.1:0"
    state_dir: Path | None = None
    headroom: int = 2048
    dead_after: float = 30.0
    join_timeout: float = 300.0

    def check(self) -> None:
        """Raises ConfigError for what needs no worker to be refused."""
        if not 1 <= self.world <= MAX_WORLD:
            raise ConfigError(f"--ranks {self.world}: a group has 1 to {MAX_WORLD}")
        if self.parallel < 1:
            raise ConfigError(f"--parallel {self.parallel}: at least 1 is needed")
        decide(self.kv_pages, self.split, self.world)
        net.check_secret(self.secret, [self.bind], "the pool manager")


@dataclass(slots=True)
class _Router:
    """The router that holds the session, or waits for the group to be ready."""

    stream: _RouterStream
    hello: pb.OpenSession
    challenge: bytes
    session: Session | None = None


class PoolManager(pool_manager_pb2_grpc.PoolManagerServicer):
    """Service (latentpool.service): one group of workers and one epoch; then it has ended."""

    def __init__(self, settings: PoolManagerSettings) -> None:
        self._settings = settings
        self._address = ""
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self._ticking: asyncio.Task[None] | None = None
        self._router: _Router | None = None
        self._rules: Rules | str = ""

    # ---- Service -------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return self._address

    async def start(self) -> None:
        self._settings.check()
        loop = asyncio.get_running_loop()
        self._state = State(self._settings.state_dir)
        try:
            server = net.server()
            self._address = net.bind(server, self._settings.bind, "the pool manager")
            self._end: asyncio.Future[LatentPoolError | None] = loop.create_future()
            self._group = Group(
                world=self._settings.world,
                epoch=self._state.next_epoch(),
                started=loop.time(),
                make_plan=self._plan,
                on_ready=self._ready,
                on_end=self._ended,
                join_timeout=self._settings.join_timeout,
                dead_after=self._settings.dead_after,
            )
            pool_manager_pb2_grpc.add_PoolManagerServicer_to_server(self, server)
            pool_admin_pb2_grpc.add_PoolAdminServicer_to_server(Admin(self), server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            reflection.enable_server_reflection((*_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
            await self._say(health_pb2.HealthCheckResponse.NOT_SERVING)
            await server.start()
        except BaseException:
            self._state.close()
            raise
        self._server = server
        self._ticking = asyncio.create_task(self._tick())

    async def ended(self) -> LatentPoolError | None:
        return await asyncio.shield(self._end)

    def metrics(self) -> Iterable[Sample]:
        return samples(self._group, self.leases)

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        if self._ticking is not None:
            self._ticking.cancel()
        self._group.end(None, "stopped by its operator")
        await self._health.enter_graceful_shutdown()
        await server.stop(_GRACE)
        self._state.close()

    # ---- what admin reads ----------------------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        return self._group

    @property
    def session(self) -> Session | None:
        """The router's, once it has its term."""
        return None if self._router is None else self._router.session

    @property
    def leases(self) -> Leases | None:
        """Those of the current term, or empty books without a router; None before there is a plan."""
        if self.session is not None:
            return self.session.leases
        return None if self._group.plan is None else self._empty_books(self._group.plan)

    @property
    def term(self) -> int:
        return self._state.term

    @property
    def router_name(self) -> str:
        return "" if self._router is None else self._router.hello.name

    # ---- the group ---------------------------------------------------------------------------------------------

    def _check_model(self, geometry: Geometry) -> None:
        """Ends a group that cannot serve this model before its workers load it."""
        try:
            geometry.check_world(self._settings.world)
            if self._settings.context is not None:
                check_context(self._settings.context, geometry)
        except SetupError as error:
            self._group.end(error)

    def _plan(self, geometry: Geometry, identity: pb.Identity, room: list[int]) -> Plan:
        """Workers report room after the first lane's fixed part, and do not know of windows: their slack is taken here."""
        settings, world = self._settings, self._settings.world
        mode, _ = decide(settings.kv_pages, settings.split, world)
        context = geometry.max_context if settings.context is None else settings.context
        dtype, kv_dtype, rows = identity.dtype, identity.kv_dtype, identity.page_rows
        fixed = [lane_fixed(geometry, world, rank, dtype, kv_dtype, mode, context, rows) for rank in range(world)]
        slack = [fixed[rank] - geometry.lane_fixed_bytes(world, rank, dtype) for rank in range(world)]
        made = choose(
            settings.kv_pages,
            settings.split,
            room=[left - part for left, part in zip(room, slack, strict=True)],
            context=context,
            lanes=settings.parallel,
            cache_budget=settings.cache_bytes,
            geometry=geometry,
            world=world,
            fixed=fixed,
            kv_dtype=kv_dtype,
            page_rows=rows,
            order=settings.plan_order,
        )
        sizes = {"pages": made.pages, "stream_pages": made.stream_pages, "lanes": made.lanes}
        fixed_of_state = fixed_pages(geometry, world, dtype, kv_dtype, rows)
        self._rules = rules_of(made, fixed_of_state, settings.cache_bytes, settings.keep_from, settings.carry_from)
        if isinstance(self._rules, str):
            log.info("nothing is kept", reason=self._rules)
        log.info("planned", paged=made.paged, split=made.split, note=made.note, **sizes)
        return made

    def _ready(self) -> None:
        self._later = asyncio.create_task(self._say(health_pb2.HealthCheckResponse.SERVING))
        if self._router is not None:
            self._grant(self._router)

    def _ended(self, error: LatentPoolError | None, reason: str) -> None:
        self._later = asyncio.create_task(self._say(health_pb2.HealthCheckResponse.NOT_SERVING))
        if self._router is not None:
            gone = pb.EpochEnded(epoch=self._group.epoch, reason=reason, orderly=error is None)
            self._router.stream.send(pb.SessionResponse(epoch_ended=gone))
            self._router.stream.close()
        if not self._end.done():
            self._end.set_result(error)

    async def _say(self, status: int) -> None:
        for name in ("", *_NAMES):
            await self._health.set(name, status)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(0.5, self._settings.dead_after / 4, self._settings.join_timeout / 4))
            self._group.tick(loop.time())
            if self.session is not None:
                self.session.prove()

    # ---- workers -------------------------------------------------------------------------------------------------

    async def Join(  # type: ignore[override]  # the stub knows handlers that yield, not those that read and write
        self,
        request_iterator: object,
        context: grpc.aio.ServicerContext[pb.JoinRequest, pb.JoinResponse],
    ) -> None:
        """A worker's stream: challenge, hello, welcome, then what it says until either side ends."""
        stream: _WorkerStream = Stream(context)
        challenge = handshake.nonce()
        deadline = greet(stream, pb.JoinResponse(challenge=pb.Challenge(nonce=challenge)))
        member: Member | None = None

        def take(message: pb.JoinRequest) -> None:
            nonlocal member
            if member is None:
                deadline.cancel()
                member = self._hello(message, challenge, stream)
            else:
                self._from_worker(member, message)

        try:
            await until_end(stream, take, context)
        finally:
            deadline.cancel()
            if member is not None:
                self._group.lost(member)

    def _hello(self, message: pb.JoinRequest, challenge: bytes, stream: _WorkerStream) -> Member:
        hello = message.hello
        if message.WhichOneof("message") != "hello":
            raise ValueError("a worker's first message is its hello")
        detail = str(hello.rank).encode()
        if not handshake.proven(self._settings.secret, "worker", challenge, hello.nonce, hello.mac, detail):
            raise UnprovenError(f"rank {hello.rank} on {hello.host} does not know this group's secret: {_ONE_SECRET}")
        self._check_alive()
        member = self._group.join(hello, stream, asyncio.get_running_loop().time())
        mac = handshake.prove(self._settings.secret, "manager", hello.nonce, challenge)
        stream.send(pb.JoinResponse(welcome=pb.Welcome(mac=mac, epoch=self._group.epoch)))
        if member is self._group.first:
            self._check_model(geometry_of(hello.identity))
        return member

    def _from_worker(self, member: Member, message: pb.JoinRequest) -> None:
        member.seen = asyncio.get_running_loop().time()
        match message.WhichOneof("message"):
            case "heartbeat":
                member.heartbeat = message.heartbeat
            case "loaded":
                self._group.loaded(member, message.loaded)
            case "ready":
                self._group.laid_out(member)
            case "failed":
                self._group.failed(member, message.failed)
            case other:
                raise ValueError(f"rank {member.rank} sent {other} after its hello")

    # ---- the router ----------------------------------------------------------------------------------------------

    async def Session(  # type: ignore[override]  # as Join
        self,
        request_iterator: object,
        context: grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse],
    ) -> None:
        """The router's stream: challenge, open, a term once the group is ready, then requests until either side ends."""
        stream: _RouterStream = Stream(context)
        challenge = handshake.nonce()
        deadline = greet(stream, pb.SessionResponse(challenge=pb.Challenge(nonce=challenge)))
        router: _Router | None = None

        def take(message: pb.SessionRequest) -> None:
            nonlocal router
            if router is None:
                deadline.cancel()
                router = self._open(message, challenge, stream)
            elif router.session is None:
                raise ValueError("requests come after the term is granted")
            elif router is self._router:
                router.session.take(message)

        try:
            await until_end(stream, take, context)
        finally:
            deadline.cancel()
            if router is not None and router.session is not None:
                router.session.close()
            if router is not None and router is self._router:
                self._router = None
                log.info("router gone", router=router.hello.name, term=self._state.term)

    def _open(self, message: pb.SessionRequest, challenge: bytes, stream: _RouterStream) -> _Router:
        hello = message.open
        if message.WhichOneof("message") != "open":
            raise ValueError("a router's first message opens its session")
        if not handshake.proven(self._settings.secret, "router", challenge, hello.nonce, hello.mac):
            raise UnprovenError(f"router {hello.name} does not know this group's secret: {_ONE_SECRET}")
        self._check_alive()
        if self._router is not None:
            other = self._router.hello.name
            if not hello.take_over:
                raise HandshakeError(
                    f"router {other} serves this group (term {self._state.term}): "
                    f"stop it, or start {hello.name} with --take-over"
                )
            self._router.stream.close(grpc.StatusCode.ABORTED, f"router {hello.name} took over from {other}")
        self._router = router = _Router(stream, hello, challenge)
        log.info("router opened a session", router=hello.name, take_over=hello.take_over)
        if self._group.ready:
            self._grant(router)
        return router

    def _grant(self, router: _Router) -> None:
        """Gives the router a new term and empty books; workers hear of the term before the router does."""
        group, settings, hello = self._group, self._settings, router.hello
        assert group.plan is not None
        term, key = self._state.next_term(), secrets.token_bytes(32)
        group.broadcast(pb.JoinResponse(term=pb.TermGranted(term=term, key=key)))
        router.session = Session(hello.name, term, self._empty_books(group.plan), router.stream, group.end)
        granted = pb.Granted(
            term=term,
            epoch=group.epoch,
            round_key=key,
            mac=handshake.prove(settings.secret, "manager", hello.nonce, router.challenge),
            plan=to_proto(group.plan),
            worker_addresses=[member.hello.address for member in group.ranks()],
            identity=group.identity,
            headroom=settings.headroom,
            keep_from=self._rules.keep_from if isinstance(self._rules, Rules) else 0,
        )
        router.stream.send(pb.SessionResponse(granted=granted))
        log.info("term granted", router=hello.name, term=term, epoch=group.epoch)

    def _empty_books(self, plan: Plan) -> Leases:
        rules, why = (self._rules, "") if isinstance(self._rules, Rules) else (None, self._rules)
        return Leases(plan, self._settings.headroom, borrow=self._settings.borrow, rules=rules, nothing_kept=why)

    def _check_alive(self) -> None:
        if self._group.ended is not None:
            raise GroupOverError(f"this group has ended: {self._group.ended}")


_ONE_SECRET = "give every member of the group the same --secret-file"
