"""Rates of a whole group on this host's CPUs, beside transformers' own `glm5_next`: `python benchmarks/cpu.py`.

The checkpoint (12 layers, hidden 256, about 20 M parameters) is made on the fly; both sides compute it in float32. Rates are
medians of the repeats. A group is real processes over UCX; its client is this process. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from cpu_group import Job, clocked, measure, peak_bytes, processes, shares
from rich import box
from rich.console import Console
from rich.table import Table

from latentpool import logs
from latentpool.cli.group import LocalGroup
from latentpool.cli.machine import machine
from latentpool.client import Client
from latentpool.config import Settings
from latentpool.geometry import Geometry

ROOT = Path(__file__).resolve().parent.parent
PREFILL = [512, 1500]
STREAMS = [1, 4, 16]
CONTEXT = 4096
LANES = 20
MEMORY = 2 << 30
PEER_SECONDS = 3600


def job(vocab: int, prompt_tokens: int, decode_tokens: int, repeats: int) -> Job:
    draw = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return [int(token) for token in draw.integers(0, vocab // 2, length)]

    return Job(
        decode_prompts=[prompt(prompt_tokens) for _ in range(max(STREAMS))],
        prefill_prompts=[prompt(length) for length in PREFILL],
        streams=STREAMS,
        decode_tokens=decode_tokens,
        repeats=repeats,
        context=CONTEXT,
    )


async def group(model: Path, world: int, work: Job, directory: Path) -> dict[str, Any]:
    """Rates, gaps and memory of a group of processes; then a round's shares, with the fronts in this process."""
    settings = Settings(
        model=model,
        ranks=world,
        dtype="f32",
        context=CONTEXT,
        parallel=LANES,
        memory=MEMORY,
        router_bind="127.0.0.1:0",
        manager_bind="127.0.0.1:0",
        worker_bind="127.0.0.1:0",
        state_dir=directory / f"state{world}",
        log_level="error",
    )
    async with processes(settings) as served, Client(served.settings.address) as client:
        report = await measure(client, work) | {"peak_bytes": peak_bytes(served)}
    with clocked() as clocks:
        local = LocalGroup(model, world, transport="ucx", dtype="f32", context=CONTEXT, parallel=LANES, memory_bytes=MEMORY)
        async with local:
            report["rounds"] = {
                str(streams): await shares(local.client, clocks, work.decode_prompts[:streams], work.decode_tokens)
                for streams in work.streams
            }
    return report


