"""`latentpool demo`: two ranks on this machine and one reply, from nothing to nothing."""

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
_PROMPT = "The pool holds pages, and every page has an owner."


@takes("ranks", *SAMPLING, "page_rows", defaults={"max_tokens": 64, "ignore_eos": True, "page_rows": 64})
def demo(settings: Settings, prompt: PromptText = None) -> None:
    """Starts a group of two ranks with the bundled checkpoint, streams a reply, shows the pool, and stops it again.

    \b
    latentpool demo
    latentpool demo "Once upon a time" --ranks 3 --temperature 0.8

    The bundled checkpoint is small and random: it shows the road of a token, and speaks no language.
    """
    console = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="latentpool-demo-") as directory:
        settings = replace(
            settings,
            model=BUNDLED,
            router_bind=_FREE_PORT,
            manager_bind=_FREE_PORT,
            worker_bind=_FREE_PORT,
            state_dir=Path(directory) / "state",
        )
        groups: list[Group] = []

        async def show(group: Group) -> None:
            groups.append(group)
            await _show(group, prompt or _PROMPT, console)

        with child_log(console, Path(directory) / "logs") as log:
            done = asyncio.run(run_group(checked(settings, console), console, log, show))
    left = [remnant for group in groups for remnant in remnants(group)]
    if left:
        raise LatentPoolError("the group has stopped, but is still there: " + ", ".join(left))
    if not done:
        raise KeyboardInterrupt
    console.print("[dim]stopped: no process and no port is left[/]")


async def _show(group: Group, prompt: str, console: Console) -> None:
    settings = group.settings
    console.print(f"[dim]{settings.ranks} ranks serve {BUNDLED.name} at {settings.address}[/]\n[bold]{prompt}[/]", end="")
    async with Client(settings.address) as client, AdminClient(settings.manager) as manager:
        pages: list[asyncio.Future[pool_admin_pb2.ListPagesResponse]] = []

        def write(text: str) -> None:
            sys.stdout.write(text)
            if not pages:
                pages.append(asyncio.ensure_future(manager.list_pages()))

        await stream_reply(client, prompt, sampling(settings), write)
        console.print("\nthe pool while it spoke:")
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
