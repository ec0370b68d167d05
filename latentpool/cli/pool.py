"""`latentpool pages`, `conversations`, `carry`, `ranks`: what the pool manager knows, and what can be asked of it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from latentpool.cli.calls import as_json, ask_manager
from latentpool.cli.options import Json, takes
from latentpool.cli.picture import picture
from latentpool.config import Settings
from latentpool.errors import LatentPoolError
from latentpool.units import format_bytes
from latentpool.v1 import pool_admin_pb2 as pb
from latentpool.v1 import rank_worker_pb2

_WIDEST = 1_000
"""Columns of a table at most."""
_STATES = {
    pb.CONVERSATION_STATE_WAITING: "waiting",
    pb.CONVERSATION_STATE_RUNNING: "running",
    pb.CONVERSATION_STATE_PARKING: "parking",
    pb.CONVERSATION_STATE_CARRYING: "carrying",
}


@takes("manager")
def pages(
    settings: Settings,
    check: Annotated[
        bool, typer.Option("--check", help="Prove the books first: exit code 1 if a page is not accounted for.")
    ] = False,
    json: Json = False,
) -> None:
    """A picture of the pool: a cell a page, by owner, in the colour of the conversation that holds or borrows it.

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


@takes("manager")
def conversations(settings: Settings, json: Json = False) -> None:
    """Running and waiting conversations: what each does, its lane, owner and pages, and the pages that it borrows.

    \b
    latentpool conversations
    latentpool conversations --json
    """
    listed = ask_manager(settings, lambda client: client.list_conversations())
    if json:
        print(as_json(listed))
        return
    table = _table("conversation", "request", "state", "lane", "owner", "prompt tokens", "pages", "borrowed", "quota", "age")
    for entry in listed:
        waits = entry.state == pb.CONVERSATION_STATE_WAITING
        table.add_row(
            str(entry.conversation),
            entry.request_id,
            _state(entry),
            "" if waits else str(entry.lane),
            f"rank {entry.owner}" if entry.HasField("owner") else "" if waits else "every rank",
            f"{entry.prompt_tokens:,}",
            f"{entry.pages:,}",
            f"{entry.borrowed:,}" if entry.borrowed else "",
            f"{entry.quota:,}",
            f"{entry.age_seconds:.1f} s",
        )
    console = Console()
    if listed:
        _show(console, table)
    else:
        console.print("no conversation runs or waits")


def _state(entry: pb.ConversationInfo) -> str:
    word = _STATES.get(entry.state, "unknown")
    return f"{word} to rank {entry.carried_to}" if entry.HasField("carried_to") else word


@takes("manager")
def carry(
    settings: Settings,
    conversation: Annotated[
        int, typer.Argument(metavar="CONVERSATION", min=0, max=2**64 - 1, help="Its number in latentpool conversations.")
    ],
    to: Annotated[
        int | None,
        typer.Option("--to", metavar="RANK", min=0, max=7, help="The new owner; by default the rank with most free pages."),
    ] = None,
    json: Json = False,
) -> None:
    """Moves a running conversation to another owner, and tells when it is there. Its reply pauses and stays the same.

    \b
    latentpool carry 7
    latentpool carry 7 --to 1 --json
    """
    reply = ask_manager(settings, lambda client: client.carry(conversation, to))
    if json:
        print(as_json(reply))
        return
    pages = f"{reply.pages:,} page{'' if reply.pages == 1 else 's'}"
    print(
        f"conversation {conversation}: from rank {reply.from_owner} to rank {reply.to_owner}, {pages} in {reply.seconds:.2f} s"
    )


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
    table = _table("rank", "state", "host", "address", "loaded", "resident", "room", "sent", "heard")
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
            "" if absent else _sent(entry.sent),
            "" if absent else f"{entry.heartbeat_age_seconds:.1f} s ago",
        )
    console = Console()
    _show(console, table)
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


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _show(console: Console, table: Table) -> None:
    """Prints every cell whole: where the terminal is too narrow its own line breaks are better than lost words."""
    needed = Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
    Console(width=max(needed, console.width)).print(table)
