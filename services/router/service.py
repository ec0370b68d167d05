"""The router service: the only one that clients talk to."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from latentpool import net
from latentpool.errors import LatentPoolError
from latentpool.metrics import Sample
from services.router.group import Group
from services.router.handlers import SERVICE, Handlers
from services.router.manager import Session
from services.router.text import Texts

_GRACE_SECONDS = 1.0


@dataclass(frozen=True)
class RouterSettings:
    """`chunk_rows` is a multiple of 64; `model` is where tokenizer.json is, if there is one; `name` shows in refusals; round
    streams are reopened for `dead_after` seconds. `keep_replies`: idle time computes replies' tokens to keep their state."""

    manager: str
    bind: str = "127.0.0.1:0"
    secret: bytes = b""
    model: Path | None = None
    chunk_rows: int = 2048
    take_over: bool = False
    max_waiting: int = 256
    name: str = ""
    dead_after: float = 30.0
    keep_replies: bool = True

    def check(self) -> None:
        """Raises ConfigError for addresses that need a secret."""
        net.check_secret(self.secret, [self.manager, self.bind], "the router")


class Router:
    """The service (see latentpool.service.Service). Its health is SERVING once a round was answered by all ranks."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self._address = ""
        self._server: grpc.aio.Server | None = None
        self._session: Session | None = None
        self._group: Group | None = None
        self._texts: Texts | None = None
        self._task: asyncio.Task[LatentPoolError | None] | None = None
        self._health = health_aio.HealthServicer()
        self._stopped = False

    @property
    def address(self) -> str:
        return self._address

    async def start(self) -> None:
        """Binds and begins to wait for the group. Raises ConfigError, CheckpointError."""
        settings = self.settings
        settings.check()
        self._texts = Texts(settings.model)
        self._server = net.server(net.PUBLIC_RECEIVE_LIMIT)
        self._address = net.bind(self._server, settings.bind, "the router")
        name = settings.name or f"{socket.gethostname()}:{os.getpid()}"
        self._session = Session(settings.manager, settings.secret, name, settings.take_over)
        self._group = Group(
            self._session, settings.chunk_rows, settings.max_waiting, settings.dead_after, settings.keep_replies, self._on_ready
        )
        Handlers(self._group, self._texts, settings.model).register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), self._server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()
        self._task = asyncio.create_task(self._run(self._group))

    async def ended(self) -> LatentPoolError | None:
        """Waits for the end of the group: HandshakeError where the manager refused this router, EpochError where the epoch
        ended, None where the group was stopped."""
        assert self._task is not None
        return await asyncio.shield(self._task)

    def metrics(self) -> Iterable[Sample]:
        return () if self._group is None else self._group.metrics()

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._group is not None:
            self._group.end("the router is stopping")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if self._server is not None:
            await self._server.stop(_GRACE_SECONDS)
        if self._texts is not None:
            self._texts.close()

    async def _run(self, group: Group) -> LatentPoolError | None:
        error = await group.run()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        return error

    def _on_ready(self) -> None:
        self._turning = asyncio.create_task(self._set_health(health_pb2.HealthCheckResponse.SERVING))

    async def _set_health(self, status: int) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)
