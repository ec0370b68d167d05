"""What kept prompts give and cost on this host's CPUs: `python benchmarks/resume.py`.

The checkpoint is that of cpu.py (12 layers, hidden 256), made on the fly and computed in float32 by groups of 2 that split the
latent rows over UCX. What is compared is measured in turn; times are medians of the repeats. A trace of agents is played to
engines that compute nothing (agent_trace.py). See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import agent_trace
import numpy as np
from cpu_group import Clock, clocked, prefill_seconds
from rich import box
from rich.console import Console
from rich.table import Table
from split_group import link_figures

from kernels.numpy import NumpyKernels
from latentpool import logs
from latentpool.cli.group import LocalGroup
from latentpool.cli.machine import machine
from latentpool.client import AdminClient
from latentpool.geometry import BLOCK, Geometry
from services.pool_manager.kept import fixed_pages
from services.pool_manager.leases import Leases
from services.rank_worker import frames
from services.rank_worker.arena import Arena
from services.rank_worker.kept import Inventory

ROOT = Path(__file__).resolve().parent.parent
WORLD, PAGE_ROWS, CONTEXT, LANES, MEMORY = 2, 512, 20480, 2, 1 << 30
KEEP_FROM = CARRY_FROM = 256
COST_TOKENS = 4096


def say(text: str) -> None:
    print(f"{time.perf_counter() - _begun:6.1f} s  {text}", file=sys.stderr, flush=True)


_begun = time.perf_counter()


def prompts(vocab: int, seed: int = 0) -> Callable[[int], list[int]]:
    """Draws prompts of so many tokens, never the same twice."""
    draw = np.random.default_rng(seed)
    return lambda length: [int(token) for token in draw.integers(0, vocab // 2, length)]


# ---- the first token ---------------------------------------------------------------------------------------------------


def leases(group: LocalGroup) -> Leases:
    """The books of a group whose pool manager is in this process."""
    router: Any = group.manager._router
    found: Leases = router.session.leases
    return found


async def settle(group: LocalGroup) -> None:
    """Until nothing runs and nothing is on its way back."""
    while not leases(group).idle:  # noqa: ASYNC110 - the manager's state
        await asyncio.sleep(0.01)


async def first_token(group: LocalGroup, clocks: dict[Any, Clock], prompt: list[int]) -> dict[str, Any]:
    """Seconds from the request to its one token: all, and what the slower engine says it computed and exchanged."""
    mine = [clocks[worker._engine] for worker in group.workers]
    for clock in mine:
        clock.seconds.clear()
        clock.rounds, clock.answered = 0, time.perf_counter()
    seconds = await prefill_seconds(group.client, prompt)
    engine = max(clock.seconds["compute"] + clock.seconds["exchange"] for clock in mine)
    rounds = max(clock.rounds for clock in mine)
    await settle(group)
    return {"seconds": seconds, "engine_seconds": engine, "rounds": rounds}


async def carried(group: LocalGroup, clocks: dict[Any, Clock], prompt: list[int]) -> dict[str, Any]:
    """As `first_token`, of a prompt that is kept, while its owner has no free page: the other rank resumes it."""
    books = leases(group)
    (state,) = [one for one in books.kept.lasting if one.at == (len(prompt) - 1) // BLOCK * BLOCK]
    before = books.kept.counts.carried_hits
    taken = books.books.take(state.owner, books.books.free(state.owner))
    run = await first_token(group, clocks, prompt)
    books.books.give_back(taken, 0)
    if books.kept.counts.carried_hits != before + 1:
        raise SystemExit(f"a prompt of {len(prompt)} tokens was not carried")
    return run | {"rows": state.at}


async def resumed(group: LocalGroup, clocks: dict[Any, Clock], prompt: list[int]) -> dict[str, Any]:
    hits = leases(group).kept.counts.hits
    run = await first_token(group, clocks, prompt)
    if leases(group).kept.counts.hits != hits + 1:
        raise SystemExit(f"a prompt of {len(prompt)} tokens was not resumed")
    return run


async def first_tokens(
    group: LocalGroup, plain: LocalGroup, clocks: dict[Any, Clock], vocab: int, scale: argparse.Namespace
) -> dict[str, Any]:
    """Runs by kind and length; and the states that the group kept of each length."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {"block": {}, "fresh": {}, "resumed": {}, "carried": {}, "unkept": {}}
    draw = prompts(vocab)
    states: dict[str, Any] = {}

    def add(kind: str, length: int, run: dict[str, Any]) -> None:
        runs[kind].setdefault(str(length), []).append(run)

    async with AdminClient(group.manager.address) as admin:
        for one in (group, plain):
            await first_token(one, clocks, draw(BLOCK))
        for turn in range(scale.repeats):
            for length in scale.lengths:
                add("block", BLOCK, await first_token(group, clocks, draw(BLOCK)))
                say(f"repeat {turn + 1} of {scale.repeats}: a prompt of {length} tokens, fresh, resumed and carried")
                prompt = draw(length)
                add("fresh", length, await first_token(group, clocks, prompt))
                (kept,) = (await admin.list_kept()).kept
                states[str(length)] = {"at": kept.at, "row_pages": kept.row_pages, "bytes": kept.bytes}
                states[str(length)]["fixed_pages"] = kept.fixed_pages
                add("resumed", length, await resumed(group, clocks, prompt))
                add("carried", length, await carried(group, clocks, prompt))
                await admin.evict()
                await asyncio.sleep(0.1)
                await settle(group)
        for turn in range(2 * scale.repeats):
            say(f"{turn + 1} of {2 * scale.repeats}: {COST_TOKENS} tokens, kept and not kept")
            prompt = draw(COST_TOKENS)
            for kind in ("kept", "unkept")[:: 1 - 2 * (turn % 2)]:
                one = group if kind == "kept" else plain
                runs.setdefault(kind, {}).setdefault(str(COST_TOKENS), []).append(await first_token(one, clocks, prompt))
            await admin.evict()
            await asyncio.sleep(0.1)
            await settle(group)
    return {"runs": runs, "states": states}


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]} | {"runs": [run["seconds"] for run in runs]}


