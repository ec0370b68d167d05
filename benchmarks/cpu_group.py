"""What benchmarks/cpu.py measures on a group of latentpool, over its public calls; and where the time of a round goes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latentpool.cli.calls import until_serving
from latentpool.cli.load import spread
from latentpool.cli.supervisor import Group
from latentpool.client import Client
from latentpool.config import Settings
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2
from services.rank_worker import frames
from services.rank_worker.engine_link import EngineLink

START_SECONDS = 120.0
SETTLED = 32
"""Tokens that every stream has got before a prompt is put beside them."""


class Stream:
    """One greedy reply as it is read: its tokens, and the time at which each came."""

    def __init__(self, client: Client, prompt: list[int], tokens: int) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []
        self.begun = time.perf_counter()
        self.task = asyncio.create_task(self._read(client, prompt, tokens))

    async def _read(self, client: Client, prompt: list[int], tokens: int) -> None:
        async for event in client.generate(prompt, Sampling(max_tokens=tokens, ignore_eos=True)):
            if isinstance(event, router_pb2.Chunk):
                self.ids += event.token_ids
                self.times += [time.perf_counter()] * len(event.token_ids)

    async def until(self, tokens: int) -> None:
        """Waits until that many tokens came, or the reply ended."""
        while len(self.ids) < tokens and not self.task.done():  # noqa: ASYNC110 - read often enough, and costs the group nothing
            await asyncio.sleep(0.005)

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens that both came between two moments."""
        times = [moment for moment in self.times if begin <= moment <= end]
        return [after - before for before, after in itertools.pairwise(times)]


async def decode_rate(client: Client, prompts: Sequence[list[int]], tokens: int) -> tuple[float, list[int]]:
    """Tokens a second while all streams decode (after the last first token, until the first one ends), and the reply to the
    first prompt."""
    streams = [Stream(client, prompt, tokens) for prompt in prompts]
    await asyncio.gather(*(stream.task for stream in streams))
    begin = max(stream.times[0] for stream in streams)
    end = min(stream.times[-1] for stream in streams)
    count = sum(begin < moment <= end for stream in streams for moment in stream.times)
    return count / (end - begin), streams[0].ids


async def prefill_seconds(client: Client, prompt: list[int]) -> float:
    """From the request to its one token."""
    stream = Stream(client, prompt, 1)
    await stream.task
    return stream.times[0] - stream.begun


async def gaps_beside(
    client: Client, prompts: Sequence[list[int]], long: list[int], context: int
) -> tuple[list[float], list[float]]:
    """Gaps of streams that decode: alone, and while a long prompt fills beside them."""
    streams = [Stream(client, prompt, context - len(prompt)) for prompt in prompts]
    try:
        await asyncio.gather(*(stream.until(SETTLED) for stream in streams))
        settled = max(stream.times[0] for stream in streams)
        filling = Stream(client, long, 1)
        await filling.task
        alone = [gap for stream in streams for gap in stream.gaps(settled, filling.begun)]
        beside = [gap for stream in streams for gap in stream.gaps(filling.begun, filling.times[0])]
        return alone, beside
    finally:
        await asyncio.gather(*(stream.cancel() for stream in streams))


@dataclass(frozen=True)
class Job:
    """What is measured. Prompts are token ids; the decode prompts have one length."""

    decode_prompts: list[list[int]]
    prefill_prompts: list[list[int]]
    streams: list[int]
    decode_tokens: int
    repeats: int
    context: int
    gap_streams: int = 4


async def measure(client: Client, job: Job) -> dict[str, Any]:
    """All rates and gaps of a group that serves; medians of the repeats."""
    await decode_rate(client, job.decode_prompts[:1], 8)  # warms up
    prefill = {}
    for prompt in job.prefill_prompts:
        times = [await prefill_seconds(client, prompt) for _ in range(job.repeats)]
        prefill[str(len(prompt))] = len(prompt) / statistics.median(times)
    decode: dict[str, float] = {}
    reply: list[int] = []
    for streams in job.streams:
        runs = [await decode_rate(client, job.decode_prompts[:streams], job.decode_tokens) for _ in range(job.repeats)]
        decode[str(streams)] = statistics.median(rate for rate, _ in runs)
        reply = reply or runs[0][1]
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(job.repeats):
        parts = await gaps_beside(client, job.decode_prompts[: job.gap_streams], job.prefill_prompts[-1], job.context)
        alone, beside = alone + parts[0], beside + parts[1]
    return {
        "prefill_tokens_per_second": prefill,
        "decode_tokens_per_second": decode,
        "gap_seconds_alone": spread(alone),
        "gap_seconds_beside_a_prompt": spread(beside),
        "reply": reply,
    }


