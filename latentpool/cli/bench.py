"""`latentpool bench`: load on a group, and what its clients saw."""

from __future__ import annotations

import asyncio
import dataclasses
import json as json_text
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from latentpool import logs
from latentpool.cli.calls import as_dict, in_words
from latentpool.cli.load import Load, Workload, summary
from latentpool.cli.machine import machine
from latentpool.cli.options import FAILED, INTERRUPTED, takes
from latentpool.cli.services import served_kv_cache
from latentpool.client import Client
from latentpool.config import Settings
from latentpool.errors import ConfigError

_GROUP = (
    "ranks",
    "kv_pages",
    "split",
    "borrow",
    "dtype",
    "kv_cache",
    "transport",
    "page_rows",
    "chunk_rows",
    "staging_rows",
    "audit",
    "context",
    "parallel",
)
_MOST_REQUESTS = 100_000
_TICK = 0.5


@takes("address", *_GROUP, "memory", "temperature", "log_level", defaults={"parallel": 8, "log_level": "error"})
def bench(
    settings: Settings,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="Load a temporary group of this checkpoint instead.", show_default=False),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="X", help="Open loop: X requests arrive a second, whatever runs.", show_default=False),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", min=1, max=4096, metavar="N", help="Closed loop: N requests at any time (4)."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, max=_MOST_REQUESTS, metavar="N", help="Requests in all.")] = 32,
    seconds: Annotated[float, typer.Option(min=0.1, max=86_400, metavar="S", help="Ends after so long at the latest.")] = 60.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Median length of a prompt.")] = 256,
    reply_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Median length of a reply.")] = 64,
    spread: Annotated[
        float, typer.Option(min=0.0, max=4.0, metavar="X", help="Deviation of a length's logarithm; 0: all are equal.")
    ] = 0.7,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, metavar="N", help="Same seed, same requests.")] = 0,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Also write the report to a file.", show_default=False)
    ] = None,
) -> None:
    """Puts load on a running group, or on a temporary one (--model), and tells what its clients saw.

    \b
    latentpool bench --concurrency 8 --requests 100
    latentpool bench --rate 2.5 --seconds 120 --prompt-tokens 1000 --reply-tokens 200 --json load.json
    latentpool bench --model DIR --ranks 2 --parallel 4

    Lengths are log-normal, cut to the group's context where they are longer. Replies run to their drawn length, whatever the
    model says. Times count from when a request was due. Ctrl-C ends the load early and reports what there is. A temporary
    group shares this process with the load, which costs it a little.
    """
    if rate is not None and concurrency is not None:
        raise ConfigError("--rate is an open loop and --concurrency a closed one: give one of them")
    if rate is not None and not 0 < rate <= 10_000:
        raise ConfigError(f"--rate {rate:g}: above 0, to 10,000 requests a second")
    if json is not None and not json.absolute().parent.is_dir():
        raise ConfigError(f"--json {json}: there is no folder {json.parent} to write it to")
    logs.configure(settings.log_level)
    workload = Workload(
        requests, prompt_tokens, reply_tokens, spread, seed, rate=rate, concurrency=concurrency or 4,
        temperature=settings.temperature,
    )  # fmt: skip
    report = asyncio.run(_temporary(settings, model, workload, seconds) if model else _running(settings, workload, seconds))
    if json is not None:
        _write(json, report)
    Console().print(picture(report["results"]))
    if report["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if not report["results"]["requests"]["finished"]:
        raise typer.Exit(FAILED)


async def _running(settings: Settings, workload: Workload, seconds: float) -> dict[str, Any]:
    with in_words("router", settings.address, "--address"):
        async with Client(settings.address) as client:
            return await _load(client, workload, seconds)


async def _temporary(settings: Settings, model: Path, workload: Workload, seconds: float) -> dict[str, Any]:
    from latentpool.cli.group import LocalGroup
    from services.rank_worker.memory import default_budget

    stated = {name: getattr(settings, name) for name in _GROUP if name != "ranks"}
    stated["kv_cache"] = served_kv_cache(settings)
    memory = settings.memory or default_budget() // settings.ranks
    async with LocalGroup(model, settings.ranks, memory_bytes=memory, **stated) as group:
        return await _load(group.client, workload, seconds)


async def _load(client: Client, workload: Workload, seconds: float) -> dict[str, Any]:
    """Runs the load to its end, or to SIGINT; the whole report."""
    model = await client.get_model(timeout=10.0)
    facts = machine()
    load = Load(client, workload)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    showing = asyncio.create_task(_show(load, workload.requests))
    try:
        await load.run(model.vocab_size, model.context, seconds, stop)
    finally:
        showing.cancel()
        await asyncio.wait({showing})
        loop.remove_signal_handler(signal.SIGINT)
    return {
        "benchmark": "load",
        "machine": facts,
        "group": as_dict(model),
        "workload": dataclasses.asdict(workload) | {"seconds": seconds},
        "interrupted": stop.is_set(),
        "results": summary(load.traces, load.seconds),
    }


async def _show(load: Load, requests: int) -> None:
    """On a terminal, how far the load is."""
    with Console(stderr=True).status("sending requests") as status:
        while True:
            ended = sum(trace.finished is not None or bool(trace.error) for trace in load.traces)
            sent = len(load.traces)
            status.update(f"{sent:,} of {requests:,} requests sent, {sent - ended:,} running, {ended:,} ended")
            await asyncio.sleep(_TICK)


def picture(results: dict[str, Any]) -> Group:
    """A table of times, then totals, then the errors if there are any."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("time", no_wrap=True)
    for name in ("p50", "p90", "p99", "max", "unit"):
        table.add_column(name, justify="left" if name == "unit" else "right", no_wrap=True)
    rows = {
        "to the first token": ("first_token_seconds", 1e3, "ms"),
        "between tokens": ("gap_seconds", 1e3, "ms"),
        "in the queue": ("queued_seconds", 1e3, "ms"),
        "whole request": ("request_seconds", 1.0, "s"),
    }
    for label, (key, scale, unit) in rows.items():
        times = results[key]
        cells = [f"{times[name] * scale:,.2f}" if times else "-" for name in ("p50", "p90", "p99", "max")]
        table.add_row(label, *cells, unit)
    notes = [Text(line, "yellow") for line in _notes(results)]
    return Group(table, Text("\n".join(_totals(results))), *notes, *(Text(line, "red") for line in _errors(results)))


def _totals(results: dict[str, Any]) -> list[str]:
    requests = results["requests"]
    return [
        f"{requests['sent']:,} requests in {results['seconds']:.1f} s: {requests['finished']:,} finished "
        f"({results['requests_per_second']:.2f} a second), {requests['failed']:,} failed, "
        f"{requests['unfinished']:,} cut off; {requests['parked']:,} were parked, {results['times_parked']:,} times in all; "
        f"carried to another owner {results['times_carried']:,} times",
        f"{results['prompt_tokens']:,} prompt tokens, {results['reply_tokens']:,} reply tokens: "
        f"{results['reply_tokens_per_second']:,.1f} reply tokens a second",
    ]


def _notes(results: dict[str, Any]) -> list[str]:
    cut, sent = results["requests"]["cut_to_context"], results["requests"]["sent"]
    if not cut:
        return []
    drawn = f"{cut:,} of {sent:,} requests were drawn longer than the group's context and cut to it"
    return [f"note: {drawn}: see --prompt-tokens, --reply-tokens and --spread"]


def _errors(results: dict[str, Any]) -> list[str]:
    return [f"{count:,} x {message}" for message, count in results["errors"].items()]


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json_text.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None
