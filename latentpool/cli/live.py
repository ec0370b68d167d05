"""Views that are drawn again and again: on a terminal in place, elsewhere one after another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from rich.console import Console, RenderableType
from rich.live import Live

from latentpool.cli.calls import in_words
from latentpool.client import AdminClient
from latentpool.config import Settings
from latentpool.v1 import pool_admin_pb2 as pb

Draw = Callable[[pb.WatchResponse], RenderableType]


def watch(settings: Settings, console: Console, draw: Draw, interval: float = 1.0) -> None:
    """Draws what the pool manager tells every `interval` seconds, until Ctrl-C, which is how one leaves and no error. On a
    terminal the view fills the screen and is gone afterwards. Raises LatentPoolError if the pool manager goes."""

    async def redraw() -> None:
        async with _told(settings, interval) as responses:
            if not console.is_terminal:
                async for response in responses:
                    console.print(draw(response))
                return
            with Live(console=console, screen=True, auto_refresh=False) as live:
                async for response in responses:
                    live.update(draw(response), refresh=True)

    with in_words("pool manager", settings.manager, "--manager"), contextlib.suppress(KeyboardInterrupt):
        asyncio.run(redraw())


def first(settings: Settings, number: int, interval: float) -> list[pb.WatchResponse]:
    """The first `number` of what a watch tells. Raises LatentPoolError."""

    async def take() -> list[pb.WatchResponse]:
        taken: list[pb.WatchResponse] = []
        async with _told(settings, interval) as responses:
            async for response in responses:
                taken.append(response)
                if len(taken) == number:
                    break
        return taken

    with in_words("pool manager", settings.manager, "--manager"):
        return asyncio.run(take())


@contextlib.asynccontextmanager
async def _told(settings: Settings, interval: float) -> AsyncGenerator[AsyncGenerator[pb.WatchResponse, None], None]:
    async with AdminClient(settings.manager) as client, aclosing(client.watch(interval)) as responses:
        yield responses