# ---- processes -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def processes(settings: Settings) -> AsyncIterator[Group]:
    """A group of real processes, while it serves. Raises EpochError if one ends by itself before."""
    group = Group(settings, lambda _name, _line: None)
    try:
        await group.start()
        async with asyncio.timeout(START_SECONDS):
            await _serving(group)
        yield group
    finally:
        await group.stop()


async def _serving(group: Group) -> None:
    serving = asyncio.create_task(until_serving(group.settings.address))
    failed = asyncio.create_task(group.failed())
    try:
        await asyncio.wait({serving, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
    finally:
        for task in (serving, failed):
            task.cancel()


def peak_bytes(group: Group) -> dict[str, int]:
    """The most memory that each process has had resident so far; a rank is its front and its engine."""
    peaks = {}
    for child in group.children:
        assert child.process is not None
        pid = child.process.pid
        peaks[child.name + (" front" if child.name.startswith("rank") else "")] = _high_water(pid)
        for engine in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            peaks[f"{child.name} engine"] = _high_water(int(engine))
    return peaks


def _high_water(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


# ---- rounds ----------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """One engine's rounds as its front sees them. Between two answers an engine first waits for the next round (gRPC and the
    router: nothing if rounds run ahead), then the round and its answer cross the pipe, and it computes and exchanges."""

    sent: dict[int, float] = field(default_factory=dict)
    answered: float = 0.0
    rounds: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def note(self, result: frames.RoundResult) -> None:
        now = time.perf_counter()
        sent = self.sent.pop(result.seq)
        if self.answered:
            waited = max(sent - self.answered, 0.0)
            whole = now - self.answered
            self.rounds += 1
            self.seconds["compute"] += result.compute_seconds
            self.seconds["exchange"] += result.exchange_seconds
            self.seconds["grpc and router"] += waited
            self.seconds["pipe"] += whole - waited - result.compute_seconds - result.exchange_seconds
        self.answered = now


@contextlib.contextmanager
def clocked() -> Iterator[dict[EngineLink, Clock]]:
    """A clock on each engine of this process's fronts."""
    clocks: dict[EngineLink, Clock] = defaultdict(Clock)
    send, read = EngineLink.send, EngineLink.read

    async def timed_send(link: EngineLink, frame: frames.ToEngine) -> None:
        if isinstance(frame, frames.Round):
            clocks[link].sent[frame.seq] = time.perf_counter()
        await send(link, frame)

    async def timed_read(link: EngineLink) -> frames.ToFront:
        frame = await read(link)
        if isinstance(frame, frames.RoundResult):
            clocks[link].note(frame)
        return frame

    link_class: Any = EngineLink
    link_class.send, link_class.read = timed_send, timed_read
    try:
        yield clocks
    finally:
        link_class.send, link_class.read = send, read


async def shares(client: Client, clocks: dict[EngineLink, Clock], prompts: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Where the time of a round goes while these streams decode: seconds a round and each part's share, mean of the ranks."""
    streams = [Stream(client, prompt, tokens) for prompt in prompts]
    await asyncio.gather(*(stream.until(2) for stream in streams))
    for clock in clocks.values():
        clock.answered, clock.rounds = 0.0, 0
        clock.seconds.clear()
    await asyncio.wait({stream.task for stream in streams}, return_when=asyncio.FIRST_COMPLETED)
    total: dict[str, float] = defaultdict(float)
    for clock in clocks.values():
        for part, seconds in clock.seconds.items():
            total[part] += seconds
    rounds = sum(clock.rounds for clock in clocks.values())
    await asyncio.gather(*(stream.task for stream in streams))
    whole = sum(total.values())
    return {"rounds": rounds // len(clocks), "seconds_a_round": whole / rounds} | {
        "shares": {part: seconds / whole for part, seconds in total.items()}
    }
