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

_PADDING = 2**32 - 1
"""Id of an entry beyond a rank's columns; its logit is -inf."""


def assemble(
    parts: Sequence[pb.Scores], rows: int, first_position: int, following: Sequence[int], vocab: int, raw: bool
) -> Iterator[router_pb2.ScoredRows]:
    """Scores of `rows` rows at first_position, ..., from every rank's part in rank order. `following` are the tokens after each
    row; the last row's may be missing. log Z is merged from (max, sum) in rank order in float64. Raises EpochError where a
    part has not the promised shape."""
    best = _stack([part.best for part in parts], "<u4", rows)
    logits = _columns(parts, rows, vocab) if raw else None
    largest, log_z = _log_z(parts, rows)
    chosen = _following(parts, rows)
    if logits is not None:
        columns = np.asarray(following, dtype=np.int64)
        chosen[: len(columns)] = logits[np.arange(len(columns)), columns]
    log_probs = chosen - log_z
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


def sampled(parts: Sequence[pb.Scores], tokens: Sequence[int], top: int) -> list[router_pb2.TokenLogProb]:
    """Log-probabilities of sampled tokens, one a row of the ranks' parts, by the raw logits and in float64, with the `top`
    likeliest beside each (fewer only where the vocabulary has fewer): by descending logit, ties to the lower id. Ranks may have
    sent more than `top`. Raises EpochError where a part has not the promised shape or no rank knows a sampled token."""
    rows = len(tokens)
    _, log_z = _log_z(parts, rows)
    chosen = _following(parts, rows)
    if np.isnan(chosen).any():
        row = int(np.isnan(chosen).argmax())
        raise EpochError(f"no rank scored token {tokens[row]}, which was sampled")
    ids, logits = _tops(parts, rows, top)
    log_probs = (chosen - log_z).tolist()
    top_log_probs = logits - log_z[:, None]
    kept = (ids != _PADDING).sum(axis=1).tolist()  # padding is last
    return [
        router_pb2.TokenLogProb(
            log_prob=log_probs[row], top_ids=ids[row, :count].tolist(), top_log_probs=top_log_probs[row, :count].tolist()
        )
        for row, count in enumerate(kept)
    ]


def _log_z(parts: Sequence[pb.Scores], rows: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Every rank's largest logit [ranks, rows], and log Z [rows], merged in rank order in float64."""
    largest = _stack([part.max for part in parts], "<f4", rows).astype(np.float64)
    sums = _stack([part.sum for part in parts], "<f8", rows)
    top = largest.max(axis=0)
    mass = np.zeros(rows)
    for rank in range(len(parts)):
        mass += sums[rank] * np.exp(largest[rank] - top)
    return largest, top + np.log(mass)


def _following(parts: Sequence[pb.Scores], rows: int) -> npt.NDArray[np.float64]:
    """Logits of the tokens that follow [rows], each from the rank whose column it is; NaN where nobody knows."""
    next_ = _stack([part.next for part in parts], "<f4", rows).astype(np.float64)
    known = ~np.isnan(next_)
    return np.where(known.any(axis=0), next_[known.argmax(axis=0), np.arange(rows)], np.nan)


def _tops(parts: Sequence[pb.Scores], rows: int, top: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float64]]:
    """Ids and logits [rows, at most top] of the likeliest of all ranks."""
    ids, logits = [], []
    for rank, part in enumerate(parts):
        width = len(part.top_ids) // (4 * rows)
        if width < top or not len(part.top_ids) == len(part.top_logits) == 4 * rows * width:
            raise EpochError(
                f"rank {rank} sent {len(part.top_ids)} bytes of likeliest ids and {len(part.top_logits)} of their logits for "
                f"{rows} rows: {top} of 4 bytes a row were asked"
            )
        ids.append(np.frombuffer(part.top_ids, "<u4").reshape(rows, width))
        logits.append(np.frombuffer(part.top_logits, "<f4").reshape(rows, width))
    all_ids, all_logits = np.concatenate(ids, axis=1), np.concatenate(logits, axis=1).astype(np.float64)
    order = np.lexsort((all_ids, -all_logits), axis=1)[:, :top]
    return np.take_along_axis(all_ids, order, axis=1), np.take_along_axis(all_logits, order, axis=1)


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
