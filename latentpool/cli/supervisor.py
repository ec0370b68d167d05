"""A whole group on this machine as real processes: started, watched and stopped by one parent, which nothing survives."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from latentpool import config
from latentpool.cli import services
from latentpool.cli.log_lines import last_words
from latentpool.config import Settings
from latentpool.errors import ConfigError, EpochError, SetupError

_PR_SET_PDEATHSIG = 1
_GRACE = 10.0
"""Seconds that a child has to stop after SIGTERM, before it is killed."""

FAREWELL = 5.0
"""Seconds in which the router of a group that ends learns why from the pool manager, tells its clients, and ends by itself."""

_FOLLOW = 0.5
"""Seconds in which processes that end for the same reason have ended too."""

Log = Callable[[str, str], None]
"""Takes a child's name and a line of its stderr."""


@dataclass
class Child:
    """One service process, in a process group of its own so that a terminal's Ctrl-C reaches only the parent. `module`: what is
    run with the arguments."""

    name: str
    arguments: list[str]
    log: Log
    module: str = "latentpool.cli"
    process: asyncio.subprocess.Process | None = None
    lines: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=200))
    reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self.module,
            *self.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
            env=_only_flags(),
            process_group=0,
            preexec_fn=_end_with(os.getpid()),
        )
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            self.lines.append(text)
            self.log(self.name, text)

    async def ended(self) -> str:
        """Waits for the process to end by itself; why it did, as far as its last words tell."""
        assert self.process is not None
        assert self.reader is not None
        code = await self.process.wait()
        # An engine that outlives its front would hold the pipe open.
        await asyncio.wait({self.reader}, timeout=1.0)
        error, last = last_words(list(self.lines))
        if error:
            return error
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"ended ({how})" + (f"; its last words: {last}" if last else "")

    async def stop(self) -> None:
        """Asks the process to stop, then kills its process group. Returns when it is gone."""
        if self.process is None:
            return
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGTERM)  # not terminate(): it polls, and may reap before asyncio does
            try:
                async with asyncio.timeout(_GRACE):
                    await self.process.wait()
            except TimeoutError:
                self.log(self.name, f"did not stop within {_GRACE:g} s and is killed")
        self.kill()
        await self.process.wait()
        if self.reader is not None:
            await asyncio.wait({self.reader}, timeout=1.0)
            self.reader.cancel()

    def kill(self) -> None:
        """Kills whatever is left of the process group."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Group:
    """Pool manager, workers and router of one group. `settings` has real ports once `start` was called; `serving` is set by
    who has seen that the router serves."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self.settings = settings
        self.serving = asyncio.Event()
        self._log = log
        self.children: list[Child] = []

    async def start(self) -> None:
        """Starts all processes; returns before the group is ready. Raises ConfigError if an address is taken."""
        self.settings = settings = _with_ports(self.settings)
        manager = self._child("pool-manager", "pool-manager", settings, services.MANAGER)
        for rank in range(settings.ranks):
            self._child(f"rank {rank}", "rank-worker", replace(settings, rank=rank), services.WORKER)
        self._child("router", "router", settings, services.ROUTER)
        await manager.start()
        await self._until_listening(manager, settings.manager_bind)
        for child in self.children[1:]:
            await child.start()

    def _child(self, name: str, command: str, settings: Settings, names: tuple[str, ...]) -> Child:
        child = Child(name, [command, *config.as_flags(settings, names)], self._log)
        self.children.append(child)
        return child

    async def _until_listening(self, child: Child, address: str) -> None:
        host, _, port = address.rpartition(":")
        assert child.process is not None
        while child.process.returncode is None:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return
        raise SetupError(f"{child.name}: {await child.ended()}")

    async def failed(self) -> EpochError:
        """Waits until any process ends by itself; which ones do then, and why, the first to end first. While the group serves,
        the router gets the time to tell its clients."""
        reasons: list[tuple[str, str]] = []

        async def follow(child: Child) -> None:
            reasons.append((child.name, await child.ended()))

        tasks = {child.name: asyncio.create_task(follow(child)) for child in self.children if child.process is not None}
        try:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            if self.serving.is_set():
                await asyncio.wait({tasks["router"]}, timeout=FAREWELL)
            await asyncio.wait(tasks.values(), timeout=_FOLLOW)
        finally:
            for task in tasks.values():
                task.cancel()
        return EpochError(_told(reasons))

    async def stop(self) -> None:
        """Stops router, pool manager, workers, in this order; nothing is left of them. Idempotent."""
        order = [child for child in self.children if child.name == "router"]
        order += [child for child in self.children if child.name == "pool-manager"]
        for child in order:
            await child.stop()
        await asyncio.gather(*(child.stop() for child in self.children if child not in order))

    def kill(self) -> None:
        for child in self.children:
            child.kill()


