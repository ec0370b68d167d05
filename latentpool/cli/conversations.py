"""`latentpool conversations` and `carry`: who runs and waits, and moving one of them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from latentpool.cli.calls import as_json, ask_manager
from latentpool.cli.options import Json, takes
from latentpool.cli.tables import ago, count, show, table
from latentpool.config import Settings
from latentpool.errors import ConfigError
from latentpool.geometry import MAX_WORLD
from latentpool.v1 import pool_admin_pb2 as pb

_STATES = {
    pb.CONVERSATION_STATE_WAITING: "waiting",
    pb.CONVERSATION_STATE_RUNNING: "running",
    pb.CONVERSATION_STATE_PARKING: "parking",
    pb.CONVERSATION_STATE_CARRYING: "carrying",
    pb.CONVERSATION_STATE_FILLING: "filling",
    pb.CONVERSATION_STATE_DECODING: "decoding",
}
_IDLE = {
    pb.CONVERSATION_STATE_WAITING: "waiting to keep",
    pb.CONVERSATION_STATE_RUNNING: "keeping",
    pb.CONVERSATION_STATE_FILLING: "keeping",
    pb.CONVERSATION_STATE_DECODING: "keeping",
    pb.CONVERSATION_STATE_PARKING: "giving way",
}


@takes("manager")
def conversations(settings: Settings, json: Json = False) -> None:
    """Running and waiting conversations: what each does, its lane, owner and pages, and the pages that it borrows.

    \b
    latentpool conversations
    latentpool conversations --json

    \b
    waiting             for a lane or for pages
    running             it has both; what it does is known in a moment
    filling 40%         its prompt is computed; "cached" tokens were resumed
    decoding            it replies
    carrying to rank 1  its rows move to another owner
    parking             it gives its pages to others, and comes back

    \b
    Idle work: a reply that has ended is computed again, to be kept.
    waiting to keep     for pages
    keeping 40%         nobody else wants its lane or its pages
    giving way          somebody does: it ends, and nobody misses it
    """
    listed = ask_manager(settings, lambda client: client.list_conversations())
    if json:
        print(as_json(listed))
        return
    shown = table(
        "conversation", "request", "state", "lane", "owner", "prompt tokens", "cached", "pages", "borrowed", "quota", "age"
    )
    for entry in listed:
        waits = entry.state == pb.CONVERSATION_STATE_WAITING
        shown.add_row(
            str(entry.conversation),
            entry.request_id,
            state(entry),
            "" if waits else str(entry.lane),
            owner(entry),
            f"{entry.prompt_tokens:,}",
            f"{entry.cached_tokens:,}" if entry.cached_tokens else "",
            f"{entry.pages:,}",
            f"{entry.borrowed:,}" if entry.borrowed else "",
            f"{entry.quota:,}",
            ago(entry.age_seconds),
        )
    console = Console()
    if listed:
        show(console, shown)
    else:
        console.print("no conversation runs or waits")


def state(entry: pb.ConversationInfo) -> str:
    """What it does, in a word or three: "filling 40%"."""
    word = (entry.idle and _IDLE.get(entry.state)) or _STATES.get(entry.state, "unknown")
    if entry.HasField("carried_to"):
        return f"{word} to rank {entry.carried_to}"
    if word in ("filling", "keeping") and entry.prompt_tokens:
        return f"{word} {min(100, 100 * entry.rows // entry.prompt_tokens)}%"
    return word


def owner(entry: pb.ConversationInfo) -> str:
    if entry.state == pb.CONVERSATION_STATE_WAITING and not entry.HasField("owner"):
        return ""
    return f"rank {entry.owner}" if entry.HasField("owner") else "every rank"


@takes("manager")
def carry(
    settings: Settings,
    conversation: Annotated[
        int, typer.Argument(metavar="CONVERSATION", min=0, max=2**64 - 1, help="Its number in latentpool conversations.")
    ],
    to: Annotated[
        int | None,
        typer.Option("--to", metavar="RANK", help="The new owner; by default the rank with most free pages."),
    ] = None,
    json: Json = False,
) -> None:
    """Moves a running conversation to another owner, and tells when it is there. Its reply pauses and stays the same.

    \b
    latentpool carry 7
    latentpool carry 7 --to 1 --json
    """
    if to is not None and not 0 <= to < 1 << 32:  # within that the pool manager says which ranks there are
        raise ConfigError(f"--to {to}: a rank is a number from 0 to {MAX_WORLD - 1}")
    reply = ask_manager(settings, lambda client: client.carry(conversation, to))
    if json:
        print(as_json(reply))
        return
    moved = f"{count(reply.pages, 'page')} in {reply.seconds:.2f} s"
    print(f"conversation {conversation}: from rank {reply.from_owner} to rank {reply.to_owner}, {moved}")