# ---- keeping, in the engine --------------------------------------------------------------------------------------------


def copies(geometry: Geometry) -> dict[str, Any]:
    """Seconds that one rank's engine takes to keep a state and to resume it, by rows in its partly filled page, medians; and
    those of copying as many bytes once."""
    kernels = NumpyKernels("f32")
    arena = Arena(
        geometry, kernels, "f32", world=WORLD, rank=0, pages=64, lanes=2, context=8 * PAGE_ROWS, page_rows=PAGE_ROWS, split=True
    )
    share = fixed_pages(geometry, WORLD, "f32", "f32", PAGE_ROWS)
    fixed = [2 * page + rank for rank in range(WORLD) for page in range(8, 8 + share)]
    arena.states[...] = 1.0
    arena.clear(0, 0)
    arena.map(0, 0, [0, 2, 4, 6])
    result: dict[str, Any] = {"fixed_bytes": geometry.kept_bytes(WORLD, 0, "f32")}
    result["page_bytes"] = arena.latent[0].nbytes + arena.index[0].nbytes
    for rows in (0, PAGE_ROWS - BLOCK):
        at = PAGE_ROWS + rows
        inventory = Inventory(kernels, arena, "key", audit=False)
        arena.clear(1, 0)
        arena.map(1, 0, [0, 12, 14])
        keeps, resumes = [], []
        for state in range(200):
            begun = time.perf_counter()
            inventory.keep(frames.Keep(0, state, at, fixed), 0)
            kept = time.perf_counter()
            inventory.resume(frames.Resume(1, state, at), 2)
            resumes.append(time.perf_counter() - kept)
            keeps.append(kept - begun)
            inventory.forget(frames.Forget([state]))
        result["keep_seconds"] = statistics.median(keeps)
        result["resume_partial_seconds" if rows else "resume_seconds"] = statistics.median(resumes)
    result["memcpy_seconds"] = _memcpy(result["fixed_bytes"])
    result["memcpy_partial_seconds"] = _memcpy(result["fixed_bytes"] + result["page_bytes"])
    return result


def _memcpy(count: int) -> float:
    source, target = np.ones(count, np.uint8), np.zeros(count, np.uint8)
    times = []
    for _ in range(200):
        begun = time.perf_counter()
        target[...] = source
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


