"""Clients that come and go: replies and scores that end in every way a client can end them, over the public calls alone.

A client sees the stage it is in by its events: Waiting, Filling and Chunk the first time; Waiting or Filling again after a
chunk once its conversation was parked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from latentpool.client import Client
from latentpool.errors import LatentPoolError
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2

VOCAB = 240
ENDINGS = (
    "whole", "unread", "waiting", "filling", "decoding", "parked", "replaying", "asleep", "deadline", "closed", "cut",
)  # fmt: skip
"""Where or how a client leaves. unread: it cancels soon, wherever it is; asleep: it stops to read, and cancels later; deadline:
its time is over; closed: its channel is closed; cut: its connection is reset. The others cancel at that stage, and read what
never comes there to its end."""


@dataclass(frozen=True)
class Job:
    """A prompt with what is asked of it. decode_from None: a reply, in the background if its prompt is long; else a score."""

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    decode_from: int | None = None


@dataclass
class Heard:
    """What a client got: token ids of a reply, or the log-probabilities of a score by position."""

    tokens: list[int] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    stages: set[str] = field(default_factory=set)
    receipt: str = ""

    def take(self, event: Any) -> str:
        """The stage that an event shows."""
        stage = self._stage(event)
        self.stages.add(stage)
        return stage

    def _stage(self, event: Any) -> str:
        match event:
            case router_pb2.Waiting():
                return "parked" if self.tokens or self.scores else "waiting"
            case router_pb2.Filling():
                return "replaying" if self.tokens else "filling"
            case router_pb2.Chunk():
                assert event.first_index == len(self.tokens)
                self.tokens += event.token_ids
                return "decoding"
            case router_pb2.ScoredRows():
                assert event.first_position == len(self.scores)
                self.scores |= dict(enumerate(event.next_log_probs, start=event.first_position))
                return "decoding"
        self.receipt = event.receipt.sha256
        return "whole"

    def begins(self, whole: Heard) -> bool:
        """Whether this is what a whole one had heard so far."""
        scores = list(self.scores.values())
        same = repr(scores) == repr(list(whole.scores.values())[: len(scores)])  # repr: the last one is NaN
        return same and self.tokens == whole.tokens[: len(self.tokens)] and self.receipt in ("", whole.receipt)


def jobs(seed: int = 1) -> list[Job]:
    """Of both kinds: prompts of 1 to 150 tokens, and replies that outgrow their quota (pages of 64 rows) together."""
    chance = random.Random(seed)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(chance.randrange(VOCAB) for _ in range(length))

    made = [
        Job(prompt(length), Sampling(temperature=temperature, seed=seed + length, max_tokens=tokens, ignore_eos=True))
        for length, tokens, temperature in (
            (1, 20, 0.0),
            (62, 70, 0.9),
            (63, 66, 0.7),
            (60, 70, 0.0),
            (61, 68, 0.0),
            (150, 10, 1.1),
        )
    ]
    return [*made, Job(prompt(64), decode_from=20), Job(prompt(60), decode_from=60)]


def events(client: Client, job: Job, **call: Any) -> AsyncGenerator[Any, None]:
    if job.decode_from is not None:
        return client.score(job.prompt, decode_from=job.decode_from, **call)
    return client.generate(job.prompt, job.sampling, background=len(job.prompt) > 60, **call)


async def hear(client: Client, job: Job) -> Heard:
    """To its end."""
    heard = Heard()
    async for event in events(client, job):
        heard.take(event)
    return heard


class Line:
    """A TCP connection to an address, by way of a port of its own, which can be cut: both sides are reset."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Line:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            end = writer.get_extra_info("socket")
            if end is not None and end.fileno() >= 0:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(ConnectionError):
            there, onward = await asyncio.open_connection(self._host, int(self._port))
            self._writers.append(onward)
            await asyncio.gather(_pump(reader, onward), _pump(there, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@dataclass
class Stream:
    """One request on its way to its end."""

    name: str
    job: Job
    ending: str
    heard: Heard = field(default_factory=Heard)

    def events(self, client: Client, **call: Any) -> AsyncGenerator[Any, None]:
        return events(client, self.job, request_id=self.name, **call)


class Clients:
    """Streams of `jobs` on a router, each ended as drawn, many at a time. `whole` is what each job is heard to the end."""

    def __init__(self, address: str, todo: Sequence[Job], whole: Sequence[Heard], seed: int = 0) -> None:
        self.left: Counter[str] = Counter()
        """Streams by how they ended."""
        self.stages: Counter[str] = Counter()
        """Streams that heard of a stage."""
        self._address = address
        self._client = Client(address)
        self._jobs = list(zip(todo, whole, strict=True))
        self._chance = random.Random(seed)
        self._names = itertools.count()
        self._reading: dict[str, asyncio.Task[str]] = {}

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def churn(self, at_once: int, streams: int | None = None, seconds: float = math.inf) -> None:
        """So many streams, or new ones for so long."""
        clock = asyncio.get_running_loop().time
        until, numbers = clock() + seconds, iter(range(streams)) if streams is not None else itertools.count()

        async def client() -> None:
            while clock() < until and next(numbers, None) is not None:
                await self.one(self._chance.choice(ENDINGS))

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(client())

    async def one(self, ending: str) -> None:
        """One stream, from its request to its end."""
        job, whole = self._chance.choice(self._jobs)
        stream = Stream(str(next(self._names)), job, ending)
        reading = asyncio.create_task(getattr(self, f"_{ending}", self._at_stage)(stream))
        self._reading[stream.name] = reading
        await asyncio.wait({reading})
        del self._reading[stream.name]
        self.left["told" if reading.cancelled() else reading.result()] += 1
        self.stages.update(stream.heard.stages)
        assert stream.heard.begins(whole), f"{stream}, and alone {whole}"

    def leave(self, name: str) -> None:
        """Tells the client of the stream of that name to cancel it now."""
        if name in self._reading:
            self._reading[name].cancel()

    # ---- endings: each returns how it came to its end -----------------------------------------------------------

    async def _at_stage(self, stream: Stream) -> str:
        chunks = self._chance.randint(1, 8) if stream.ending == "decoding" else 1
        async with aclosing(stream.events(self._client)) as events:
            async for event in events:
                if stream.heard.take(event) == stream.ending:
                    chunks -= 1
                    if not chunks:
                        return stream.ending
        return "whole"

    async def _unread(self, stream: Stream) -> str:
        try:
            async with asyncio.timeout(self._chance.choice([0, 0, 0.001, 0.01, 0.05])):
                return await self._at_stage(stream)
        except TimeoutError:
            return "unread"

    async def _asleep(self, stream: Stream) -> str:
        awake = self._chance.randint(1, 12)
        async with aclosing(stream.events(self._client)) as events:
            async for event in events:
                stream.heard.take(event)
                awake -= 1
                if not awake:
                    await asyncio.sleep(0.3 * self._chance.random())
                    return "asleep"
        return "whole"

    async def _deadline(self, stream: Stream) -> str:
        try:
            async with aclosing(stream.events(self._client, timeout=self._chance.choice([0.002, 0.02, 0.2, 0.6]))) as events:
                async for event in events:
                    stream.heard.take(event)
        except LatentPoolError as error:
            if "in the time given" not in str(error):
                raise
            return "deadline"
        return "whole"

    async def _closed(self, stream: Stream) -> str:
        async with Client(self._address) as client:
            events = stream.events(client)
            for _ in range(self._chance.randint(1, 10)):
                if stream.heard.take(await anext(events)) == "whole":
                    return "whole"
        with contextlib.suppress(asyncio.CancelledError, LatentPoolError):
            await events.aclose()
        return "closed"

    async def _cut(self, stream: Stream) -> str:
        async with Line(self._address) as line, Client(line.address) as client, aclosing(stream.events(client)) as events:
            cutting = asyncio.get_running_loop().call_later(0.3 * self._chance.random(), line.cut)
            try:
                async for event in events:
                    stream.heard.take(event)
            except LatentPoolError:
                return "cut"
            finally:
                cutting.cancel()
        return "whole"
