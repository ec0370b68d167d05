"""Puts the ranks' parts of a score together: each rank answers for its columns of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from latentpool.errors import EpochError
from latentpool.geometry import shares
from latentpool.v1 import rank_worker_pb2 as pb
from latentpool.v1 import router_pb2

MESSAGE_BYTES = 2 << 20
"""Raw logits of one message to a client, one row excepted: below the 4 MiB that gRPC clients accept by default."""


def assemble(
    parts: Sequence[pb.Scores], rows: int, first_position: int, following: Sequence[int], vocab: int, raw: bool
) -> Iterator[router_pb2.ScoredRows]:
    """Scores of `rows` rows at first_position, ..., from every rank's part in rank order. `following` are the tokens after each
    row; the last row's may be missing. log Z is merged from (max, sum) in rank order in float64. Raises EpochError where a
    part has not the promised shape."""
    largest = _stack([part.max for part in parts], "<f4", rows).astype(np.float64)
    sums = _stack([part.sum for part in parts], "<f8", rows)
    best = _stack([part.best for part in parts], "<u4", rows)
    next_ = _stack([part.next for part in parts], "<f4", rows).astype(np.float64)
    logits = _columns(parts, rows, vocab) if raw else None

    top = largest.max(axis=0)
    mass = np.zeros(rows)
    for rank in range(len(parts)):
        mass += sums[rank] * np.exp(largest[rank] - top)
    known = ~np.isnan(next_)
    chosen = np.where(known.any(axis=0), next_[known.argmax(axis=0), np.arange(rows)], np.nan)
    if logits is not None:
        columns = np.asarray(following, dtype=np.int64)
        chosen[: len(columns)] = logits[np.arange(len(columns)), columns]
    log_probs = chosen - (top + np.log(mass))
    winners = best[largest.argmax(axis=0), np.arange(rows)]

    step = rows if logits is None else max(1, MESSAGE_BYTES // (4 * vocab))
    for start in range(0, rows, step):
        end = min(start + step, rows)
        yield router_pb2.ScoredRows(
            first_position=first_position + start,
            next_log_probs=log_probs[start:end].tolist(),
            best_ids=winners[start:end].tolist(),
            logits=b"" if logits is None else logits[start:end].tobytes(),
        )


def _stack(parts: Sequence[bytes], dtype: str, rows: int) -> npt.NDArray[np.generic]:
    """[ranks, rows] of one of the parts' arrays."""
    arrays = [np.frombuffer(part, dtype=dtype) for part in parts]
    for rank, array in enumerate(arrays):
        if len(array) != rows:
            raise EpochError(f"rank {rank} scored {len(array)} rows where {rows} were asked")
    return np.stack(arrays)


def _columns(parts: Sequence[pb.Scores], rows: int, vocab: int) -> npt.NDArray[np.float32]:
    """[rows, vocabulary]: the ranks' columns side by side."""
    blocks = []
    for rank, (part, columns) in enumerate(zip(parts, shares(vocab, len(parts)), strict=True)):
        if len(part.raw) != rows * columns * 4:
            raise EpochError(f"rank {rank} sent {len(part.raw)} bytes of logits: {rows} rows of {columns} float32 expected")
        blocks.append(np.frombuffer(part.raw, dtype="<f4").reshape(rows, columns))
    return np.concatenate(blocks, axis=1)
