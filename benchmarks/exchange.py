"""Times the data plane between two processes of this host: `python benchmarks/exchange.py`.

An exchange is simultaneous: both ranks send n bytes and receive n bytes. Rows are microseconds an exchange (median and p99)
and GB/s each way. Three transports: shared memory (the settings of the data plane), TCP (`UCX_TLS=tcp,self`), and, as the
floor, a plain non-blocking Unix socket pair spun in the same way. Each rank is pinned to a core of its own where there are
two. UCX_* variables of the environment are passed on.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

SIZES = [8, 1 << 10, 4 << 10, 8 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
TRANSPORTS = {"shared memory": {}, "tcp": {"UCX_TLS": "tcp,self"}, "socket pair": {}}
PATIENCE = 120.0


def repeats(size: int, seconds: float) -> int:
    """How often, so that a size takes about `seconds`."""
    return int(min(3000, max(10, seconds / (30e-6 + size / 1.5e9))))


def timed(once: Callable[[int], None], size: int, seconds: float) -> list[float]:
    """Seconds of each exchange, after a tenth as many for warming up."""
    count = repeats(size, seconds)
    for turn in range(2 + count // 10):
        once(turn)
    times = []
    for turn in range(count):
        begun = time.perf_counter()
        once(turn)
        times.append(time.perf_counter() - begun)
    return times


def over_ucx(rank: int, pipe: Connection, seconds: float) -> None:
    from services.rank_worker.exchange.ucx import make

    exchange = make(rank, 2, "lo")
    slots = {size: exchange.prepare(f"of {size}", (1, size), np.dtype(np.uint8)) for size in SIZES}
    pipe.send(exchange.address)
    exchange.connect(pipe.recv(), 1, PATIENCE)
    for size in SIZES:

        def once(turn: int, pair: Any = slots[size]) -> None:
            slot = pair[turn % 2]
            exchange.enqueue(slot, (1, 1), (1, 1))
            exchange.wait(slot, PATIENCE)

        pipe.send(timed(once, size, seconds))
    exchange.close()


def over_sockets(rank: int, pipe: Connection, seconds: float, pair: list[socket.socket]) -> None:
    mine = pair[rank]
    pair[1 - rank].close()
    mine.setblocking(False)
    pipe.send(b"")
    pipe.recv()
    for size in SIZES:
        out, into = memoryview(bytearray(size)), memoryview(bytearray(size))

        def once(turn: int, out: memoryview = out, into: memoryview = into, size: int = size) -> None:
            sent = received = 0
            while sent < size or received < size:
                try:
                    if sent < size:
                        sent += mine.send(out[sent:])
                except BlockingIOError:
                    pass
                try:
                    if received < size:
                        received += mine.recv_into(into[received:])
                except BlockingIOError:
                    os.sched_yield()

        pipe.send(timed(once, size, seconds))


def rank_main(transport: str, rank: int, pipe: Connection, seconds: float, pair: list[socket.socket]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.update(TRANSPORTS[transport])
    if transport == "socket pair":
        over_sockets(rank, pipe, seconds, pair)
    else:
        over_ucx(rank, pipe, seconds)


def measure(transport: str, seconds: float) -> dict[int, list[float]]:
    """Seconds of each exchange by size, as rank 0 saw them."""
    spawn = multiprocessing.get_context("spawn")
    pair = list(socket.socketpair())
    pipes, processes = [], []
    try:
        for rank in range(2):
            ours, theirs = spawn.Pipe()
            processes.append(spawn.Process(target=rank_main, args=(transport, rank, theirs, seconds, pair)))
            processes[-1].start()
            pipes.append(ours)
        addresses = [hear(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(addresses)
        seen = {}
        for size in SIZES:
            seen[size], _ = (hear(pipe) for pipe in pipes)
        return seen
    finally:
        for process in processes:
            process.join(10)
            process.kill()
        for end in pair:
            end.close()


def hear(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE):
        raise TimeoutError(f"a rank said nothing for {PATIENCE:g} s")
    return pipe.recv()


def row(size: int, times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    median = statistics.median(ordered)
    return {
        "bytes": size,
        "exchanges": len(times),
        "median_us": round(median * 1e6, 2),
        "p99_us": round(ordered[int(len(ordered) * 0.99)] * 1e6, 2),
        "gb_per_s_each_way": round(size / median / 1e9, 3),
    }


def conditions() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()),
        "cores": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "niceness": os.nice(0),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("ucxx-cu13", "libucx-cu13", "numpy")},
        "ucx_settings_of_the_environment": {name: value for name, value in os.environ.items() if name.startswith("UCX_")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="about how long a size is timed (default 0.5)")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--json", type=Path, help="where the results go as JSON")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "exchange", "ranks": 2, **conditions(), "results": {}}
    for transport in arguments.transports:
        report["results"][transport] = [row(size, times) for size, times in measure(transport, arguments.seconds).items()]
    print(f"{'bytes':>10}" + "".join(f" | {name:^31}" for name in report["results"]))
    print(f"{'':>10}" + f" | {'median us':>9} {'p99 us':>9} {'GB/s':>11}" * len(report["results"]))
    for rows in zip(*report["results"].values(), strict=True):
        cells = [f" | {one['median_us']:>9.1f} {one['p99_us']:>9.1f} {one['gb_per_s_each_way']:>11.3f}" for one in rows]
        print(f"{rows[0]['bytes']:>10}" + "".join(cells))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
