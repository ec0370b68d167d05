"""`latentpool pages` and `ranks`: the pool manager's pages, and those whose memory they are."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from latentpool.cli import live
from latentpool.cli.calls import as_json, ask_manager
from latentpool.cli.options import Json, takes
from latentpool.cli.picture import picture
from latentpool.cli.tables import show, table
from latentpool.config import Settings
from latentpool.errors import ConfigError, LatentPoolError
from latentpool.units import format_bytes
from latentpool.v1 import rank_worker_pb2


@takes("manager")
def pages(
    settings: Settings,
    check: Annotated[
        bool, typer.Option("--check", help="Prove the books first: exit code 1 if a page is not accounted for.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Draw it again every second, until Ctrl-C.")] = False,
    json: Json = False,
) -> None:
    """A picture of the pool: a cell a page, by owner, in the colour of the conversation that holds or borrows it.

    \b
    latentpool pages
    latentpool pages --watch
    latentpool pages --check
    latentpool pages --json | jq .free

    \b
    █ live       a running conversation's
    ▀ shared     held more than once; on blue if a kept prompt is a holder
    ▚ borrowed   lent to a prompt of another owner while it is computed
    ▓ kept       a kept prompt's; given back when a conversation needs it
    ▒ fenced     given back, and free once the rounds under way are answered
    · free
    """
    if watch and (check or json):
        raise ConfigError(f"--watch: goes without {'--check' if check else '--json'}")
    if watch:
        live.watch(settings, Console(), lambda told: picture(told.pages))
        return
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


@takes("manager")
def ranks(settings: Settings, json: Json = False) -> None:
    """The group's ranks: state, memory, what each sent to the others, and how long ago it was heard of.

    \b
    latentpool ranks
    latentpool ranks --manager 10.0.0.1:7411 --json
    """
    reply = ask_manager(settings, lambda client: client.get_ranks())
    if json:
        print(as_json(reply))
        return
    listed = table("rank", "state", "host", "address", "loaded", "resident", "room", "sent", "heard")
    for entry in reply.ranks:
        absent = entry.state == "absent"
        listed.add_row(
            str(entry.rank),
            entry.state,
            entry.host,
            entry.address,
            "" if absent else f"{format_bytes(entry.loaded_bytes)} of {format_bytes(entry.total_bytes)}",
            "" if absent else format_bytes(entry.resident_bytes),
            "" if not entry.room_bytes else format_bytes(entry.room_bytes),
            "" if absent else _sent(entry.sent),
            "" if absent else f"{entry.heartbeat_age_seconds:.1f} s ago",
        )
    console = Console()
    show(console, listed)
    router = f"router {reply.router}" if reply.router else "no router"
    console.print(f"group: {reply.group_state}; epoch {reply.epoch}, term {reply.term}; {router}", highlight=False)


def _sent(sent: rank_worker_pb2.LinkBytes) -> str:
    """All bytes, then the share of each kind: "1.24 GiB (sums 97%, outputs 3%, rows <1%)"."""
    kinds = {field.name: value for field, value in sent.ListFields()}
    total = sum(kinds.values())
    if not total:
        return format_bytes(0)
    shares = ", ".join(
        f"{kind} {f'{100 * count / total:.0f}%' if 100 * count >= total else '<1%'}" for kind, count in kinds.items()
    )
    return f"{format_bytes(total)} ({shares})"
