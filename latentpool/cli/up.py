"""`latentpool up`: a whole group on this machine, in view of one terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.text import Text

from latentpool.cli import services
from latentpool.cli.calls import until_serving
from latentpool.cli.checks import check_group
from latentpool.cli.log_lines import readable
from latentpool.cli.options import takes
from latentpool.cli.supervisor import FAREWELL, Group, Log
from latentpool.client import AdminClient
from latentpool.config import Settings
from latentpool.errors import ConfigError, EpochError, LatentPoolError
from latentpool.geometry import Geometry
from latentpool.units import format_tokens
from latentpool.v1 import plan_pb2, pool_admin_pb2
from services.rank_worker.memory import default_budget

_ONE_SERVICE = ("manager", "rank", "advertise", "take_over")
UP = tuple(n for n in dict.fromkeys(services.WORKER + services.MANAGER + services.ROUTER) if n not in _ONE_SERVICE)
_POLL = 0.2
_DEATH = 2.0 + FAREWELL
"""Seconds after a broken call in which the process that broke it is known."""


@takes(*UP, "drafts", "log_dir", needs=("model",))
def up(settings: Settings) -> None:
    """A whole group on this machine: pool manager, rank workers and router. Ctrl-C stops it, and nothing is left.

    \b
    latentpool up --model DIR
    latentpool up --model DIR --ranks 3 --context 128k --parallel 4 --memory 40GiB
    latentpool up --model DIR --log-dir logs --router-bind 127.0.0.1:8000
    """
    console = Console(stderr=True)
    settings = checked(settings, console)

    async def serve(group: Group) -> None:
        console.print(_ready(group.settings, await _plan(group.settings)))
        await asyncio.Event().wait()

    with child_log(console, settings.log_dir) as log:
        asyncio.run(run_group(settings, console, log, serve))


def checked(settings: Settings, console: Console) -> Settings:
    """What can be refused before anything is started, and each rank's memory. Raises SetupError."""
    assert settings.model is not None
    geometry = Geometry.from_file(settings.model)
    memory = settings.memory or default_budget() // settings.ranks
    settings = replace(settings, model=settings.model.resolve(), memory=memory, manager=settings.manager_bind)
    manager = services.manager_settings(settings)
    workers = [services.worker_settings(replace(settings, rank=rank)) for rank in range(settings.ranks)]
    check_group(geometry, manager, workers[0])
    manager.check()
    for worker in workers:
        worker.check()
    services.router_settings(settings).check()
    if geometry.draft_layers and settings.drafts:
        console.print("note: the draft layer is not run yet; serving as with --no-drafts", highlight=False)
    return settings


