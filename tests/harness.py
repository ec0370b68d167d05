"""Ranks without services: W executors in threads over the in-process exchange, driven by round operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors.numpy import load_file

from kernels.numpy import NumpyKernels
from latentpool.errors import LinkError
from latentpool.geometry import Geometry, share
from services.rank_worker import frames
from services.rank_worker.arena import Arena
from services.rank_worker.exchange.inproc import Hub
from services.rank_worker.model.checkpoint import load_shard, open_checkpoint
from services.rank_worker.model.model import Model
from services.rank_worker.rounds import Rounds

ORACLE = Path(__file__).parent / "data" / "oracle"
RAW = 2


def oracle(case: str) -> tuple[Path, dict[str, np.ndarray]]:
    """The model directory and the expected tensors of a case."""
    directory = ORACLE / ("tiny" if case == "edge" else case)
    return directory, load_file(ORACLE / case / "expected.safetensors")


class Ranks:
    """W ranks of one group. `kernels_of(rank, kernels)` may wrap a rank's operations (to record, or to plant a fault)."""

    def __init__(
        self,
        model: Path,
        world: int = 1,
        *,
        dtype: str = "f32",
        kv_dtype: str | None = None,
        pages: int = 24,
        lanes: int = 2,
        context: int = 768,
        page_rows: int = 64,
        chunk_rows: int = 2048,
        split: bool = False,
        staging_rows: int = 4096,
        kernels_of: Callable[[int, Any], Any] = lambda _rank, kernels: kernels,
    ) -> None:
        self.geometry = Geometry.from_file(model).without_drafts()
        self.world = world
        self.page_rows = page_rows
        self.split = split
        self.chunk_rows = chunk_rows
        self.pool = ThreadPoolExecutor(world)
        self.members = [(hub := Hub(world)).member(0)] + [hub.member(rank) for rank in range(1, world)]
        self.arenas: list[Arena] = []
        self.rounds: list[Rounds] = []
        self.kernels: list[Any] = []
        self.seq = 0
        checkpoint = open_checkpoint(model, self.geometry)
        for rank, member in enumerate(self.members):
            kernels = kernels_of(rank, NumpyKernels(dtype))  # type: ignore[arg-type]
            shard = load_shard(checkpoint, world, rank, kernels, lambda _done, _total: None)
            arena = Arena(
                self.geometry, kernels, kv_dtype or dtype, world=world, rank=rank, pages=pages, lanes=lanes,
                context=context, page_rows=page_rows, split=split,
            )  # fmt: skip
            executor = Rounds(
                self.geometry, kernels, Model(self.geometry, kernels, shard, world, rank), arena, member,
                chunk_rows=chunk_rows, deadline=20.0, tick=lambda: None, staging_rows=staging_rows, audit=True,
            )  # fmt: skip
            self.kernels.append(kernels)
            self.arenas.append(arena)
            self.rounds.append(executor)
        addresses = [member.address for member in self.members]
        list(self.pool.map(lambda member: member.connect(addresses, 1, 10.0), self.members))

    def run(self, *operations: frames.Operation) -> list[frames.RoundResult]:
        """One round on all ranks, whatever their digests."""
        self.seq += 1
        round_ = frames.Round(1, 1, self.seq, list(operations))

        def execute(rank: int) -> frames.RoundResult:
            try:
                return self.rounds[rank].execute(round_)
            except BaseException:
                self.members[rank].abort()
                raise

        futures = [self.pool.submit(execute, rank) for rank in range(self.world)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, LinkError)):
            raise error  # the cause; others only lost their links to it
        return [future.result() for future in futures]

    def agree(self, *operations: frames.Operation) -> list[frames.RoundResult]:
        """One round on all ranks, whose digests must be equal."""
        results = self.run(*operations)
        for operation in zip(*(result.results for result in results), strict=True):
            assert len({rank.digest for rank in operation}) == 1
            assert len({rank.rows_digest for rank in operation} - {0}) <= 1
        return results

    def begin(
        self, lane: int, pages: Sequence[int], temperature: float = 0.0, top_k: int = 0, seed: int = 0, owner: int = 0,
        **cuts: float,
    ) -> None:  # fmt: skip
        bind = frames.Bind(lane, 100 + lane, temperature, top_k, seed, owner=owner, **cuts)
        self.agree(bind, frames.Table(lane, 0, list(pages)))

    def prompt(
        self, lane: int, tokens: Sequence[int], limit: int | None = None, *, borrowed: int = 0
    ) -> tuple[np.ndarray, int]:
        """Fills a prompt in chunks of at most `limit` rows: logits [n, V] of all its rows, and the first sampled token. The
        first `borrowed` rows run on borrowed pages, which are released after; others of a split group fetch."""
        limit = limit or self.chunk_rows
        parts, token, start = [], -1, 0
        while start < len(tokens):
            end = min(start + limit, len(tokens), borrowed if start < borrowed else len(tokens))
            mode = frames.LOCAL if not self.split else frames.BORROWED if start < borrowed else frames.FETCH
            chunk = list(tokens[start:end])
            operations: list[frames.Operation] = [frames.Prompt(lane, start, chunk, end == len(tokens), RAW, mode=mode)]
            if mode == frames.BORROWED and end in (borrowed, len(tokens)):
                operations.append(frames.Release(lane))
            results = self.agree(*operations)
            start = end
            parts.append(self.logits(results, 0))
            token = results[0].results[0].tokens[0] if results[0].results[0].tokens else token
        return np.concatenate(parts), token

    def decode(self, lanes: Sequence[int], width: int = 1, forced: Sequence[int] = ()) -> tuple[np.ndarray, list[int]]:
        """One decode operation: logits [lanes * width, V], lane-major, and its sampled tokens."""
        results = self.agree(frames.Decode(list(lanes), width, list(forced), RAW))
        return self.logits(results, 0), results[0].results[0].tokens

    def logits(self, results: Sequence[frames.RoundResult], operation: int) -> np.ndarray:
        """All ranks' vocabulary columns of one operation, side by side."""
        parts = []
        for rank, result in enumerate(results):
            columns = share(self.geometry.vocab, self.world, rank)
            scores = result.results[operation].scores
            assert scores is not None
            parts.append(np.frombuffer(scores.raw, np.float32).reshape(-1, columns.stop - columns.start))
        return np.concatenate(parts, axis=1)

    def close(self) -> None:
        list(self.pool.map(lambda member: member.close(), self.members))
        self.pool.shutdown()


class Recorder:
    """Wraps a backend and keeps copies of what chosen operations wrote: calls[name] is a list of argument dicts."""

    OUTPUTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "hyper_pre": ("X", "x", "post", "comb"),
        "hyper_post": ("y", "out"),
        "rms_norm": ("out",),
        "select": ("lists", "counts"),
        "route": ("experts", "weights"),
    }

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.calls: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in self.OUTPUTS}

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._kernels, name)
        if name not in self.OUTPUTS:
            return operation
        signature = inspect.signature(operation)

        def recorded(*args: Any, **kwargs: Any) -> None:
            operation(*args, **kwargs)
            bound = signature.bind(*args, **kwargs).arguments
            self.calls[name].append({key: np.array(bound[key]) for key in self.OUTPUTS[name]})

        return recorded
