"""A group of real processes under clients that come and go, for minutes: no process may hold more and more memory or files.

The clients are those of tests/test_churn.py, and the pool is too small for them, so that conversations park. Once the group is
warm, a line is fitted to the resident memory and to the open files of every process; the exit code is 1 where one rises.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from churn import Clients, hear, jobs

from latentpool.cli.calls import until_serving
from latentpool.cli.supervisor import Child, Group
from latentpool.client import AdminClient, Client
from latentpool.config import Settings

MODEL = Path(__file__).parents[1] / "tests" / "data" / "oracle" / "tiny"
START_SECONDS = 120.0
RISE_BYTES = 4 << 20
"""Most that the fitted line of a process's resident memory may rise over the time it is fitted to."""
RISE_FILES = 2.0
PAGES = 8


@dataclass
class Samples:
    """One process: moments in seconds since the start of the load, resident bytes and open files then."""

    process: psutil.Process
    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def take(self, now: float) -> None:
        self.seconds.append(now)
        self.bytes.append(self.process.memory_info().rss)
        self.files.append(self.process.num_fds())

    def summary(self, warm: float) -> dict[str, Any]:
        """Rises of the lines fitted to what came after `warm` seconds, over all of that time."""
        first = next(at for at, second in enumerate(self.seconds) if second >= warm)
        seconds = np.array(self.seconds[first:])

        def rise(values: list[int]) -> float:
            return float(np.polyfit(seconds, values[first:], 1)[0] * (seconds[-1] - seconds[0]))

        return {
            "resident_bytes": {
                "first": self.bytes[0],
                "warm": self.bytes[first],
                "last": self.bytes[-1],
                "most": max(self.bytes),
            },
            "resident_rise_bytes": rise(self.bytes),
            "files": {"first": self.files[0], "warm": self.files[first], "last": self.files[-1], "most": max(self.files)},
            "files_rise": rise(self.files),
        }


class FewPages(Group):
    """A group whose pool is smaller than its lanes can fill."""

    def _child(self, name: str, *arguments: Any) -> Child:
        child = super()._child(name, *arguments)
        if name == "pool-manager":
            child.module = "few_pages"
        return child


def processes(group: Group) -> dict[str, Samples]:
    """Services and engines of a group that serves."""
    found = {}
    for child in group.children:
        assert child.process is not None
        service = psutil.Process(child.process.pid)
        found[child.name] = Samples(service)
        for engine in service.children():
            found[f"engine of {child.name}"] = Samples(engine)
    return found


async def soak(settings: Settings, seconds: float, every: float, at_once: int, seed: int) -> dict[str, Any]:
    group = FewPages(settings, lambda _name, _line: None)
    try:
        await group.start()
        async with asyncio.timeout(START_SECONDS):
            await until_serving(group.settings.address)
        return await _load(group, seconds, every, at_once, seed)
    finally:
        await group.stop()


async def _load(group: Group, seconds: float, every: float, at_once: int, seed: int) -> dict[str, Any]:
    todo = jobs()
    async with Client(group.settings.address) as client:
        whole = [await hear(client, job) for job in todo]
    samples = processes(group) | {"clients": Samples(psutil.Process())}
    begun = time.monotonic()

    def sample() -> None:
        for one in samples.values():
            one.take(time.monotonic() - begun)

    async def watch() -> None:
        while True:
            sample()
            await asyncio.sleep(every)

    async with Clients(group.settings.address, todo, whole, seed) as clients, AdminClient(group.settings.manager) as admin:
        watching, failed = asyncio.create_task(watch()), asyncio.create_task(group.failed())
        churning = asyncio.create_task(clients.churn(at_once, seconds=seconds))
        try:
            await asyncio.wait({churning, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise failed.result()
            await churning
        finally:
            for task in (watching, failed, churning):
                task.cancel()
            await asyncio.wait({watching, failed, churning})
        sample()
        await asyncio.sleep(2.0)
        pages = await admin.list_pages()
        left = {
            "pages": pages.pages - pages.free,
            "conversations": len(await admin.list_conversations()),
            "violations": await admin.check_integrity(),
        }
    warm = seconds / 4
    return {
        "seconds": seconds,
        "warm_seconds": warm,
        "samples": len(samples["router"].seconds),
        "streams": sum(clients.left.values()),
        "ended": dict(clients.left.most_common()),
        "heard_of_stage": dict(clients.stages.most_common()),
        "left_after": left,
        "processes": {name: one.summary(warm) for name, one in samples.items()},
    }


def failures(result: dict[str, Any]) -> list[str]:
    """What is wrong with a soak, in words."""
    wrong = [f"{count} {what} left" for what, count in result["left_after"].items() if count]
    for name, of in result["processes"].items():
        if name != "clients" and of["resident_rise_bytes"] > RISE_BYTES:
            wrong.append(f"memory of {name} rises: {of['resident_rise_bytes'] / 2**20:.1f} MiB")
        if of["files_rise"] > RISE_FILES:
            wrong.append(f"files of {name} rise: {of['files_rise']:.1f}")
    return wrong


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['streams']} streams in {result['seconds']:g} s; warm after {result['warm_seconds']:g} s")
    for column in ("process", "MiB warm", "last", "most", "rise of the fit", "files warm", "last", "most", "rise of the fit"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, of in result["processes"].items():
        held, files = of["resident_bytes"], of["files"]
        table.add_row(
            name,
            *(f"{held[when] / 2**20:.1f}" for when in ("warm", "last", "most")),
            f"{of['resident_rise_bytes'] / 2**20:+.2f}",
            *(str(files[when]) for when in ("warm", "last", "most")),
            f"{of['files_rise']:+.2f}",
        )
    Console(width=128).print(table)
    print("ended:", ", ".join(f"{name} {count}" for name, count in result["ended"].items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the load lasts (600)")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between samples (3)")
    parser.add_argument("--at-once", type=int, default=24, help="streams at any time (24)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.environ["SOAK_PAGES"] = str(PAGES)
    with tempfile.TemporaryDirectory(prefix="latentpool-soak-") as directory:
        settings = Settings(
            model=MODEL, ranks=options.ranks, context=384, parallel=6, page_rows=64, chunk_rows=128, headroom=1, cache=0,
            memory=256 << 20, dtype="f32", kv_pages="on", state_dir=Path(directory),
            router_bind="127.0.0.1:0", manager_bind="127.0.0.1:0", worker_bind="127.0.0.1:0",
        )  # fmt: skip
        result = asyncio.run(soak(settings, options.seconds, options.every, options.at_once, options.seed))
    chosen = {name: getattr(options, name) for name in ("ranks", "at_once", "seed", "every")}
    machine = {"transport": "ucx", "cores": os.cpu_count(), "python": sys.version.split()[0]}
    result["settings"] = chosen | machine | {"pages": PAGES}
    result["failures"] = failures(result)
    show(result)
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(result["failures"]) or "flat")
    return bool(result["failures"])


if __name__ == "__main__":
    sys.exit(main())
