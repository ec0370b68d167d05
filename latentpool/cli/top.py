"""`latentpool top`: the whole group at a glance, again and again."""

from __future__ import annotations

import time
from typing import Annotated, TypeVar

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from latentpool.cli import live
from latentpool.cli.calls import as_json
from latentpool.cli.conversations import owner, state
from latentpool.cli.kept import lookups, usage
from latentpool.cli.options import Json, takes
from latentpool.cli.picture import bar, headline, residues_of, totals
from latentpool.cli.rates import Rates, counters, doing
from latentpool.cli.tables import MARKS, ago, count
from latentpool.config import Settings
from latentpool.units import format_bytes
from latentpool.v1 import pool_admin_pb2 as pb

T = TypeVar("T")

_BAR = 40
_HEADS = 3
"""Lines of a table besides its rows: an empty one, its head, and that of what is left out."""
_WHOLE = 1_000
"""Lines where nothing has to fit a screen."""


@takes("manager")
def top(
    settings: Settings,
    once: Annotated[bool, typer.Option("--once", help="Print it once, as text, as where stdout is no terminal.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.2, max=60, metavar="X", help="Seconds between two pictures.")
    ] = 1.0,
    json: Json = False,
) -> None:
    """Ranks and their pages, conversations and kept prompts, with rates, until Ctrl-C.

    \b
    latentpool top
    latentpool top --interval 5
    latentpool top --once | tee report
    latentpool top --json | jq .kept.counts

    Tokens a second count prompt and reply tokens that were computed; resumed ones take no time. Rates are means over the last
    five seconds (with --once, over one interval). --json prints the counters themselves, once.
    """
    console = Console()
    if json:
        print(as_json(live.first(settings, 1, interval)[0]))
        return
    view = View()
    if console.is_terminal and not once:
        live.watch(settings, console, lambda told: view.draw(told, time.monotonic(), console.height), interval)
        return
    told: RenderableType = ""
    for number, response in enumerate(live.first(settings, 2, interval)):
        told = view.draw(response, number * interval, _WHOLE)
    Console(width=max(console.width, 120)).print(told)


class View:
    """Draws what the pool manager tells, with rates since what it told before."""

    def __init__(self) -> None:
        self._rates = Rates()

    def draw(self, told: pb.WatchResponse, now: float, height: int) -> RenderableType:
        """In `height` lines: conversations and kept prompts that do not fit are counted instead of shown."""
        self._rates.add(now, counters(told))
        head: list[RenderableType] = [
            _group(told),
            self._speeds(told),
            headline(told.pages),
            self._ranks(told),
            Text(usage(told.kept)),
        ]
        if not told.kept.nothing_kept:
            head.append(Text(lookups(told.kept.counts)))
        running, kept = list(told.conversations.conversations), sorted(told.kept.kept, key=lambda one: one.idle_seconds)
        left = height - len(head) - len(told.ranks.ranks) - 2 * _HEADS
        for_kept = min(len(kept), max(left // 2, left - len(running)))
        return Group(*head, self._conversations(running, left - for_kept), _kept(kept, for_kept))

    def _speeds(self, told: pb.WatchResponse) -> Text:
        entries = told.conversations.conversations
        idle = sum(entry.idle for entry in entries)
        waiting = sum(entry.state == pb.CONVERSATION_STATE_WAITING and not entry.idle for entry in entries)
        keys = [(doing(entry), entry.conversation) for entry in entries]
        reading = self._rates.sum(key for key in keys if key[0] == "reading")
        replying = self._rates.sum(key for key in keys if key[0] == "replying")
        return Text(
            f"{len(entries) - waiting - idle:,} running, {waiting:,} waiting{f', {idle:,} keeping' if idle else ''}; "
            f"reading {_per_second(reading or 0.0)}, replying {_per_second(replying or 0.0)} tokens/s"
        )

    def _ranks(self, told: pb.WatchResponse) -> Table:
        listed = _table("rank", "state", "sent", "", "pages")
        residues = residues_of(told.pages)
        for entry in told.ranks.ranks:
            cells = residues.get(entry.rank) or residues.get(None) or []
            rate = self._rates.of(("sent", entry.rank))
            sent = "" if rate is None else f"{format_bytes(round(rate))}/s"
            listed.add_row(str(entry.rank), entry.state, sent, bar(cells, _BAR), totals(cells))
        return listed

    def _conversations(self, entries: list[pb.ConversationInfo], lines: int) -> RenderableType:
        listed = _table("conversation", "request", "state", "owner", "tokens", "cached", "pages", "borrowed", "tokens/s", "age")
        for entry in _fitting(entries, lines):
            listed.add_row(
                str(entry.conversation),
                entry.request_id,
                state(entry),
                owner(entry),
                f"{entry.rows:,}" if entry.rows >= entry.prompt_tokens else f"{entry.rows:,} of {entry.prompt_tokens:,}",
                f"{entry.cached_tokens:,}" if entry.cached_tokens else "",
                f"{entry.pages:,}",
                f"{entry.borrowed:,}" if entry.borrowed else "",
                _per_second(self._rates.of((doing(entry), entry.conversation))),
                ago(entry.age_seconds),
            )
        return _with_rest(listed, len(entries), "conversation")


def _group(told: pb.WatchResponse) -> Text:
    ranks = told.ranks
    router = f"router {ranks.router}" if ranks.router else "no router"
    return Text(f"group: {ranks.group_state}; epoch {ranks.epoch}, term {ranks.term}; {router}", "bold")


def _kept(entries: list[pb.KeptInfo], lines: int) -> RenderableType:
    listed = _table("kept", "request", "mark", "owner", "tokens", "size a rank", "hits", "last use", "")
    for entry in _fitting(entries, lines):
        listed.add_row(
            str(entry.state),
            entry.request_id,
            MARKS.get(entry.mark, "unknown"),
            f"rank {entry.owner}" if entry.HasField("owner") else "every rank",
            f"{entry.at:,}",
            format_bytes(entry.bytes),
            f"{entry.hits:,}",
            f"{ago(entry.idle_seconds)} ago",
            "in use" if entry.pinned else "extended" if entry.extended else "",
        )
    return _with_rest(listed, len(entries), "kept prompt")


def _table(*columns: str) -> Table:
    listed = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    for column in columns:
        listed.add_column(column, no_wrap=True)
    return listed


def _fitting(entries: list[T], lines: int) -> list[T]:
    """Those that fit beside a line that counts the others; without others that line is theirs too."""
    return entries if len(entries) <= lines + 1 else entries[: max(lines, 0)]


def _with_rest(listed: Table, number: int, thing: str) -> RenderableType:
    if not number:
        return Group()
    left_out = number - listed.row_count
    rest = (Text(f"and {count(left_out, thing)} more", "dim"),) if left_out else ()
    return Group("", listed, *rest)


def _per_second(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"