async def run_group(settings: Settings, console: Console, log: Log, work: Callable[[Group], Awaitable[None]]) -> bool:
    """Starts a group, waits until it serves, runs `work`, stops the group; whether work came to its end. SIGINT, SIGTERM and
    SIGHUP stop it at any moment: while it serves, False; before, KeyboardInterrupt. Raises SetupError or EpochError if a
    process ends by itself."""
    group = Group(settings, log)
    signals = 0
    interrupted = asyncio.Event()

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        interrupted.set()
        if signals > 1:
            group.kill()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    life = asyncio.create_task(_life(group, console, work))
    stopping = asyncio.create_task(interrupted.wait())
    try:
        await asyncio.wait({life, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if interrupted.is_set():
            if not group.serving.is_set():
                raise KeyboardInterrupt
            return False
        await life
        return True
    finally:
        stopping.cancel()
        life.cancel()
        await asyncio.wait({life})
        await group.stop()


async def _life(group: Group, console: Console, work: Callable[[Group], Awaitable[None]]) -> None:
    await group.start()

    async def serve() -> None:
        await _until_ready(group.settings, console)
        group.serving.set()
        await work(group)

    failed = asyncio.create_task(group.failed())
    working = asyncio.create_task(serve())
    try:
        await asyncio.wait({failed, working}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done() and not (working.done() and working.exception() is None):
            raise failed.result()
        await working
    except EpochError:
        # A service that dies takes its calls along: say which one died, if one did.
        with contextlib.suppress(TimeoutError):
            raise await asyncio.wait_for(asyncio.shield(failed), _DEATH) from None
        raise
    finally:
        for task in (failed, working):
            task.cancel()
        await asyncio.wait({failed, working})


async def _until_ready(settings: Settings, console: Console) -> None:
    """Shows how the ranks load, until the router serves."""
    ready = asyncio.create_task(until_serving(settings.address))
    try:
        async with AdminClient(settings.manager) as manager, _loading(settings.ranks, console) as show:
            while not ready.done():
                with contextlib.suppress(LatentPoolError):
                    show(await manager.get_ranks())
                await asyncio.wait({ready}, timeout=_POLL)
        await ready
    finally:
        ready.cancel()


@contextlib.asynccontextmanager
async def _loading(ranks: int, console: Console) -> AsyncIterator[Callable[[pool_admin_pb2.GetRanksResponse], None]]:
    """A bar a rank: bytes and bytes a second. Nothing is drawn where stderr is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console, disable=not console.is_terminal) as bars:
        tasks: list[TaskID] = [bars.add_task(f"rank {rank}", total=None, state="starting") for rank in range(ranks)]

        def show(reply: pool_admin_pb2.GetRanksResponse) -> None:
            for entry in reply.ranks:
                total = entry.total_bytes or None
                bars.update(tasks[entry.rank], completed=entry.loaded_bytes, total=total, state=entry.state)

        yield show


async def _plan(settings: Settings) -> plan_pb2.Plan:
    async with AdminClient(settings.manager) as manager:
        return await manager.get_plan()


def _ready(settings: Settings, plan: plan_pb2.Plan) -> Panel:
    defaults = Settings()
    router = "" if settings.address == defaults.address else f" --address {settings.address}"
    manager = "" if settings.manager == defaults.manager else f" --manager {settings.manager}"
    kind = "pages" if plan.paged else "windows"
    rows = format_tokens(plan.stream_pages * plan.page_rows)
    more = (plan.pages - plan.stream_pages) * plan.page_rows
    kept = f", room for {format_tokens(more)} more that are kept" if more else ""
    note = [f"note: {plan.note}"] if plan.note else []
    lines = [
        f"router {settings.address}, pool manager {settings.manager}, {settings.ranks} ranks",
        f"{kind}: {rows} tokens of conversations{kept}, {format_tokens(plan.context)} a conversation, {plan.lanes} at a time",
        *note,
        *_metrics(settings),
        "",
        f'latentpool generate "Once upon a time"{router}',
        f"latentpool top{manager}",
        "",
        "Ctrl-C stops the group.",
    ]
    return Panel(Text("\n".join(lines)), title="ready", title_align="left", expand=False)


def _metrics(settings: Settings) -> list[str]:
    router, manager = settings.metrics_address("router"), settings.metrics_address("pool-manager")
    if router is None or manager is None:
        return []
    ranks = [replace(settings, rank=rank).metrics_address("rank-worker") or "" for rank in range(settings.ranks)]
    ports = ", ".join(address.rpartition(":")[2] for address in ranks)
    port = manager.rpartition(":")[2]
    return [f"metrics: http://{router}/metrics of the router; port {port} of the pool manager; {ports} of the ranks"]


@contextlib.contextmanager
def child_log(console: Console, log_dir: Path | None) -> Iterator[Log]:
    """Where lines of the services go: a file each in `log_dir`, else stderr: readable on a terminal, as they are otherwise."""
    if log_dir is None:
        yield lambda name, line: console.print(readable(name, line, console.is_terminal), soft_wrap=True)
        return
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--log-dir {log_dir}: {error.strerror}") from None
    with contextlib.ExitStack() as files:
        opened = {}

        def write(name: str, line: str) -> None:
            if name not in opened:
                path = log_dir / f"{name.replace(' ', '-')}.log"
                opened[name] = files.enter_context(path.open("a", encoding="utf-8", buffering=1))
            opened[name].write(line + "\n")

        yield write
