"""The pool as a picture for a terminal: a cell a page, a group of lines an owner."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

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
_KEPT = "blue"
_LOOKS = {
    "live": ("█", ""),
    "shared": ("▀", ""),
    "borrowed": ("▚", ""),
    "kept": ("▓", _KEPT),
    "fenced": ("▒", "yellow"),
    "free": ("·", "dim"),
}
_KINDS = {
    pb.PAGE_KIND_LIVE: "live",
    pb.PAGE_KIND_BORROWED: "borrowed",
    pb.PAGE_KIND_KEPT: "kept",
    pb.PAGE_KIND_FENCED: "fenced",
}
_COLOURS = ("green", "cyan", "bright_yellow", "bright_magenta", "bright_white", "bright_red")


class Cell(NamedTuple):
    """What a page is (a key of _LOOKS), the conversation that holds or borrows it (0: none), and whether it is kept too."""

    look: str
    conversation: int = 0
    kept: bool = False

    @property
    def style(self) -> str:
        """A conversation has one colour, on its owner's pages and on those it borrows; what is kept as well lies on another."""
        if not self.conversation:
            return _KEPT if self.kept else _LOOKS[self.look][1]
        colour = _COLOURS[self.conversation % len(_COLOURS)]
        return f"{colour} on {_KEPT}" if self.kept else colour

    def append_to(self, text: Text) -> Text:
        return text.append(_LOOKS[self.look][0], self.style)


def picture(reply: pb.ListPagesResponse) -> Text:
    """A line of totals, the cells of each residue under what it holds, then a legend."""
    residues = residues_of(reply)
    text = headline(reply).append("\n")
    scale = max((-(-len(held) // (_CELLS * _LINES)) for held in residues.values()), default=1)
    for owner, held in residues.items():
        label = "every rank" if owner is None else f"rank {owner}"
        text.append(f"{label:>11} {len(held):,} pages: {totals(held)}\n")
        shown = [_most(held[start : start + scale]) for start in range(0, len(held), scale)]
        for start in range(0, len(shown), _CELLS):
            text.append(_MARGIN)
            for cell in shown[start : start + _CELLS]:
                cell.append_to(text)
            text.append("\n")
    return text.append(_legend([cell for held in residues.values() for cell in held], scale))


def headline(reply: pb.ListPagesResponse) -> Text:
    """The pool in a line: its size, what all its pages are, and how many conversations may map."""
    rows = format_tokens(reply.pages * reply.page_rows)
    cells = [cell for held in residues_of(reply).values() for cell in held]
    return Text(f"{reply.pages:,} pages of {reply.page_rows} rows, {rows} tokens: {totals(cells)}; {reply.reserved:,} reserved")


def residues_of(reply: pb.ListPagesResponse) -> dict[int | None, list[Cell]]:
    """The pages of each owner (None: every rank), by id."""
    cells: dict[int, tuple[int | None, Cell]] = {}
    for run in reply.runs:
        owner = run.owner if run.HasField("owner") else None
        for index in range(run.count):
            cells[run.first + index * max(run.stride, 1)] = (owner, _cell(run))
    residues: dict[int | None, list[Cell]] = {}
    for page in sorted(cells):
        owner, cell = cells[page]
        residues.setdefault(owner, []).append(cell)
    return residues


def _cell(run: pb.PageRun) -> Cell:
    look = _KINDS.get(run.kind, "free")
    if look in ("free", "fenced"):
        return Cell(look)
    kept = look == "kept" or run.state != 0
    return Cell("shared" if run.holders > 1 or (run.conversation and kept) else look, run.conversation, kept)


def totals(cells: list[Cell]) -> str:
    """Each page once: "20 live, 3 shared, 16 free"."""
    counts = Counter(cell.look for cell in cells)
    return ", ".join(f"{counts[look]:,} {look}" for look in _LOOKS if counts[look]) or "none"


def bar(cells: list[Cell], width: int) -> Text:
    """All pages of an owner in one line of at most `width` cells."""
    scale = max(1, -(-len(cells) // width))
    text = Text()
    for start in range(0, len(cells), scale):
        _most(cells[start : start + scale]).append_to(text)
    return text


def _most(cells: list[Cell]) -> Cell:
    """What most of these pages are, free ones aside: a page in use must not vanish among free ones."""
    return Counter([cell for cell in cells if cell.look != "free"] or cells).most_common(1)[0][0]


def _legend(cells: list[Cell], scale: int) -> Text:
    """Each conversation with its pages, those it shares and those it borrows, then the other kinds, in lines that a terminal
    holds."""
    order = list(_LOOKS)
    counts = Counter(cells)
    entries = [Text(f"a cell is {scale} pages, free if all are")] if scale > 1 else []
    shown = sorted(counts, key=lambda cell: (not cell.conversation, cell.conversation, order.index(cell.look), cell.kept))
    entries += [cell.append_to(Text()).append(f" {_called(cell)} {counts[cell]:,}") for cell in shown]
    lines: list[Text] = []
    for entry in entries:
        if lines and len(lines[-1]) + len(entry) + 2 <= _WIDTH:
            lines[-1].append("  ").append(entry)
        else:
            lines.append(Text(_MARGIN).append(entry))
    return Text("\n").join(lines)


def _called(cell: Cell) -> str:
    if cell.look == "live":
        return f"conversation {cell.conversation}"
    if not cell.conversation:
        return "shared by kept states" if cell.look == "shared" else cell.look
    if cell.look == "shared":
        return f"kept, used by {cell.conversation}" if cell.kept else f"shared by {cell.conversation}"
    return f"borrowed by {cell.conversation}"
