"""A whole group inside this process's event loop, for verify and for tests. The engines are children over UCX, or threads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from latentpool.cli.calls import until_serving
from latentpool.cli.checks import check_group
from latentpool.client import Client
from latentpool.config import Switch
from latentpool.errors import EpochError, LatentPoolError
from latentpool.geometry import Geometry
from latentpool.service import Service
from services.pool_manager.service import PoolManager, PoolManagerSettings
from services.rank_worker.engine_link import ENGINE_MODULE
from services.rank_worker.exchange.inproc import Hub
from services.rank_worker.front import RankWorker, RankWorkerSettings
from services.router.service import Router, RouterSettings


class LocalGroup:
    """`async with LocalGroup(model, 2) as group: group.client...`: entered when it serves, left when nothing of it is left.

    Addresses are free ports of the loopback. Making one raises SetupError for what can be refused before anything starts,
    entering it raises what a service ended with (SetupError, EpochError).
    """

    def __init__(
        self,
        model: Path,
        world: int,
        *,
        transport: Literal["inproc", "ucx"] = "inproc",
        dtype: Literal["f32", "bf16"] | None = None,
        kv_cache: Literal["f32", "bf16"] | None = None,
        kv_pages: Switch = "auto",
        split: Switch = "auto",
        borrow: bool = True,
        context: int | None = None,
        parallel: int = 1,
        page_rows: int = 512,
        chunk_rows: int = 2048,
        staging_rows: int = 32768,
        audit: bool = False,
        memory_bytes: int = 1 << 30,
        headroom: int = 2048,
        cache_bytes: int = 16 << 30,
        keep_from: int = 4096,
        carry_from: int = 2048,
        keep_replies: bool = True,
        secret: bytes = b"",
        engines: Mapping[int, str] | None = None,
    ) -> None:
        """`engines`: ranks whose engine is another module than the product's, for tests of faults."""
        manager = PoolManagerSettings(
            world=world,
            context=context,
            parallel=parallel,
            kv_pages=kv_pages,
            split=split,
            borrow=borrow,
            headroom=headroom,
            cache_bytes=cache_bytes,
            keep_from=keep_from,
            carry_from=carry_from,
            secret=secret,
        )
        self.manager = PoolManager(manager)
        self._worker_settings = [
            RankWorkerSettings(
                model=model,
                rank=rank,
                world=world,
                manager="",
                secret=secret,
                dtype=dtype,
                kv_cache=kv_cache,
                memory_bytes=memory_bytes,
                page_rows=page_rows,
                chunk_rows=chunk_rows,
                staging_rows=staging_rows,
                audit=audit,
                transport=transport,
            )
            for rank in range(world)
        ]
        check_group(Geometry.from_file(model), manager, self._worker_settings[0])
        self._hub = Hub(world) if transport == "inproc" else None
        self._engines = engines or {}
        self._router_settings = RouterSettings(
            manager="", model=model, chunk_rows=chunk_rows, secret=secret, keep_replies=keep_replies
        )
        self.workers: list[RankWorker] = []
        self.router: Router
        self.client: Client
        self._services: list[Service] = []

    async def __aenter__(self) -> LocalGroup:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.stop()

    async def _start(self) -> None:
        await self._run(self.manager)
        for settings in self._worker_settings:
            module = self._engines.get(settings.rank, ENGINE_MODULE)
            worker = RankWorker(replace(settings, manager=self.manager.address), self._hub, engine_module=module)
            self.workers.append(worker)
            await self._run(worker)
        self.router = Router(replace(self._router_settings, manager=self.manager.address))
        await self._run(self.router)
        failed = asyncio.create_task(self.failed())
        serving = asyncio.create_task(until_serving(self.router.address))
        try:
            await asyncio.wait({failed, serving}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise failed.result()
            await serving
        finally:
            for task in (failed, serving):
                task.cancel()
        self.client = Client(self.router.address)

    async def _run(self, service: Service) -> None:
        self._services.append(service)
        await service.start()

    async def failed(self) -> LatentPoolError:
        """Waits until a service ends by itself, and gives the reason."""
        ended = [asyncio.create_task(service.ended()) for service in self._services]
        try:
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            reasons = [task.result() for task in ended if task.done()]
        finally:
            for task in ended:
                task.cancel()
        return next((reason for reason in reasons if reason is not None), EpochError("the group was stopped"))

    async def stop(self) -> None:
        """Stops router, pool manager, workers. Idempotent."""
        others = [service for service in self._services if not isinstance(service, RankWorker)]
        self._services = []
        for service in reversed(others):
            await service.stop()
        await asyncio.gather(*(worker.stop() for worker in self.workers))  # links close together
