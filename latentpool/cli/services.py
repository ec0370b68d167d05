"""`latentpool router`, `pool-manager`, `rank-worker`: one service each, until a signal or until its group ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from latentpool import logs
from latentpool.cli.options import takes
from latentpool.config import Settings
from latentpool.errors import ConfigError
from latentpool.service import Service, run

if TYPE_CHECKING:  # each command loads its own
    from services.pool_manager.service import PoolManagerSettings
    from services.rank_worker.front import RankWorkerSettings
    from services.router.service import RouterSettings

ROUTER = (
    "manager",
    "router_bind",
    "secret_file",
    "model",
    "chunk_rows",
    "take_over",
    "max_waiting",
    "keep_replies",
    "dead_after",
    "metrics_bind",
    "log_level",
)
MANAGER = (
    "ranks",
    "manager_bind",
    "context",
    "parallel",
    "kv_pages",
    "split",
    "borrow",
    "cache",
    "keep_from",
    "carry_from",
    "plan_order",
    "headroom",
    "secret_file",
    "state_dir",
    "dead_after",
    "join_timeout",
    "metrics_bind",
    "log_level",
)
WORKER = (
    "model",
    "rank",
    "ranks",
    "manager",
    "worker_bind",
    "advertise",
    "secret_file",
    "dtype",
    "kv_cache",
    "memory",
    "page_rows",
    "chunk_rows",
    "staging_rows",
    "audit",
    "net_devices",
    "dead_after",
    "metrics_bind",
    "log_level",
)


@takes(*ROUTER)
def router(settings: Settings) -> None:
    """The service that clients talk to: queues, admits and streams conversations.

    \b
    latentpool router --manager 10.0.0.1:7411 --model DIR --router-bind 127.0.0.1:7410

    --model is where its tokenizer.json is read; without one the router takes token ids only.
    """
    from services.router.service import Router

    logs.configure(settings.log_level, service="router")
    _run(Router(router_settings(settings)), settings.metrics_address("router"))


@takes(*MANAGER)
def pool_manager(settings: Settings) -> None:
    """The service that owns the plan and the pages: workers join it, the router leases pages from it.

    \b
    latentpool pool-manager --ranks 2 --context 128k --parallel 4
    latentpool pool-manager --ranks 2 --manager-bind 10.0.0.1:7411 --secret-file /etc/latentpool/secret
    """
    from services.pool_manager.service import PoolManager

    logs.configure(settings.log_level, service="pool-manager")
    _run(PoolManager(manager_settings(settings)), settings.metrics_address("pool-manager"))


@takes(*WORKER, needs=("model", "rank"))
def rank_worker(settings: Settings) -> None:
    """One rank: its shard of the model, its part of the pool, and the data plane to the other ranks.

    \b
    latentpool rank-worker --model DIR --rank 0 --ranks 2 --manager 10.0.0.1:7411 --net-devices eth1 \\
                           --worker-bind 10.0.0.1:7420 --secret-file /etc/latentpool/secret
    """
    from services.rank_worker.front import RankWorker

    worker = worker_settings(settings)
    logs.configure(settings.log_level, service="rank-worker", rank=worker.rank)
    _run(
        RankWorker(worker, on_progress=_loading_bar() if sys.stderr.isatty() else None), settings.metrics_address("rank-worker")
    )


def router_settings(settings: Settings) -> RouterSettings:
    from services.router.service import RouterSettings

    return RouterSettings(
        manager=settings.manager,
        bind=settings.router_bind,
        secret=settings.secret,
        model=settings.model,
        chunk_rows=settings.chunk_rows,
        take_over=settings.take_over,
        max_waiting=settings.max_waiting,
        keep_replies=settings.keep_replies,
        dead_after=settings.dead_after,
    )


def manager_settings(settings: Settings) -> PoolManagerSettings:
    from services.pool_manager.service import PoolManagerSettings

    return PoolManagerSettings(
        world=settings.ranks,
        context=settings.context,
        parallel=settings.parallel,
        kv_pages=settings.kv_pages,
        split=settings.split,
        borrow=settings.borrow,
        cache_bytes=settings.cache,
        keep_from=settings.keep_from,
        carry_from=settings.carry_from,
        plan_order=settings.plan_order,
        secret=settings.secret,
        bind=settings.manager_bind,
        state_dir=settings.state_directory,
        headroom=settings.headroom,
        dead_after=settings.dead_after,
        join_timeout=settings.join_timeout,
    )


def worker_settings(settings: Settings) -> RankWorkerSettings:
    """Of one that has a model and a rank. Raises ConfigError for a cache dtype that is not served."""
    from services.rank_worker.front import RankWorkerSettings

    assert settings.model is not None
    assert settings.rank is not None
    return RankWorkerSettings(
        model=settings.model,
        rank=settings.rank,
        world=settings.ranks,
        manager=settings.manager,
        bind=settings.worker_address(settings.rank),
        advertise=settings.advertise,
        secret=settings.secret,
        dtype=settings.dtype,
        kv_cache=served_kv_cache(settings),
        memory_bytes=settings.memory,
        page_rows=settings.page_rows,
        chunk_rows=settings.chunk_rows,
        staging_rows=settings.staging_rows,
        audit=settings.audit,
        transport="ucx",
        net_devices=settings.net_devices,
        dead_after=settings.dead_after,
    )


def _loading_bar() -> Callable[[int, int], None]:
    """Shows bytes and bytes a second of the shard on a terminal, from the first byte to the last."""
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("loading", total=None)

    def show(loaded: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=loaded, total=total)
        if loaded >= total:
            bar.stop()

    return show


def served_kv_cache(settings: Settings) -> Literal["f32", "bf16"] | None:
    """The kv dtype, if this build serves it. Raises ConfigError for fp8."""
    if settings.kv_cache == "fp8":
        raise ConfigError("--kv-cache fp8 is not served yet, only planned with: use f32 or bf16")
    return settings.kv_cache


def _run(service: Service, metrics_address: str | None) -> None:
    error = run(service, metrics_address)
    if error is not None:
        raise error