def _told(reasons: list[tuple[str, str]]) -> str:
    """A line a reason, with all who give it. What somebody passed on, perhaps with a word more, is said once."""
    first_hand = tuple(f"{name}: {why}" for name, why in reasons)
    names: dict[str, list[str]] = {}
    for name, why in reasons:
        names.setdefault(why, []).append(name)
    names = {why: who for why, who in names.items() if not why.startswith(first_hand)} or names
    return "\n".join(f"{', '.join(who)}: {why}" for why, who in names.items())


def _only_flags() -> dict[str, str]:
    """An environment in which a child takes its settings from its flags alone: they hold all that the parent has read."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(config.ENV_PREFIX)}
    return kept | {config.ENV_PREFIX + "CONFIG": os.devnull}


def _end_with(parent: int) -> Callable[[], None]:
    """Runs in the child before exec: the kernel sends it SIGTERM when the parent dies, however it dies."""
    libc = ctypes.CDLL(None, use_errno=True)

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def _with_ports(settings: Settings) -> Settings:
    """The same settings with every port 0 replaced by a free one. Raises ConfigError if an address is taken."""
    with _Ports() as ports:
        manager = ports.take(settings.manager_bind, "pool manager")
        router = ports.take(settings.router_bind, "router")
        host, _, port = settings.worker_bind.rpartition(":")
        base = int(port) or ports.free_run(host, settings.ranks)
        for rank in range(settings.ranks):
            ports.take(f"{host}:{base + rank}", f"rank {rank}")
        settings = replace(
            settings, manager_bind=manager, manager=manager, router_bind=router, address=router, worker_bind=f"{host}:{base}"
        )
        return replace(settings, metrics_bind=_with_metrics_ports(settings, ports))


def _with_metrics_ports(settings: Settings, ports: _Ports) -> str | None:
    if settings.metrics_bind is None:
        return None
    host, _, port = settings.metrics_bind.rpartition(":")
    first = f"{host}:{int(port) or ports.free_run(host, config.METRICS_PORTS + settings.ranks)}"
    told = replace(settings, metrics_bind=first)
    addresses = {"router": told.metrics_address("router"), "pool manager": told.metrics_address("pool-manager")}
    addresses |= {f"rank {rank}": replace(told, rank=rank).metrics_address("rank-worker") for rank in range(settings.ranks)}
    for who, address in addresses.items():
        assert address is not None
        ports.take(address, f"metrics of {who}")
    return first


class _Ports:
    """Holds ports until all are chosen, so that no two services get the same one."""

    def __enter__(self) -> _Ports:
        self._sockets: list[socket.socket] = []
        self._chosen: set[str] = set()
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._sockets:
            held.close()

    def take(self, address: str, who: str) -> str:
        host, _, port = address.rpartition(":")
        held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if address in self._chosen:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            held.bind((host.strip("[]"), int(port)))
        except OverflowError:
            held.close()
            raise ConfigError(
                f"{who} cannot listen on {address}: ports end at 65535, and one of each rank is counted up from the first"
            ) from None
        except OSError as error:
            held.close()
            raise ConfigError(
                f"{who} cannot listen on {address}: {(error.strerror or str(error)).lower()} (another latentpool, perhaps?); "
                f"choose other addresses with --router-bind, --manager-bind, --worker-bind and --metrics-bind"
            ) from None
        self._sockets.append(held)
        chosen = f"{host}:{held.getsockname()[1]}"
        self._chosen.add(chosen)
        return chosen

    def free_run(self, host: str, count: int) -> int:
        """The first of `count` free ports in a row."""
        for base in range(20_000 + os.getpid() * 16 % 12_000, 60_000, count):  # groups started together look apart
            if any(f"{host}:{port}" in self._chosen for port in range(base, base + count)):
                continue  # held sockets do not listen, so they keep nobody out
            with contextlib.ExitStack() as held, contextlib.suppress(OSError):
                for port in range(base, base + count):
                    held.enter_context(socket.create_server((host.strip("[]"), port)))
                return base
        raise ConfigError(f"{count} free ports in a row were not found on {host}")
