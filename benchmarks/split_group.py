"""What benchmarks/split.py needs beside the public calls: rounds as engines answer them, room that is stated, the bare link."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

import services.pool_manager.service as pool_manager
from latentpool.cli.group import LocalGroup
from services.rank_worker import frames
from services.rank_worker.engine_link import EngineLink
from services.rank_worker.link import Channel, Link
from services.rank_worker.split.fetch import PIECE_ROWS

PATIENCE = 120.0
STREAMED_ROWS = 32 * PIECE_ROWS
EXCHANGES = 2000


# ---- rounds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One engine's answer to one round, and when its front read it."""

    at: float
    operations: Sequence[frames.Operation]
    result: frames.RoundResult

    @property
    def seconds(self) -> float:
        return self.result.compute_seconds + self.result.exchange_seconds

    def decodes(self, lanes: int) -> bool:
        """Nothing but one token of so many lanes."""
        match self.operations:
            case [frames.Decode() as decode]:
                return len(decode.lanes) == lanes
        return False

    def has(self, kind: type[frames.Operation]) -> bool:
        return any(isinstance(operation, kind) for operation in self.operations)


class Journal:
    """Every round of every engine whose front is in this process."""

    def __init__(self) -> None:
        self._sent: dict[EngineLink, dict[int, Sequence[frames.Operation]]] = defaultdict(dict)
        self._answers: dict[EngineLink, list[Answer]] = defaultdict(list)

    def sent(self, link: EngineLink, frame: frames.Round) -> None:
        self._sent[link][frame.seq] = frame.operations

    def answered(self, link: EngineLink, result: frames.RoundResult) -> None:
        self._answers[link].append(Answer(time.perf_counter(), self._sent[link].pop(result.seq), result))

    def of(self, group: LocalGroup, since: float = 0.0) -> list[list[Answer]]:
        """[rank][round] of a group, from a moment of `time.perf_counter` on."""
        links = [worker._engine for worker in group.workers]
        return [[answer for answer in self._answers[link] if answer.at >= since] for link in links]


@contextlib.contextmanager
def journal() -> Iterator[Journal]:
    """Writes down the rounds of groups that are made inside."""
    kept = Journal()
    send, read = EngineLink.send, EngineLink.read

    async def noted_send(link: EngineLink, frame: frames.ToEngine) -> None:
        if isinstance(frame, frames.Round):
            kept.sent(link, frame)
        await send(link, frame)

    async def noted_read(link: EngineLink) -> frames.ToFront:
        frame = await read(link)
        if isinstance(frame, frames.RoundResult):
            kept.answered(link, frame)
        return frame

    link_class: Any = EngineLink
    link_class.send, link_class.read = noted_send, noted_read
    try:
        yield kept
    finally:
        link_class.send, link_class.read = send, read


def sent_bytes(answers: Iterable[Answer]) -> dict[str, int]:
    """Bytes by kind that the ranks sent in these rounds."""
    total: dict[str, int] = defaultdict(int)
    for answer in answers:
        for kind, count in msgspec.structs.asdict(answer.result.sent).items():
            total[kind] += count
    return dict(total)


# ---- room --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def page_bytes(count: int) -> Iterator[None]:
    """Plans that are made inside have so many bytes a rank for pages, whatever room there is: lanes get theirs on top."""
    choose = pool_manager.choose

    def stated(*arguments: Any, **named: Any) -> Any:
        room = [count + (named["lanes"] - 1) * fixed for fixed in named["fixed"]]
        return choose(*arguments, **(named | {"room": room, "cache_budget": 0}))

    manager: Any = pool_manager
    manager.choose = stated
    try:
        yield
    finally:
        manager.choose = choose


# ---- the bare link -----------------------------------------------------------------------------------------------------


def link_figures(row_values: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Of two processes, pinned to cores of their own, with nothing to do but exchange, median of each: bytes a second of f32
    rows that go one way as carries and fetched rows do, and seconds of a simultaneous exchange of so many bytes."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(2):
            ours, theirs = spawn.Pipe()
            processes.append(spawn.Process(target=_bare, args=(rank, theirs, row_values, list(sizes))))
            processes[-1].start()
            pipes.append(ours)
        addresses = [_hear(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(addresses)
        figures: dict[str, Any] = [_hear(pipe) for pipe in pipes][1]  # the one that receives ends last
        return figures
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def _hear(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE):
        raise TimeoutError(f"a process that measures the link said nothing for {PATIENCE:g} s")
    return pipe.recv()


def _bare(rank: int, pipe: Connection, row_values: int, sizes: list[int]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    from services.rank_worker.exchange.ucx import make

    exchange = make(rank, 2, "lo")
    link = Link(exchange, PATIENCE)
    rows = link.channel("rows", (PIECE_ROWS, row_values), np.dtype(np.float32), "rows")
    blocks = [link.channel(f"of {size}", (1, size), np.dtype(np.uint8), "sums") for size in sizes]
    pipe.send(exchange.address)
    exchange.connect(pipe.recv(), 1, PATIENCE)

    def nothing(_piece: slice, _buffer: Any) -> None:
        pass

    def stream() -> None:
        rows.stream(0, [1], STREAMED_ROWS, PIECE_ROWS, "rows", nothing, nothing)

    one_way = _timed(stream, 20)
    exchanges = {size: _timed(_exchange(block), EXCHANGES) for size, block in zip(sizes, blocks, strict=True)}
    pipe.send({"bytes_per_second": STREAMED_ROWS * row_values * 4 / one_way, "exchange_seconds": exchanges})
    exchange.close()


def _exchange(channel: Channel) -> Callable[[], object]:
    return lambda: channel.all_to_all(1)


def _timed(once: Callable[[], object], count: int) -> float:
    """Median seconds of `count` calls, after a tenth as many for warming up."""
    for _ in range(1 + count // 10):
        once()
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        once()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)
