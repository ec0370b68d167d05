"""`latentpool chat`: a talk with a running group, turn by turn."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from contextlib import aclosing
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from latentpool.cli.calls import in_words
from latentpool.cli.options import takes
from latentpool.cli.talk import SAMPLING, sampling, usage_line, with_progress
from latentpool.client import Client
from latentpool.config import Settings
from latentpool.errors import ConfigError, LatentPoolError, RequestError
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2 as pb

QUIT, UNDO = "/quit", "/undo"


@takes("address", *SAMPLING)
def chat(
    settings: Settings,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="A system message before all others.", show_default=False)
    ] = None,
) -> None:
    """A talk, turn by turn: each line is a message; replies stream to stdout, what each turn cost to stderr.

    \b
    latentpool chat
    latentpool chat --system "Answer in one sentence." --temperature 0.7
    printf 'Hello\\nAnd again\\n' | latentpool chat --max-tokens 50

    \b
    /undo    takes back the last message and its reply
    /quit    ends the talk, as Ctrl-D and Ctrl-C do

    Each turn sends the whole talk so far. What was kept of it is not computed again: "cached" says how many tokens, and from
    which mark (see latentpool kept --help). The checkpoint needs a chat template.
    """
    talk = Talk(settings, system)
    with in_words("router", settings.address, "--address"), talk:
        for line in lines():
            if line == QUIT:
                break
            talk.undo() if line == UNDO else talk.say(line)


def lines() -> Iterator[str]:
    """Messages from a terminal, with a prompt and line editing, or from a pipe; empty ones aside. Raises ConfigError for what
    is not UTF-8 text."""
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() edits lines once it is there
    while True:
        try:
            line = (input("> " if on_terminal and sys.stdout.isatty() else "") if on_terminal else _piped()).strip()
        except EOFError:
            return
        except UnicodeDecodeError:
            raise ConfigError("stdin: is not UTF-8 text") from None
        if line:
            yield line


def _piped() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


class Talk:
    """The messages so far, and the one connection that all turns use. Left, nothing of it runs."""

    def __init__(self, settings: Settings, system: str | None) -> None:
        self._how = sampling(settings)
        self._messages: list[tuple[str, str]] = [] if system is None else [("system", system)]
        self._address = settings.address
        self._console = Console(stderr=True, highlight=False)
        # messages are read between turns, outside the loop: Ctrl-C reaches input() as it does anywhere
        self._runner = asyncio.Runner()
        self._client: Client

    def __enter__(self) -> Talk:
        try:
            self._runner.run(self._open())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner:
            if hasattr(self, "_client"):
                self._runner.run(self._client.close())

    async def _open(self) -> None:
        """Raises LatentPoolError where the group cannot chat."""
        self._client = Client(self._address)
        if not (await self._client.get_model()).has_tokenizer:
            raise LatentPoolError("this group takes token ids only (its checkpoint has no tokenizer.json): it cannot chat")

    def say(self, message: str) -> None:
        """A turn. A message that is refused is taken back, and on a terminal the talk goes on."""
        self._messages.append(("user", message))
        try:
            reply = self._runner.run(self._reply(self._how))
        except RequestError as error:
            self._messages.pop()
            if not sys.stdin.isatty():
                raise
            self._console.print(f"[red]{escape(str(error))}[/]", soft_wrap=True)
            return
        self._messages.append(("assistant", reply))

    def undo(self) -> None:
        if self._messages and self._messages[-1][0] == "assistant":
            del self._messages[-2:]
            self._console.print("[dim]the last message and its reply are taken back[/]")
        else:
            self._console.print("[dim]there is nothing to take back[/]")

    async def _reply(self, how: Sampling) -> str:
        text = ""
        async with aclosing(self._client.generate(None, how, chat=self._messages)) as events:
            async for event in with_progress(events, self._console):
                if isinstance(event, pb.Chunk):
                    text += event.text
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                elif isinstance(event, pb.Completion):
                    sys.stdout.write("\n")
                    sys.stdout.flush()
                    self._console.print(f"[dim]{escape(usage_line(event))}[/]", soft_wrap=True)
        return text
