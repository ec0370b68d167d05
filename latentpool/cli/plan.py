"""`latentpool plan`: the ledger and what fits, from a config.json alone."""

from __future__ import annotations

import dataclasses
import json as json_text

from rich import box
from rich.console import Console
from rich.table import Table

from latentpool.cli.options import Json, takes
from latentpool.config import Settings
from latentpool.geometry import Geometry
from latentpool.units import format_bytes, format_tokens
from services.pool_manager import plan as planner

_SETTINGS = (
    "model",
    "ranks",
    "room",
    "context",
    "parallel",
    "fixed",
    "cache",
    "kv_pages",
    "split",
    "dtype",
    "kv_cache",
    "plan_order",
    "drafts",
    "page_rows",
)


@takes(*_SETTINGS, needs=("model", "room"))
def plan(settings: Settings, json: Json = False) -> None:
    """What a group could serve: tokens, pages, lanes, and where each rank's memory goes. Reads config.json and starts nothing.

    \b
    latentpool plan --model DIR --ranks 2 --room 15.2GiB --context 1M --parallel 8
    latentpool plan --model DIR --ranks 2 --room 9.5GiB --context 128k --split off
    latentpool plan --model DIR --ranks 1 --room 2GiB --json

    Room is what a rank has left after weights, work buffers, links and the first lane's fixed part; `latentpool ranks` shows it
    for a group that runs. What does not fit is refused with numbers and exit code 1.
    """
    result = make_plan(settings)
    if json:
        derived = {"owner_pages": result.owner_pages, "stream_tokens": result.stream_tokens}
        print(json_text.dumps(dataclasses.asdict(result) | derived, indent=2))
    else:
        show(result)


def make_plan(settings: Settings) -> planner.Plan:
    """The plan of these settings. Raises GeometryError and PlanRefusedError."""
    assert settings.model is not None
    assert settings.room is not None
    geometry = Geometry.from_file(settings.model)
    if not settings.drafts:
        geometry = geometry.without_drafts()
    world = settings.ranks
    geometry.check_world(world)
    dtype = settings.dtype or geometry.dtype
    kv_dtype = settings.kv_cache or dtype
    context = settings.context or geometry.max_context
    mode, _ = planner.decide(settings.kv_pages, settings.split, world)
    if settings.fixed is not None:
        fixed = [settings.fixed] * world
    else:
        arguments = (dtype, kv_dtype, mode, context, settings.page_rows)
        fixed = [planner.lane_fixed(geometry, world, rank, *arguments) for rank in range(world)]
    return planner.choose(
        settings.kv_pages,
        settings.split,
        room=[settings.room] * world,
        context=context,
        lanes=settings.parallel,
        cache_budget=settings.cache,
        geometry=geometry,
        world=world,
        fixed=fixed,
        kv_dtype=kv_dtype,
        page_rows=settings.page_rows,
        order=settings.plan_order,
    )


def show(result: planner.Plan) -> None:
    """A table of what fits, and the ledger of every rank, on stdout."""
    console = Console()
    fits = Table(title="What fits", title_justify="left", show_header=False, box=None, padding=(0, 2))
    kind = ("pages" if result.paged else "windows") + (", split between owners" if result.split else ", on every rank")
    owned = f", {result.owner_pages:,} an owner" if result.split else ""
    for name, value in (
        ("latent rows", f"{kind}, {result.kv_dtype}"),
        ("lanes", f"{result.lanes}"),
        (
            "longest conversation",
            f"{format_tokens(result.context)} tokens, {result.window_pages:,} pages of {result.page_rows} rows",
        ),
        ("pages for conversations", f"{result.stream_pages:,}" + owned),
        ("tokens at the same time", format_tokens(result.stream_tokens)),
        ("kept states", format_bytes(result.cache_bytes)),
        ("pages in the arena", f"{result.pages:,}"),
    ):
        fits.add_row(name, value)
    console.print(fits)
    ledger = Table(title="Where a rank's room goes", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("rank", "room", "a page", "streams", "other lanes", "kept states", "unused"):
        ledger.add_column(name, justify="right", no_wrap=True)
    for entry in result.ledgers:
        sizes = (
            entry.room_bytes,
            entry.page_bytes,
            entry.stream_bytes,
            entry.lane_bytes,
            entry.cache_bytes,
            entry.unused_bytes,
        )
        ledger.add_row(str(entry.rank), *map(format_bytes, sizes))
    console.print(ledger)
    if result.note:
        console.print(f"note: {result.note}", highlight=False)
