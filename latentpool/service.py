"""What the three services have in common: how they start, end and are run as a process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from latentpool import metrics
from latentpool.errors import LatentPoolError
from latentpool.metrics import Sample

log = structlog.get_logger()


class Service(Protocol):
    """One of router, pool manager, rank worker. Started once, stopped once; both inside a running event loop."""

    @property
    def address(self) -> str:
        """host:port it listens on; valid after `start`."""

    async def start(self) -> None:
        """Binds and starts; returns before the group is ready. Raises SetupError."""

    async def ended(self) -> LatentPoolError | None:
        """Waits until the service ends by itself: None for an orderly stop that another member asked for, else why."""

    def metrics(self) -> Iterable[Sample]:
        """Its numbers now; valid after `start`, and quick: it runs between other things on the event loop."""

    async def stop(self) -> None:
        """Drains and releases everything: no task, process, socket or file stays. Idempotent."""


async def _serve(service: Service, metrics_address: str | None) -> LatentPoolError | None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    endpoint = contextlib.AsyncExitStack()
    try:
        await service.start()
        log.info("listening", address=service.address)
        if metrics_address is not None:
            log.info("metrics", address=await endpoint.enter_async_context(metrics.serving(service.metrics, metrics_address)))
        ended = asyncio.create_task(service.ended())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if ended.done():
            return ended.result()
        ended.cancel()
        log.info("stopping", reason="signal")
        return None
    finally:
        await endpoint.aclose()
        await service.stop()


def run(service: Service, metrics_address: str | None = None) -> LatentPoolError | None:
    """Runs a service until it ends or SIGINT/SIGTERM, on uvloop where it is installed; with `metrics_address` Prometheus reads
    it there. Returns why it ended, if it failed. Raises SetupError if it cannot start."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(service, metrics_address))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
