"""What the split gives and costs on this host's CPUs, beside keeping every row on every rank: `python benchmarks/split.py`.

The checkpoint is that of cpu.py (12 layers, hidden 256), made on the fly and computed in float32 over UCX. Groups that are
compared live at the same time and are measured in turn; rates are medians of the repeats. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import split_tables
from cpu_group import Stream, prefill_seconds
from rich.console import Console
from split_group import Answer, Journal, journal, link_figures, page_bytes, sent_bytes

from latentpool import logs
from latentpool.cli.group import LocalGroup
from latentpool.cli.load import spread
from latentpool.cli.machine import machine
from latentpool.client import AdminClient
from latentpool.config import Switch
from latentpool.geometry import Geometry
from latentpool.v1 import pool_admin_pb2
from services.pool_manager.plan import Plan, plan
from services.rank_worker import frames

ROOT = Path(__file__).resolve().parent.parent
REAL = ROOT / "tests" / "data" / "glm-5.3-flash"
GIB, MIB = float(1 << 30), 1 << 20
LAYOUTS = [
    (2, 15.2, 1 << 20, 8, 180.0),
    (3, 37.62, 1 << 20, 8, 106.7),
    (4, 37.62, 1 << 20, 8, 75.0),
    (2, 9.5, 1 << 17, 4, 180.0),
    (4, 9.5, 1 << 17, 4, 75.0),
]
"""World, GiB of room a rank, context, lanes, MiB a lane: the first two and the fourth are golden cases of the design."""

USE_LANES, USE_PAGE_ROWS, USE_CONTEXT = 48, 64, 512
USE_PROMPT, USE_REPLY = 192, 192
USE_PAGES = 72
"""Pages a rank where it keeps all rows; the same bytes are given where it does not."""

DECODE_PROMPT = 512
"""Longer than a selection of the small model (259 rows), so that lists are sparse."""
CONTEXT, LANES, MEMORY = 20480, 20, 1 << 30
SMALL: dict[str, Any] = {
    "transport": "ucx", "dtype": "f32", "context": CONTEXT, "parallel": LANES, "memory_bytes": MEMORY,
    "cache_bytes": 0,  # a prompt is computed each time, and all pages come back
}  # fmt: skip
SETTLED = 24
SIDES: dict[str, Switch] = {"replicated": "off", "split": "on"}


def say(text: str) -> None:
    print(f"{time.perf_counter() - _begun:6.1f} s  {text}", file=sys.stderr, flush=True)


_begun = time.perf_counter()


def prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [[int(token) for token in draw.integers(0, vocab // 2, length)] for _ in range(count)]


# ---- tokens held -------------------------------------------------------------------------------------------------------


def layouts() -> list[dict[str, Any]]:
    """The real model's plans: bf16, no cache."""
    geometry = Geometry.from_file(REAL)
    rows = []
    for world, room, context, lanes, fixed in LAYOUTS:
        kept, split = (
            plan([int(room * GIB)] * world, context, lanes, 0, geometry, world, "pages", on, [int(fixed * MIB)] * world, "bf16")
            for on in (False, True)
        )
        rows.append(
            {"world": world, "room_bytes": int(room * GIB), "context": context, "lanes": lanes, "fixed_bytes": int(fixed * MIB)}
            | {"replicated": _layout(kept), "split": _layout(split), "ratio": split.stream_tokens / kept.stream_tokens}
        )
    return rows