# ---- the report --------------------------------------------------------------------------------------------------------


def digest(report: dict[str, Any], geometry: Geometry) -> dict[str, Any]:
    """Medians, floors and ratios from the runs. The floor of a resumed prompt is one block without history and what resuming
    copies; that of a carried one has the rows' bytes at the link's rate on top."""
    runs, cost = report["first_tokens"]["runs"], report["copies"]
    block = medians(runs["block"][str(BLOCK)])
    lengths = {}
    for length in runs["fresh"]:
        row: dict[str, Any] = {kind: medians(runs[kind][length]) for kind in ("fresh", "resumed", "carried")}
        at = (int(length) - 1) // BLOCK * BLOCK
        copied = cost["resume_partial_seconds" if at % PAGE_ROWS else "resume_seconds"]
        link = at * geometry.latent_bytes("f32") / report["link_bytes_per_second"]
        row["floor_seconds"] = {"resumed": block["engine_seconds"] + copied, "carried": block["engine_seconds"] + copied + link}
        row["link_seconds"] = link
        for kind in ("resumed", "carried"):
            row[f"fresh_by_{kind}"] = row["fresh"]["seconds"] / row[kind]["seconds"]
        lengths[length] = row
    kept, unkept = (medians(runs[kind][str(COST_TOKENS)]) for kind in ("kept", "unkept"))
    pairs = zip(runs["kept"][str(COST_TOKENS)], runs["unkept"][str(COST_TOKENS)], strict=True)
    added = statistics.median(one["seconds"] - other["seconds"] for one, other in pairs)
    return {"block": block, "lengths": lengths, "kept": kept, "unkept": unkept, "keep_adds_seconds": added}


def tables(report: dict[str, Any]) -> Iterator[Table]:
    yield first_token_table(report["medians"])
    yield cost_table(report)
    if report["trace"]:
        yield trace_table(report)


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    return table


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def first_token_table(result: dict[str, Any]) -> Table:
    table = _table("time to the first token, ms", "median", "in the engine", "floor", "median / floor", "fresh / this")
    block = result["block"]
    table.add_row("a block of 64 tokens", ms(block["seconds"]), ms(block["engine_seconds"]), "", "", "")
    for length, row in result["lengths"].items():
        fresh = row["fresh"]
        table.add_row(f"{int(length):,} tokens, fresh", ms(fresh["seconds"]), ms(fresh["engine_seconds"]), "", "", "")
        for kind, name in (("resumed", "resumed on the owner"), ("carried", "carried, then resumed")):
            one, floor = row[kind], row["floor_seconds"][kind]
            cells = [ms(one["seconds"]), ms(one["engine_seconds"]), ms(floor), f"{one['seconds'] / floor:.2f} x"]
            table.add_row(f"{int(length):,} tokens, {name}", *cells, f"{row[f'fresh_by_{kind}']:.1f} x")
    return table


