"""`latentpool pages`, `conversations`, `ranks`: what the pool manager knows."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from latentpool.cli.calls import as_json, ask_manager
from latentpool.cli.options import Json, takes
from latentpool.config import Settings
from latentpool.errors import LatentPoolError
from latentpool.units import format_bytes, format_tokens
from latentpool.v1 import pool_admin_pb2 as pb

_CELLS = 64
"""Cells of a line of the picture."""
_LINES = 8
"""Lines of a residue at most: in a larger pool a cell stands for several pages."""
_WIDEST = 1_000
"""Columns of a table at most."""
_LOOKS: dict[int, tuple[str, str, str]] = {
    pb.PAGE_KIND_FREE: ("·", "dim", "free"),
    pb.PAGE_KIND_LIVE: ("█", "", "live"),
    pb.PAGE_KIND_FENCED: ("▒", "yellow", "given back, fenced"),
    pb.PAGE_KIND_BORROWED: ("▚", "magenta", "borrowed"),
    pb.PAGE_KIND_KEPT: ("▓", "blue", "kept"),
}
_COLOURS = ("green", "cyan", "bright_yellow", "bright_magenta", "bright_blue", "bright_red")

Cell = tuple[int, int]
"""A page's kind and the conversation that holds it (0: none)."""


@takes("manager")
def pages(
    settings: Settings,
    check: Annotated[
        bool, typer.Option("--check", help="Prove the books first: exit code 1 if a page is not accounted for.")
    ] = False,
    json: Json = False,
) -> None:
    """A picture of the pool: a cell a page, by owner, in the colour of the conversation that holds it.

    \b
    latentpool pages
    latentpool pages --check
    latentpool pages --json | jq .free
    """
    if check:
        violations = ask_manager(settings, lambda client: client.check_integrity())
        if violations:
            raise LatentPoolError("the books of the pool are not whole: " + "; ".join(violations))
    reply = ask_manager(settings, lambda client: client.list_pages())
    if json:
        print(as_json(reply))
        return
    Console().print(picture(reply))
    if check:
        print(f"books: whole, all {reply.pages:,} pages accounted for")


def picture(reply: pb.ListPagesResponse) -> Text:
    """The pool as lines of cells, a group of lines a residue, then a legend."""
    cells = _cells(reply)
    rows = format_tokens(reply.pages * reply.page_rows)
    text = Text(
        f"{reply.pages:,} pages of {reply.page_rows} rows ({rows} tokens): {reply.free:,} free, {reply.reserved:,} reserved\n"
    )
    residues: dict[int | None, list[Cell]] = {}
    for page in sorted(cells):
        owner, cell = cells[page]
        residues.setdefault(owner, []).append(cell)
    scale = max((-(-len(held) // (_CELLS * _LINES)) for held in residues.values()), default=1)
    for owner, held in residues.items():
        label = "every rank" if owner is None else f"rank {owner}"
        shown = [_most(held[start : start + scale]) for start in range(0, len(held), scale)]
        for start in range(0, len(shown), _CELLS):
            text.append(f"{label if start == 0 else '':>11} ")
            for kind, conversation in shown[start : start + _CELLS]:
                text.append(_LOOKS[kind][0], _style(kind, conversation))
            text.append("\n")
    return text.append(_legend(cells, scale))


def _cells(reply: pb.ListPagesResponse) -> dict[int, tuple[int | None, Cell]]:
    """Owner (None: every rank), kind and conversation of each page id."""
    cells: dict[int, tuple[int | None, Cell]] = {}
    for run in reply.runs:
        owner = run.owner if run.HasField("owner") else None
        for index in range(run.count):
            cells[run.first + index * max(run.stride, 1)] = (owner, (run.kind, run.conversation))
    return cells


def _most(cells: list[Cell]) -> Cell:
    """What most of these pages are, free ones aside: a page in use must not vanish among free ones."""
    return Counter([cell for cell in cells if cell[0] != pb.PAGE_KIND_FREE] or cells).most_common(1)[0][0]


def _style(kind: int, conversation: int) -> str:
    return _COLOURS[conversation % len(_COLOURS)] if kind == pb.PAGE_KIND_LIVE else _LOOKS[kind][1]


def _legend(cells: dict[int, tuple[int | None, Cell]], scale: int) -> Text:
    legend = Text(" " * 12)
    if scale > 1:
        legend.append(f"a cell is {scale} pages, free if all are  ")
    for (kind, conversation), count in sorted(Counter(cell for _, cell in cells.values()).items()):
        legend.append(_LOOKS[kind][0], _style(kind, conversation))
        what = f"conversation {conversation}" if kind == pb.PAGE_KIND_LIVE else _LOOKS[kind][2]
        legend.append(f" {what} {count:,}  ")
    return legend


@takes("manager")
def conversations(settings: Settings, json: Json = False) -> None:
    """Running and waiting conversations, with their lanes and pages.

    \b
    latentpool conversations
    latentpool conversations --json
    """
    listed = ask_manager(settings, lambda client: client.list_conversations())
    if json:
        print(as_json(listed))
        return
    table = _table("conversation", "request", "state", "lane", "owner", "prompt tokens", "pages", "quota", "age")
    for entry in listed:
        running = entry.state == pb.CONVERSATION_STATE_RUNNING
        table.add_row(
            str(entry.conversation),
            entry.request_id,
            "running" if running else "waiting",
            str(entry.lane) if running else "",
            f"rank {entry.owner}" if entry.HasField("owner") else "every rank" if running else "",
            f"{entry.prompt_tokens:,}",
            f"{entry.pages:,}",
            f"{entry.quota:,}",
            f"{entry.age_seconds:.1f} s",
        )
    console = Console()
    if listed:
        _show(console, table)
    else:
        console.print("no conversation runs or waits")


@takes("manager")
def ranks(settings: Settings, json: Json = False) -> None:
    """The group's ranks: state, memory, and how long ago each was heard of.

    \b
    latentpool ranks
    latentpool ranks --manager 10.0.0.1:7411 --json
    """
    reply = ask_manager(settings, lambda client: client.get_ranks())
    if json:
        print(as_json(reply))
        return
    table = _table("rank", "state", "host", "address", "loaded", "resident", "room", "heard")
    for entry in reply.ranks:
        absent = entry.state == "absent"
        table.add_row(
            str(entry.rank),
            entry.state,
            entry.host,
            entry.address,
            "" if absent else f"{format_bytes(entry.loaded_bytes)} of {format_bytes(entry.total_bytes)}",
            "" if absent else format_bytes(entry.resident_bytes),
            "" if not entry.room_bytes else format_bytes(entry.room_bytes),
            "" if absent else f"{entry.heartbeat_age_seconds:.1f} s ago",
        )
    console = Console()
    _show(console, table)
    router = f"router {reply.router}" if reply.router else "no router"
    console.print(f"group: {reply.group_state}; epoch {reply.epoch}, term {reply.term}; {router}", highlight=False)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _show(console: Console, table: Table) -> None:
    """Prints every cell whole: where the terminal is too narrow its own line breaks are better than lost words."""
    needed = Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
    Console(width=max(needed, console.width)).print(table)