def _layout(made: Plan) -> dict[str, Any]:
    return {
        "tokens": made.stream_tokens,
        "whole_conversations": min(made.lanes, made.owner_pages // made.window_pages * made.residues),
        "bytes_a_token": made.ledgers[0].page_bytes / made.residues / made.page_rows,
    }


async def use(model: Path, world: int, split: Switch) -> dict[str, Any]:
    """Conversations arrive until the first has to wait for pages; then all that run at once are counted."""
    geometry = Geometry.from_file(model).without_drafts()
    arena = USE_PAGES * USE_PAGE_ROWS * geometry.row_bytes("f32")
    todo = prompts(USE_LANES, USE_PROMPT, geometry.vocab)
    group = LocalGroup(
        model, world, transport="ucx", dtype="f32", context=USE_CONTEXT, parallel=USE_LANES, page_rows=USE_PAGE_ROWS,
        split=split, memory_bytes=MEMORY, cache_bytes=0,
    )  # fmt: skip
    with page_bytes(arena):
        async with group, AdminClient(group.manager.address) as admin:
            streams: list[Stream] = []
            waiting, begun = False, time.perf_counter()
            while not waiting and len(streams) < USE_LANES:
                streams.append(Stream(group.client, todo[len(streams)], USE_REPLY))
                waiting = await _waits(admin, len(streams))
            running = streams[: len(streams) - waiting]
            await asyncio.gather(*(stream.until(1) for stream in running))
            _going(running)
            held = {
                "page_tokens": (await admin.get_plan()).pages * USE_PAGE_ROWS,
                "arena_bytes_a_rank": arena,
                "at_once": len(running),
                "tokens_reserved": len(running) * (USE_PROMPT + USE_REPLY),
                "tokens": sum(USE_PROMPT + len(stream.ids) for stream in running),
                "filled_in_seconds": time.perf_counter() - begun,
            }
            await asyncio.gather(*(stream.cancel() for stream in streams))
    if not waiting:
        raise SystemExit(f"W={world}, split {split}: {USE_LANES} conversations fit, so nobody had to wait")
    return held


async def _waits(admin: AdminClient, count: int) -> bool:
    """Whether one of so many conversations waits although nothing is lent and nothing is on its way back."""
    while True:
        listed = await admin.list_conversations()
        waiting = any(one.state == pool_admin_pb2.CONVERSATION_STATE_WAITING for one in listed)
        if len(listed) == count and not waiting:
            return False
        kinds = {run.kind for run in (await admin.list_pages()).runs}
        if waiting and not kinds & {pool_admin_pb2.PAGE_KIND_BORROWED, pool_admin_pb2.PAGE_KIND_FENCED}:
            return any(one.state == pool_admin_pb2.CONVERSATION_STATE_WAITING for one in await admin.list_conversations())
        await asyncio.sleep(0.005)


# ---- speed -------------------------------------------------------------------------------------------------------------


async def decode(group: LocalGroup, kept: Journal, todo: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Rate while so many streams decode and nothing else happens, and the engines' rounds then."""
    streams = [Stream(group.client, prompt, DECODE_PROMPT + 4 * SETTLED + 8 * tokens) for prompt in todo]
    try:
        await asyncio.gather(*(stream.until(1) for stream in streams))
        begin = time.perf_counter()
        wanted = len(streams[0].ids) + tokens
        await streams[0].until(wanted)
        end = time.perf_counter()
        _going(streams)
        count = sum(begin < moment <= end for stream in streams for moment in stream.times)
        ranks = [[one for one in rank if one.decodes(len(todo))] for rank in kept.of(group, begin)]
    finally:
        await asyncio.gather(*(stream.cancel() for stream in streams))
    await _idle(group)
    return {"rate": count / (end - begin), "ranks": ranks}


def _going(streams: Sequence[Stream]) -> None:
    """Raises what a stream failed with, or SystemExit if one ended before it was measured."""
    for stream in streams:
        if stream.task.done():
            stream.task.result()
            raise SystemExit(f"a stream ended after {len(stream.ids)} tokens, before it was measured: give it more")


async def _idle(group: LocalGroup) -> None:
    """Until nothing runs and every page is free again."""
    async with AdminClient(group.manager.address) as admin:
        while (pages := await admin.list_pages()).free < pages.pages:  # noqa: ASYNC110 - the manager's state
            await asyncio.sleep(0.01)


def rounds(runs: Sequence[dict[str, Any]], streams: int) -> dict[str, Any]:
    """Medians over the rounds of all runs, by rank; bytes a token that all ranks sent together."""
    ranks: list[list[Answer]] = [[one for run in runs for one in run["ranks"][rank]] for rank in range(len(runs[0]["ranks"]))]
    tokens = len(ranks[0]) * streams
    return {
        "rounds": len(ranks[0]),
        "compute_seconds": [statistics.median(one.result.compute_seconds for one in rank) for rank in ranks],
        "exchange_seconds": [statistics.median(one.result.exchange_seconds for one in rank) for rank in ranks],
        "sent_bytes_a_token": {
            kind: count / tokens for kind, count in sent_bytes(one for rank in ranks for one in rank).items()
        },
    }


async def prefill(group: LocalGroup, kept: Journal, prompt: list[int]) -> dict[str, Any]:
    """Seconds to the first token, the modes of the chunks, and latent rows that crossed the link."""
    begin = time.perf_counter()
    seconds = await prefill_seconds(group.client, prompt)
    await _idle(group)
    ranks = kept.of(group, begin)
    chunks = [one for answer in ranks[0] for one in answer.operations if isinstance(one, frames.Prompt)]
    return {
        "seconds": seconds,
        "modes": sorted({chunk.mode for chunk in chunks}),
        "rows_bytes": sent_bytes(answer for rank in ranks for answer in rank).get("rows", 0),
    }


async def speed(groups: dict[str, LocalGroup], kept: Journal, vocab: int, scale: argparse.Namespace) -> dict[str, Any]:
    """Every repeat measures all groups in turn, so that a host that changes its speed meets all alike."""
    short = prompts(max(scale.streams), DECODE_PROMPT, vocab)
    fills = {str(length): prompts(1, length, vocab, seed=1)[0] for length in scale.prefill}
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for name in groups:
        await prefill(groups[name], kept, short[0])
    for turn in range(scale.repeats):
        for length, prompt in fills.items():
            say(f"repeat {turn + 1} of {scale.repeats}: a prompt of {length} tokens")
            for name in _rotated(list(groups), turn):
                runs.setdefault(("prefill", name, length), []).append(await prefill(groups[name], kept, prompt))
        for streams in scale.streams:
            say(f"repeat {turn + 1} of {scale.repeats}: {streams} streams decode")
            for name in _rotated(list(SIDES), turn):
                one = await decode(groups[name], kept, short[:streams], scale.decode_tokens)
                runs.setdefault(("decode", name, str(streams)), []).append(one)
    result: dict[str, Any] = {"decode": {}, "prefill": {}}
    for (kind, name, size), of in runs.items():
        entry = result[kind].setdefault(name, {})
        if kind == "decode":
            rate = statistics.median(run["rate"] for run in of)
            entry[size] = {"tokens_per_second": rate, "runs": [run["rate"] for run in of]} | rounds(of, int(size))
        else:
            rates = [int(size) / run["seconds"] for run in of]
            entry[size] = {"tokens_per_second": statistics.median(rates), "runs": rates} | {
                key: of[-1][key] for key in ("modes", "rows_bytes")
            }
    return result


def _rotated(names: list[str], turn: int) -> list[str]:
    return names[turn % len(names) :] + names[: turn % len(names)]


# ---- carry -------------------------------------------------------------------------------------------------------------


async def carry(group: LocalGroup, kept: Journal, vocab: int, rows: int, times: int) -> dict[str, Any]:
    """A long conversation moves to and fro, alone and beside a stream that decodes."""
    result: dict[str, Any] = {}
    async with AdminClient(group.manager.address) as admin:
        moved = Stream(group.client, prompts(1, rows, vocab, seed=2)[0], CONTEXT - rows)
        await moved.until(2)
        listed = await admin.list_conversations()
        name = next(one.conversation for one in listed if one.prompt_tokens == rows)
        result["alone"] = [await _carried(admin, group, kept, name, None) for _ in range(times)]
        other = Stream(group.client, prompts(1, DECODE_PROMPT, vocab, seed=3)[0], CONTEXT - DECODE_PROMPT)
        await other.until(SETTLED)
        begin = time.perf_counter()
        await other.until(len(other.ids) + SETTLED)
        result["gap_seconds_before"] = spread(other.gaps(begin, time.perf_counter()))
        result["beside_a_stream"] = [await _carried(admin, group, kept, name, other) for _ in range(times)]
        _going([moved, other])
        await asyncio.gather(moved.cancel(), other.cancel())
    await _idle(group)
    return result


async def _carried(admin: AdminClient, group: LocalGroup, kept: Journal, name: int, other: Stream | None) -> dict[str, Any]:
    begin = time.perf_counter()
    answer = await admin.carry(name)
    end = time.perf_counter()
    ranks = [[one for one in rank if one.has(frames.Carry)] for rank in kept.of(group, begin)]
    moved = sent_bytes(one for rank in ranks for one in rank)["carries"]
    run = {
        "seconds": answer.seconds,
        "bytes": moved,
        "rounds": len(ranks[0]),
        "engine_seconds": [sum(one.seconds for one in rank) for rank in ranks],
        "exchange_seconds": [sum(one.result.exchange_seconds for one in rank) for rank in ranks],
    }
    if other is not None:
        await other.until(len(other.ids) + SETTLED)
        run["longest_gap_seconds"] = max(other.gaps(begin - 1.0, end + 1.0))
    return run


# ---- where the time goes -----------------------------------------------------------------------------------------------


async def attention(model: Path, kept: Journal, directory: Path, scale: argparse.Namespace) -> dict[str, Any]:
    """Microseconds a latent layer of a decode round's attention, by part, of engines that read a clock between the parts."""
    os.environ["SPLIT_TIMES"] = str(directory)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    todo = prompts(max(scale.streams), DECODE_PROMPT, Geometry.from_file(model).vocab)
    result: dict[str, Any] = {}
    for name, split in SIDES.items():
        engines = dict.fromkeys(range(2), "timed_engine")
        async with LocalGroup(model, 2, **SMALL, engines=engines, split=split) as group:
            for streams in scale.streams:
                await decode(group, kept, todo[:streams], scale.decode_tokens)
        for rank in range(2):
            times = json.loads((directory / f"2-{rank}.json").read_text())
            for streams in scale.streams:
                parts = {part: seconds * 1e6 for part, seconds in times[str(streams)].items()}
                result.setdefault(name, {}).setdefault(str(streams), []).append(parts)
    return result


def formulas(model: Path, world: int) -> dict[str, float]:
    """Bytes a decoded token that all ranks send together, and exchanges a round: two of them a latent layer, one a sub-layer
    and one for the embedding and for the samples. The heads divide the world."""
    g = Geometry.from_file(model).without_drafts()
    away = (world - 1) * g.heads // world * g.latent * 4 * g.latent_layers
    return {
        "sums": (2 * len(g.layers) + 1) * world * (world - 1) * g.hidden * 4,
        "queries": away,
        "outputs": away,
        "samples": world * (world - 1) * 16,
        "exchanges_replicated": 2 * len(g.layers) + 2,
        "exchanges_split": 2 * len(g.layers) + 2 + 2 * g.latent_layers,
        "carry_bytes_a_row": g.latent_bytes("f32"),
    }


# ---- the run -----------------------------------------------------------------------------------------------------------


async def measure(model: Path, directory: Path, scale: argparse.Namespace, report: dict[str, Any]) -> None:
    geometry = Geometry.from_file(model).without_drafts()
    report["use"] = []
    for world in scale.worlds:
        row: dict[str, Any] = {"world": world}
        for name, split in SIDES.items():
            say(f"filling a group of {world}, {name}")
            row[name] = await use(model, world, split)
        report["use"].append(row)
    with journal() as kept:
        async with AsyncExitStack() as stack:
            say("starting three groups of 2")
            groups = {}
            for name, choices in (
                ("replicated", {"split": "off"}),
                ("split", {"split": "on"}),
                ("split, no borrowing", {"split": "on", "borrow": False}),
            ):
                groups[name] = await stack.enter_async_context(LocalGroup(model, 2, **SMALL, **choices))
            report["speed"] = await speed(groups, kept, geometry.vocab, scale)
            say(f"carrying {scale.carried_rows} rows to and fro")
            report["carry"] = await carry(groups["split"], kept, geometry.vocab, scale.carried_rows, 2 * scale.repeats)
        say("where a decode round's attention spends its time")
        report["attention_us_a_layer"] = await attention(model, kept, directory, scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4], help="groups that are filled (default 2 3 4)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="that decode at once (default 1 4 16)")
    parser.add_argument(
        "--prefill", type=int, nargs="+", default=[512, 1536, 4608], help="prompt tokens (default 512 1536 4608)"
    )
    parser.add_argument("--carried-rows", type=int, default=16384, help="of the conversation that is carried (default 16384)")
    parser.add_argument("--decode-tokens", type=int, default=64, help="of each stream, counted (default 64)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "split.json")
    arguments = parser.parse_args()
    logs.configure("error")
    report: dict[str, Any] = {"benchmark": "split", "machine": machine(), "layout": layouts()}
    with tempfile.TemporaryDirectory(prefix="latentpool-bench-") as name:
        model = Path(name) / "model"
        maker = [sys.executable, str(ROOT / "tools" / "make_checkpoint.py"), str(model), "--preset", "bench"]
        made = subprocess.run(maker, check=True, capture_output=True, text=True)
        report["checkpoint"] = made.stdout.split(": ", 1)[1].strip()
        geometry = Geometry.from_file(model)
        say("the bare link")
        report["formulas"] = formulas(model, 2)
        report["link"] = link_figures(geometry.latent, [1024 * streams for streams in arguments.streams])
        asyncio.run(measure(model, Path(name), arguments, report))
    chosen = {key: value for key, value in vars(arguments).items() if key != "json"}
    report["settings"] = {"dtype": "f32", "context": CONTEXT, "lanes": LANES, "memory_bytes": MEMORY} | chosen
    report["seconds"] = time.perf_counter() - _begun
    console = Console(width=150, highlight=False)
    for table in split_tables.tables(report):
        console.print(table)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"{report['seconds']:.0f} s, written to {arguments.json}")


if __name__ == "__main__":
    main()
