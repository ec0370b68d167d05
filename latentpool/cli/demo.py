"""`latentpool demo`: two ranks on this machine, a long log and two answers, from nothing to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

import latentpool
from latentpool.cli.options import takes
from latentpool.cli.picture import picture
from latentpool.cli.supervisor import Group
from latentpool.cli.talk import SAMPLING, PromptText, sampling, stream_reply
from latentpool.cli.up import checked, child_log, run_group
from latentpool.client import AdminClient, Client
from latentpool.config import Settings
from latentpool.errors import LatentPoolError
from latentpool.v1 import pool_admin_pb2

BUNDLED = Path(latentpool.__file__).parent / "checkpoints" / "demo"
_FREE_PORT = "127.0.0.1:0"
_CONTEXT, _MEMORY = 8192, 256 << 20
"""Little enough for the picture of the pool to show single pages."""
_KEEP_FROM = 1024
"""The second question goes on from what is kept of the log."""
_LOG = BUNDLED / "log.txt"
_AT = 82
"""The log's line before which the fact is put."""
_FACT = "the amber lantern at the harbour gate is held by Mara Lindt."
_ASKED = "Who holds the amber lantern at the harbour gate?"
_THEN = "Where is Tessa Karetti on duty?"
_INTRO = "Here is the log."


@takes("ranks", *SAMPLING, "page_rows", defaults={"max_tokens": 64, "page_rows": 64})
def demo(settings: Settings, prompt: PromptText = None) -> None:
    """Puts a fact into a long log, asks two questions about the log on two ranks, shows the pool, and stops it all again.

    \b
    latentpool demo
    latentpool demo --ranks 3
    latentpool demo "Hello, who are you?"

    The bundled model is small: it was trained to find what a log says, and for a little talk. With a PROMPT it answers that.
    """
    console = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="latentpool-demo-") as directory:
        settings = replace(
            settings,
            model=BUNDLED,
            memory=_MEMORY,
            context=_CONTEXT,
            keep_from=_KEEP_FROM,
            router_bind=_FREE_PORT,
            manager_bind=_FREE_PORT,
            worker_bind=_FREE_PORT,
            state_dir=Path(directory) / "state",
        )
        groups: list[Group] = []

        async def show(group: Group) -> None:
            groups.append(group)
            await _show(group, [prompt] if prompt is not None else _questions(console), console)

        with child_log(console, Path(directory) / "logs") as log:
            done = asyncio.run(run_group(checked(settings, console), console, log, show))
    left = [remnant for group in groups for remnant in remnants(group)]
    if left:
        raise LatentPoolError("the group has stopped, but is still there: " + ", ".join(left))
    if not done:
        raise KeyboardInterrupt
    console.print("[dim]stopped: no process and no port is left[/]")


def _questions(console: Console) -> list[str]:
    """The user's messages: the log with the fact and a question, then a question about another of its lines."""
    lines = _LOG.read_text(encoding="utf-8").splitlines()
    fact = f"{lines[_AT].split()[0]} {_FACT}"
    lines.insert(_AT, fact)
    console.print(f"[dim]a log of {len(lines)} lines; line {_AT + 1} says:[/] {escape(fact)}")
    return ["\n".join([_INTRO, *lines, "", _ASKED]), _THEN]


async def _show(group: Group, asked: list[str], console: Console) -> None:
    """Asks one message after another, as one chat, and prints each reply, its receipt and the pool while it was said."""
    settings = group.settings
    ranks = "1 rank serves" if settings.ranks == 1 else f"{settings.ranks} ranks serve"
    console.print(f"[dim]{ranks} {BUNDLED.name} at {settings.address}[/]")
    chat: list[dict[str, str]] = []
    async with Client(settings.address) as client, AdminClient(settings.manager) as manager:
        for message in asked:
            console.print(f"\n[bold]{escape(message.splitlines()[-1] if message else message)}[/]")
            chat.append({"role": "user", "content": message})
            pages: list[asyncio.Future[pool_admin_pb2.ListPagesResponse]] = []

            def write(text: str, pages: list[asyncio.Future[pool_admin_pb2.ListPagesResponse]] = pages) -> None:
                sys.stdout.write(text)
                if not pages:
                    pages.append(asyncio.ensure_future(manager.list_pages()))

            reply = await stream_reply(client, None, sampling(settings), write, chat=chat)
            chat.append({"role": "assistant", "content": reply["text"]})
            console.print("the pool while it spoke:")
            for listing in pages:
                console.print(picture(await listing))


def remnants(group: Group) -> list[str]:
    """What is left of a group that has stopped: process groups and ports. Empty as it should be."""
    left = []
    for child in group.children:
        if child.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, 0)
                left.append(f"{child.name} (process group {child.process.pid})")
    settings = group.settings
    workers = [settings.worker_address(rank) for rank in range(settings.ranks)]
    for address in (settings.router_bind, settings.manager_bind, *workers):
        host, _, port = address.rpartition(":")
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex((host, int(port))) == 0:
                left.append(f"a listener at {address}")
    return left