def group_alone(model: Path, world: int, work: Job, directory: Path) -> dict[str, Any]:
    """The same in a process of its own: gRPC does not bear that a process which has used it forks others."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_group, model, world, work, directory).result()


def run_group(*arguments: Any) -> dict[str, Any]:
    logs.configure("error")
    return asyncio.run(group(*arguments))


def peer(python: Path, model: Path, work: Job, threads: int | None) -> dict[str, Any]:
    """The peer's report; `threads` None: as many as torch takes by itself."""
    message = json.dumps(dataclasses.asdict(work) | {"model": str(model), "threads": threads})
    command = [str(python), str(Path(__file__).with_name("cpu_peer.py"))]
    done = subprocess.run(command, input=message, capture_output=True, text=True, timeout=PEER_SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]}: the peer failed:\n{done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


# ---- the report --------------------------------------------------------------------------------------------------------


def rates(report: dict[str, Any]) -> Table:
    """Tokens a second of every run, and each group's ratio to each run of the peer."""
    groups, peers = report["groups"], report["peers"]
    table = Table(title="tokens a second", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    names = [f"W={world}" for world in groups] + [f"peer, {name}" for name in peers]
    for name in [*names, *(f"W={world} / {name}" for world in groups for name in peers)]:
        table.add_column(name, justify="right")
    kinds = {"prefill": "a prompt of {} tokens", "decode": "decode, streams: {}"}
    for kind, label in kinds.items():
        key = f"{kind}_tokens_per_second"
        for size in next(iter(groups.values()))[key]:
            ours = [one[key][size] for one in groups.values()]
            theirs = [one[key][size] for one in peers.values()]
            ratios = [f"{mine / other:.2f} x" for mine in ours for other in theirs]
            table.add_row(label.format(size), *(f"{rate:,.1f}" for rate in ours + theirs), *ratios)
    return table


def rounds(report: dict[str, Any]) -> Table:
    table = Table(title="where the time of a decode round goes", box=box.SIMPLE_HEAD)
    parts = ("compute", "exchange", "pipe", "grpc and router")
    for name in ("", "a round", *parts, "outside compute"):
        table.add_column(name, justify="right", no_wrap=True)
    for world, one in report["groups"].items():
        for streams, entry in one["rounds"].items():
            share = entry["shares"]
            cells = [f"{share.get(part, 0.0):.1%}" for part in parts]
            outside = f"{1 - share['compute']:.1%}"
            table.add_row(f"W={world}, streams: {streams}", f"{entry['seconds_a_round'] * 1e3:.2f} ms", *cells, outside)
    return table


def gaps(report: dict[str, Any]) -> Table:
    table = Table(title="gaps between tokens of 4 streams, ms", box=box.SIMPLE_HEAD)
    for name in ("", "p50", "p90", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for world, one in report["groups"].items():
        for key, label in (
            ("gap_seconds_alone", "alone"),
            ("gap_seconds_beside_a_prompt", f"beside a prompt of {PREFILL[-1]:,}"),
        ):
            times = one[key] or {}
            table.add_row(f"W={world}, {label}", *(f"{times.get(q, float('nan')) * 1e3:,.1f}" for q in ("p50", "p90", "max")))
    return table


def memory(report: dict[str, Any]) -> Table:
    table = Table(title="most memory resident, MiB", box=box.SIMPLE_HEAD)
    table.add_column("process", no_wrap=True)
    table.add_column("", justify="right")
    for world, one in report["groups"].items():
        for name, size in one["peak_bytes"].items():
            table.add_row(f"W={world}, {name}", f"{size / 2**20:,.0f}")
    for name, one in report["peers"].items():
        table.add_row(f"peer, {name}", f"{one['peak_bytes'] / 2**20:,.0f}")
    return table


def agreed(report: dict[str, Any]) -> dict[str, int]:
    """How many tokens of the first greedy reply each run has in common with the first group's, from the start."""
    runs = {f"W={world}": one["reply"] for world, one in report["groups"].items()}
    runs |= {f"peer, {name}": one["reply"] for name, one in report["peers"].items()}
    first = next(iter(runs.values()))
    equal = {}
    for name, reply in runs.items():
        same = [mine == other for mine, other in zip(first, reply, strict=True)]
        equal[name] = same.index(False) if False in same else len(same)
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, help="a Python with torch and transformers; without it, no peer")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="world sizes (default 1 2)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="before decoding (default 64)")
    parser.add_argument("--decode-tokens", type=int, default=128, help="of each stream (default 128)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "cpu.json")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "cpu", "machine": machine(), "groups": {}, "peers": {}}
    with tempfile.TemporaryDirectory(prefix="latentpool-bench-") as name:
        directory = Path(name)
        model = directory / "model"
        maker = [sys.executable, str(ROOT / "tools" / "make_checkpoint.py"), str(model), "--preset", "bench"]
        report["checkpoint"] = (
            subprocess.run(maker, check=True, capture_output=True, text=True).stdout.split(": ", 1)[1].strip()
        )
        work = job(Geometry.from_file(model).vocab, arguments.prompt_tokens, arguments.decode_tokens, arguments.repeats)
        report["settings"] = {"dtype": "f32", "context": CONTEXT, "lanes": LANES, "memory_bytes": MEMORY} | {
            key: getattr(arguments, key) for key in ("prompt_tokens", "decode_tokens", "repeats")
        }
        for index, world in enumerate(arguments.ranks):
            # Between the groups, so that a host that changes its speed meets both sides.
            if arguments.peer_python and index < 2:
                threads = 1 if index == 0 else None
                print(f"peer with {threads or 'its default number of'} thread(s) ...", file=sys.stderr, flush=True)
                one = peer(arguments.peer_python, model, work, threads)
                report["peers"][f"{one['threads']} thread" + "s" * (one["threads"] > 1)] = one
            print(f"group of {world} ...", file=sys.stderr, flush=True)
            report["groups"][str(world)] = group_alone(model, world, work, directory)
    report["equal_greedy_tokens"] = agreed(report)
    console = Console(width=150, highlight=False)
    for table in (rates(report), rounds(report), gaps(report), memory(report)):
        console.print(table)
    if not report["peers"]:
        console.print("no peer was measured: give --peer-python (see benchmarks/README.md)")
    equal = ", ".join(f"{run} {count}" for run, count in report["equal_greedy_tokens"].items())
    console.print(f"first greedy reply, tokens equal to the first group's from the start, of {work.decode_tokens}: {equal}")
    for one in (*report["groups"].values(), *report["peers"].values()):
        del one["reply"]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
