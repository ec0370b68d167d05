"""What listings share: tables that lose no word, and the words for states, marks and times."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from latentpool.v1 import pool_manager_pb2

_WIDEST = 1_000
"""Columns of a table at most."""

MARKS = {
    pool_manager_pb2.MARK_HISTORY: "history",
    pool_manager_pb2.MARK_REWIND: "rewind",
    pool_manager_pb2.MARK_SHARED: "shared",
    pool_manager_pb2.MARK_REPLY: "reply",
}
"""Why a state was kept, in a word (docs/kept.md explains them)."""


def table(*columns: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        made.add_column(column, no_wrap=True)
    return made


def show(console: Console, made: Table) -> None:
    """Prints every cell whole: where the terminal is too narrow its own line breaks are better than lost words."""
    needed = Measurement.get(console, console.options.update(width=_WIDEST), made).maximum
    Console(width=max(needed, console.width)).print(made)


def count(number: int, thing: str) -> str:
    """ "1 page", "1,234 pages"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def ago(seconds: float) -> str:
    """ "0.4 s", "37 s", "12 min", "3.5 h"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3_600:.1f} h"
