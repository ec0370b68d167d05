"""`latentpool kept`: what is kept of earlier prompts, what it was good for, and evicting it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from latentpool.cli.calls import as_json, ask_manager
from latentpool.cli.options import Json, takes
from latentpool.cli.tables import MARKS, ago, count, show, table
from latentpool.config import Settings
from latentpool.errors import ConfigError, LatentPoolError
from latentpool.units import format_bytes
from latentpool.v1 import pool_admin_pb2 as pb


@takes("manager")
def kept(
    settings: Settings,
    evict: Annotated[
        list[int] | None,
        typer.Option(
            "--evict", metavar="STATE", min=1, max=2**64 - 1, help="Evict this one; may be repeated.", show_default=False
        ),
    ] = None,
    evict_all: Annotated[bool, typer.Option("--evict-all", help="Evict all that are not in use.")] = False,
    json: Json = False,
) -> None:
    """Kept prompts: a later prompt that begins with the same tokens goes on from one instead of being computed from its start.

    \b
    latentpool kept
    latentpool kept --evict 7 --evict 9
    latentpool kept --evict-all
    latentpool kept --json | jq .counts

    \b
    marks: history   the end of a prompt
           rewind    before its newest user message, which may be edited
           shared    where it parted from prompts that began alike
           reply     the end of its reply, computed again in idle time
    extended         a longer state holds it and more: it is the first to go
    in use           a conversation is being resumed from it: it stays

    An evicted prompt is computed again when it comes back; replies are the same.
    """
    if evict_all or evict:
        if evict_all and evict:
            raise ConfigError("--evict-all: goes without --evict")
        _evict(settings, evict or [], json)
        return
    reply = ask_manager(settings, lambda client: client.list_kept())
    if json:
        print(as_json(reply))
        return
    console = Console()
    if reply.kept:
        listed = table(
            "state", "tokens", "mark", "owner", "pages a rank", "size a rank", "last use", "age", "hits", "", "request"
        )
        for entry in reply.kept:
            listed.add_row(*row(entry))
        show(console, listed)
    lines = [usage(reply)]
    if not reply.nothing_kept:
        lines += [lookups(reply.counts), evictions(reply.counts)]
    if reply.last_refusal:
        lines.append(f"last refused: {reply.last_refusal}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def row(entry: pb.KeptInfo) -> tuple[str, ...]:
    """The cells of a state."""
    notes = ", ".join(note for note, so in (("extended", entry.extended), ("in use", entry.pinned)) if so)
    return (
        str(entry.state),
        f"{entry.at:,}",
        MARKS.get(entry.mark, "unknown"),
        f"rank {entry.owner}" if entry.HasField("owner") else "every rank",
        f"{entry.row_pages:,} + {entry.fixed_pages:,}",
        format_bytes(entry.bytes),
        f"{ago(entry.idle_seconds)} ago",
        ago(entry.age_seconds),
        f"{entry.hits:,}",
        notes,
        entry.request_id,
    )


def usage(reply: pb.ListKeptResponse) -> str:
    """ "3 kept prompts: 1.20 GiB of 16.00 GiB a rank"; where there are none, what is too short."""
    if reply.nothing_kept:
        return f"nothing is kept: {reply.nothing_kept}"
    room = f"{format_bytes(reply.bytes)} of {format_bytes(reply.budget_bytes)} a rank"
    short = "" if reply.kept else f"; prompts of fewer tokens than --keep-from {reply.keep_from} are not kept"
    return f"{count(len(reply.kept), 'kept prompt')}: {room}{short}"


def lookups(counts: pb.KeptCounts) -> str:
    """ "lookups: 12 of 16 hit (34,560 tokens; 2 carried); missed: 3 unknown, 1 without room, 0 too short to carry"."""
    asked = counts.hits + counts.misses_unknown + counts.misses_room + counts.misses_short
    hit = f"{counts.hits:,} of {asked:,} hit ({count(counts.hit_tokens, 'token')}; {counts.carried_hits:,} carried)"
    why = f"{counts.misses_unknown:,} unknown, {counts.misses_room:,} without room, {counts.misses_short:,} too short to carry"
    return f"lookups: {hit}; missed: {why}"


def evictions(counts: pb.KeptCounts) -> str:
    why = f"{counts.evicted_for_pages:,} for pages, {counts.evicted_for_budget:,} for the budget"
    return f"kept {counts.kept:,}, refused {counts.refused:,}; evicted: {why}, {counts.evicted_by_hand:,} by hand"


def _evict(settings: Settings, states: list[int], json: bool) -> None:
    """Raises LatentPoolError if a state that was named did not go."""
    evicted = ask_manager(settings, lambda client: client.evict(states))
    if json:
        print(as_json({"evicted": evicted}))
    elif evicted:
        print(f"evicted {count(len(evicted), 'kept prompt')}: {', '.join(map(str, evicted))}")
    else:
        print("nothing was evicted")
    stayed = [str(state) for state in states if state not in evicted]
    if stayed:
        raise LatentPoolError(f"not evicted, since in use or no longer kept: {', '.join(stayed)}; see latentpool kept")