def cost_table(report: dict[str, Any]) -> Table:
    cost, result = report["copies"], report["medians"]
    table = Table(title="what keeping costs", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right")
    table.add_row(f"a keep in the engine, {cost['fixed_bytes'] / 1024:.0f} KiB a rank", f"{cost['keep_seconds'] * 1e6:.0f} us")
    table.add_row("a resume in the engine, whole pages", f"{cost['resume_seconds'] * 1e6:.0f} us")
    table.add_row("a resume in the engine, partly filled last page", f"{cost['resume_partial_seconds'] * 1e6:.0f} us")
    copied = ", ".join(f"{cost[key] * 1e6:.0f}" for key in ("memcpy_seconds", "memcpy_partial_seconds"))
    table.add_row("copying the bytes once: what is fixed, and with a page", f"{copied} us")
    for length, state in report["first_tokens"]["states"].items():
        holds = f"{state['row_pages']} + {state['fixed_pages']} pages, {state['bytes'] / 2**20:.1f} MiB"
        table.add_row(f"a state of {int(length):,} tokens holds, alone", holds)
    kept, added = result["kept"]["seconds"], result["keep_adds_seconds"]
    fill = f"a fill of {COST_TOKENS:,} tokens, kept / not kept / median difference"
    table.add_row(fill, f"{ms(kept)} / {ms(result['unkept']['seconds'])} / {ms(added)} ms ({added / kept:+.1%})")
    rounds = " / ".join(f"{result[kind]['rounds']:g}" for kind in ("kept", "unkept"))
    table.add_row("rounds until its first token", rounds)
    return table


def trace_table(report: dict[str, Any]) -> Table:
    about = report["trace_summary"]
    title = (
        f"hit rate of an agent trace: {about['requests']} requests, {about['prompt_tokens']:,} prompt tokens, "
        f"{about['ratio']:.0f} for each generated one; ideal {about['ideal_hit_rate']:.1%}"
    )
    table = _table(title, "hit rate", "of the ideal", "kept", "refused", "evicted", "seen, but computed again")
    for run in report["trace"]:
        counts, best = run["counts"], about["ideal_hit_rate"]
        lost = ", ".join(f"{why} {count / about['prompt_tokens']:.1%}" for why, count in run["lost_tokens"].items())
        name = f"{run['pages']:,} pages, replies {'kept' if run['keep_replies'] else 'not kept'}"
        cells = [f"{run['hit_rate']:.1%}", f"{run['hit_rate'] / best:.1%}"]
        cells += [str(counts.get(key, 0)) for key in ("kept", "refused", "evicted_for_pages")]
        table.add_row(name, *cells, lost)
    return table


# ---- the run -----------------------------------------------------------------------------------------------------------


async def measure(model: Path, geometry: Geometry, scale: argparse.Namespace, report: dict[str, Any]) -> None:
    settings: dict[str, Any] = {
        "transport": "ucx", "dtype": "f32", "context": CONTEXT, "parallel": LANES, "memory_bytes": MEMORY, "split": "on",
        "keep_replies": False, "keep_from": KEEP_FROM, "carry_from": CARRY_FROM,
    }  # fmt: skip
    say("starting two groups of 2")
    with clocked() as clocks:
        async with LocalGroup(model, WORLD, **settings) as group, LocalGroup(model, WORLD, cache_bytes=0, **settings) as plain:
            report["first_tokens"] = await first_tokens(group, plain, clocks, geometry.vocab, scale)
    steps = agent_trace.trace(scale.seed)
    report["trace_summary"], report["trace"] = agent_trace.summary(steps), []
    for pages in scale.pages:
        for keep_replies in (True, False):
            say(f"a trace of agents, {pages} pages, replies {'kept' if keep_replies else 'not kept'}")
            report["trace"].append(await agent_trace.play(model, steps, pages, keep_replies))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 4096, 16384], help="of prompts, tokens (default 1024 4096 16384)"
    )
    parser.add_argument(
        "--pages", type=int, nargs="*", default=[2048, 512, 256], help="of 512 rows, both ranks' (default 2048 512 256)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the trace")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "resume.json")
    arguments = parser.parse_args()
    logs.configure("error")
    report: dict[str, Any] = {"benchmark": "resume", "machine": machine()}
    with tempfile.TemporaryDirectory(prefix="latentpool-bench-") as name:
        model = Path(name) / "model"
        maker = [sys.executable, str(ROOT / "tools" / "make_checkpoint.py"), str(model), "--preset", "bench"]
        made = subprocess.run(maker, check=True, capture_output=True, text=True)
        report["checkpoint"] = made.stdout.split(": ", 1)[1].strip()
        geometry = Geometry.from_file(model).without_drafts()
        say("the bare link, and copies")
        report["link_bytes_per_second"] = link_figures(geometry.latent, [])["bytes_per_second"]
        report["copies"] = copies(geometry)
        asyncio.run(measure(model, geometry, arguments, report))
    report["medians"] = digest(report, geometry)
    chosen = {key: value for key, value in vars(arguments).items() if key != "json"}
    fixed = {"dtype": "f32", "context": CONTEXT, "lanes": LANES, "memory_bytes": MEMORY, "page_rows": PAGE_ROWS}
    report["settings"] = fixed | {"keep_from": KEEP_FROM, "carry_from": CARRY_FROM} | chosen
    report["seconds"] = time.perf_counter() - _begun
    console = Console(width=170, highlight=False)
    for table in tables(report):
        console.print(table)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"{report['seconds']:.0f} s, written to {arguments.json}")


if __name__ == "__main__":
    main()
