"""Load on a router: requests drawn from a seed, sent in an open or a closed loop, and the statistics of what they saw."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from latentpool.client import GenerateEvent
from latentpool.errors import LatentPoolError
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2 as pb

Spread = dict[str, float]


class Generates(Protocol):
    """What load is put on: latentpool.client.Client, or what stands for it."""

    def generate(self, prompt: Sequence[int], sampling: Sampling | None = None) -> AsyncGenerator[GenerateEvent, None]: ...


@dataclass(frozen=True, slots=True)
class Workload:
    """Which requests are made. Lengths in tokens are log-normal with these medians, cut to what the group serves; arrivals
    are Poisson where there is a `rate` (requests a second), else a request begins when one of `concurrency` ends."""

    requests: int
    prompt_tokens: int
    reply_tokens: int
    spread: float
    """Standard deviation of the logarithm of a length; 0 makes all lengths equal."""
    seed: int
    rate: float | None = None
    concurrency: int = 1
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    arrival: float
    """Seconds after the start of the load at which it is due; 0 in a closed loop."""
    prompt: list[int]
    sampling: Sampling
    cut: bool = False
    """Whether the lengths that were drawn are longer than a conversation may be."""


@dataclass(slots=True)
class Trace:
    """What one request saw. Times are in seconds of one clock; `due` is when it should have been sent, so that a late client
    does not hide a slow group."""

    due: float
    prompt_tokens: int
    token_times: list[float] = field(default_factory=list)
    """Arrival of each reply token; tokens of one message arrive together."""
    finished: float | None = None
    queued_seconds: float = 0.0
    parked: int = 0
    carried: int = 0
    error: str = ""
    cut: bool = False
    """Whether its lengths were cut to the context."""


def draw(workload: Workload, vocab: int, context: int) -> Iterator[Request]:
    """The requests in order of arrival; equal arguments give equal requests. Token ids are of the lower half of the
    vocabulary, where no special tokens lie."""
    arrival, medians = 0.0, (workload.prompt_tokens, workload.reply_tokens)
    for index in range(workload.requests):
        generator = np.random.Generator(np.random.Philox(key=[workload.seed, index]))
        factors = np.exp(workload.spread * generator.standard_normal(2))
        wanted = [max(1, round(median * factor)) for median, factor in zip(medians, factors, strict=True)]
        prompt = min(wanted[0], context - 1)
        reply = min(wanted[1], context - prompt)
        ids = generator.integers(0, max(vocab // 2, 1), prompt).tolist()
        if workload.rate is not None:
            arrival += generator.exponential(1.0 / workload.rate)
        yield Request(
            arrival=arrival,
            prompt=ids,
            sampling=Sampling(temperature=workload.temperature, seed=index, max_tokens=reply, ignore_eos=True),
            cut=sum(wanted) > context,
        )


class Load:
    """One run of a workload. `traces` grows as requests are sent and may be read at any time."""

    def __init__(self, client: Generates, workload: Workload, clock: Callable[[], float] = time.perf_counter) -> None:
        self.traces: list[Trace] = []
        self.seconds = 0.0
        """How long the run took."""
        self._client = client
        self._workload = workload
        self._clock = clock

    async def run(self, vocab: int, context: int, seconds: float, stop: asyncio.Event) -> None:
        """Sends all requests and waits for their ends; after `seconds`, or once `stop` is set, what is still running is
        cancelled and stays unfinished in the traces."""
        begun = self._clock()
        requests = draw(self._workload, vocab, context)
        sending = asyncio.create_task(self._closed(requests) if self._workload.rate is None else self._open(requests, begun))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({sending, stopping}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.seconds = self._clock() - begun
            cut = not sending.done()
            for task in (sending, stopping):
                task.cancel()
            await asyncio.wait({sending, stopping})
        if not cut:
            sending.result()

    async def _open(self, requests: Iterator[Request], begun: float) -> None:
        async with asyncio.TaskGroup() as group:
            for request in requests:
                due = begun + request.arrival
                await asyncio.sleep(max(due - self._clock(), 0.0))
                group.create_task(self._send(request, due))

    async def _closed(self, requests: Iterator[Request]) -> None:
        async def one_by_one() -> None:
            for request in requests:
                await self._send(request, self._clock())

        async with asyncio.TaskGroup() as group:
            for _ in range(self._workload.concurrency):
                group.create_task(one_by_one())

    async def _send(self, request: Request, due: float) -> None:
        trace = Trace(due, len(request.prompt), cut=request.cut)
        self.traces.append(trace)
        try:
            async with aclosing(self._client.generate(request.prompt, request.sampling)) as events:
                async for event in events:
                    self._note(trace, event)
        except LatentPoolError as error:
            trace.error = f"{type(error).__name__}: {error}"

    def _note(self, trace: Trace, event: GenerateEvent) -> None:
        now = self._clock()
        if isinstance(event, pb.Chunk):
            trace.token_times += [now] * len(event.token_ids)
        elif isinstance(event, pb.Completion):
            trace.finished = now
            trace.queued_seconds = event.timings.queued_seconds
            trace.parked = event.usage.parked
            trace.carried = event.usage.carried


def gaps(trace: Trace) -> list[float]:
    """Seconds between each reply token and the one before it."""
    return [after - before for before, after in itertools.pairwise(trace.token_times)]


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, percentiles (interpolated linearly) and maximum; None of nothing."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    named = {"mean": np.mean(values), "p50": p50, "p90": p90, "p99": p99, "max": np.max(values)}
    return {name: float(value) for name, value in named.items()}


def summary(traces: Sequence[Trace], seconds: float) -> dict[str, Any]:
    """Statistics of a run that took so long, as JSON values. First token and whole request count from when a request was
    due; tokens of unfinished and failed requests count too; queue time is of those that finished."""
    done = [trace for trace in traces if trace.finished is not None]
    failed = [trace for trace in traces if trace.error]
    tokens = sum(len(trace.token_times) for trace in traces)
    return {
        "seconds": seconds,
        "requests": {
            "sent": len(traces),
            "finished": len(done),
            "failed": len(failed),
            "unfinished": len(traces) - len(done) - len(failed),
            "parked": sum(trace.parked > 0 for trace in traces),
            "cut_to_context": sum(trace.cut for trace in traces),
        },
        "times_parked": sum(trace.parked for trace in traces),
        "times_carried": sum(trace.carried for trace in traces),
        "prompt_tokens": sum(trace.prompt_tokens for trace in traces if trace.token_times),
        "reply_tokens": tokens,
        "reply_tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        "requests_per_second": len(done) / seconds if seconds > 0 else 0.0,
        "first_token_seconds": spread([trace.token_times[0] - trace.due for trace in traces if trace.token_times]),
        "gap_seconds": spread([gap for trace in traces for gap in gaps(trace)]),
        "queued_seconds": spread([trace.queued_seconds for trace in done]),
        "request_seconds": spread([trace.finished - trace.due for trace in done if trace.finished is not None]),
        "errors": dict(Counter(trace.error for trace in failed).most_common()),
    }
