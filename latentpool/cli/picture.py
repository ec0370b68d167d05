"""The pool as a picture for a terminal: a cell a page, a group of lines an owner."""

from __future__ import annotations

from collections import Counter

from rich.text import Text

from latentpool.units import format_tokens
from latentpool.v1 import pool_admin_pb2 as pb

_CELLS = 64
"""Cells of a line of the picture."""
_LINES = 8
"""Lines of a residue at most: in a larger pool a cell stands for several pages."""
_MARGIN = " " * 12
_WIDTH = 80
"""Columns of the legend at most."""
_LOOKS: dict[int, tuple[str, str, str]] = {
    pb.PAGE_KIND_LIVE: ("█", "", "live"),
    pb.PAGE_KIND_BORROWED: ("▚", "", "borrowed"),
    pb.PAGE_KIND_KEPT: ("▓", "blue", "kept"),
    pb.PAGE_KIND_FENCED: ("▒", "yellow", "fenced"),
    pb.PAGE_KIND_FREE: ("·", "dim", "free"),
}
_OF_A_CONVERSATION = (pb.PAGE_KIND_LIVE, pb.PAGE_KIND_BORROWED)
_COLOURS = ("green", "cyan", "bright_yellow", "bright_magenta", "bright_blue", "bright_red")

Cell = tuple[int, int]
"""A page's kind and the conversation that holds it (0: none)."""


def picture(reply: pb.ListPagesResponse) -> Text:
    """A line of totals, the cells of each residue under what it holds, then a legend."""
    rows = format_tokens(reply.pages * reply.page_rows)
    text = Text(
        f"{reply.pages:,} pages of {reply.page_rows} rows ({rows} tokens): {reply.free:,} free, {reply.reserved:,} reserved\n"
    )
    residues = _residues(reply)
    scale = max((-(-len(held) // (_CELLS * _LINES)) for held in residues.values()), default=1)
    for owner, held in residues.items():
        label = "every rank" if owner is None else f"rank {owner}"
        text.append(f"{label:>11} {len(held):,} pages: {_totals(held)}\n")
        shown = [_most(held[start : start + scale]) for start in range(0, len(held), scale)]
        for start in range(0, len(shown), _CELLS):
            text.append(_MARGIN)
            for cell in shown[start : start + _CELLS]:
                text.append(_LOOKS[cell[0]][0], _style(cell))
            text.append("\n")
    return text.append(_legend([cell for held in residues.values() for cell in held], scale))


def _residues(reply: pb.ListPagesResponse) -> dict[int | None, list[Cell]]:
    """The pages of each owner (None: every rank), by id."""
    cells: dict[int, tuple[int | None, Cell]] = {}
    for run in reply.runs:
        owner = run.owner if run.HasField("owner") else None
        for index in range(run.count):
            cells[run.first + index * max(run.stride, 1)] = (owner, (run.kind, run.conversation))
    residues: dict[int | None, list[Cell]] = {}
    for page in sorted(cells):
        owner, cell = cells[page]
        residues.setdefault(owner, []).append(cell)
    return residues


def _totals(cells: list[Cell]) -> str:
    counts = Counter(kind for kind, _ in cells)
    return ", ".join(f"{counts[kind]:,} {name}" for kind, (_, _, name) in _LOOKS.items() if counts[kind]) or "none"


def _most(cells: list[Cell]) -> Cell:
    """What most of these pages are, free ones aside: a page in use must not vanish among free ones."""
    return Counter([cell for cell in cells if cell[0] != pb.PAGE_KIND_FREE] or cells).most_common(1)[0][0]


def _style(cell: Cell) -> str:
    """A conversation has one colour, on its owner's pages and on those it borrows."""
    kind, conversation = cell
    return _COLOURS[conversation % len(_COLOURS)] if kind in _OF_A_CONVERSATION else _LOOKS[kind][1]


def _legend(cells: list[Cell], scale: int) -> Text:
    """Each conversation with its pages and those it borrows, then the other kinds, in lines that a terminal holds."""
    order = list(_LOOKS)
    counts = Counter((kind, conversation if kind in _OF_A_CONVERSATION else 0) for kind, conversation in cells)
    entries = [Text(f"a cell is {scale} pages, free if all are")] if scale > 1 else []
    for cell in sorted(counts, key=lambda cell: (not cell[1], cell[1], order.index(cell[0]))):
        kind, conversation = cell
        what = _LOOKS[kind][2]
        if kind == pb.PAGE_KIND_LIVE:
            what = f"conversation {conversation}"
        elif kind == pb.PAGE_KIND_BORROWED:
            what = f"borrowed by {conversation}"
        entries.append(Text.assemble((_LOOKS[kind][0], _style(cell)), f" {what} {counts[cell]:,}"))
    lines: list[Text] = []
    for entry in entries:
        if lines and len(lines[-1]) + len(entry) + 2 <= _WIDTH:
            lines[-1].append("  ").append(entry)
        else:
            lines.append(Text(_MARGIN).append(entry))
    return Text("\n").join(lines)
