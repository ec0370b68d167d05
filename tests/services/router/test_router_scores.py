"""Scores, put together from the ranks' columns, against NumPy over whole rows."""

from __future__ import annotations

import numpy as np
import pytest
from router_fakes import VOCAB, Rig, fold, logits

from latentpool.errors import EpochError
from latentpool.receipts import receipt
from latentpool.v1 import rank_worker_pb2 as pb
from latentpool.v1 import router_pb2
from services.router import compose, scores

pytestmark = pytest.mark.timeout(30)


def expected(tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Raw logits [n, V] of every row, and log-probabilities [n] of the tokens that follow, in float64."""
    state, rows = 0, []
    for token in tokens:
        state = fold(state, [token])
        rows.append(logits(state))
    raw = np.stack(rows)
    wide = raw.astype(np.float64)
    log_probs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return raw, log_probs[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("decode_from", [None, 1, 64, 131, 150])
@pytest.mark.parametrize("world", [1, 3])
async def test_scores_are_those_of_whole_rows(world: int, decode_from: int | None, raw: bool) -> None:
    tokens = [i * 13 % 240 for i in range(150)]
    whole, log_probs = expected(tokens)
    async with Rig(world, chunk_rows=64) as rig:
        await rig.client.wait_ready(10)
        events = [e async for e in rig.client.score(tokens, decode_from=decode_from, raw_logits=raw)]
        parts = [e for e in events if isinstance(e, router_pb2.ScoredRows)]
        position = 0
        for part in parts:
            assert part.first_position == position
            position += len(part.best_ids)
        assert position == 150
        got = np.array([p for part in parts for p in part.next_log_probs])
        np.testing.assert_allclose(got[:-1], log_probs, rtol=0, atol=1e-12)
        assert np.isnan(got[-1])
        assert [b for part in parts for b in part.best_ids] == whole.argmax(axis=1).tolist()
        if raw:
            joined = np.concatenate([np.frombuffer(part.logits, "<f4").reshape(-1, VOCAB) for part in parts])
            np.testing.assert_array_equal(joined, whole)
        else:
            assert all(part.logits == b"" for part in parts)
        split = decode_from or 150
        completion = events[-1]
        assert (completion.usage.prompt_tokens, completion.usage.generated_tokens) == (split, 150 - split)
        assert completion.receipt.sha256 == receipt(tokens[:split], tokens[split:])
        windows = [o.decode.rows for r in rig.workers[0].rounds for o in r.operations if o.HasField("decode")]
        left = 150 - split
        assert windows == [4] * (left // 4) + [left % 4] * (left % 4 > 0)


async def test_raw_rows_come_in_messages_and_rounds_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "MESSAGE_BYTES", 10 * VOCAB * 4)
    monkeypatch.setattr(compose, "REPLY_BYTES", 128 * VOCAB * 4)
    async with Rig(2) as rig:
        await rig.client.wait_ready(10)
        events = [e async for e in rig.client.score(list(range(200)), raw_logits=True)]
        parts = [e for e in events if isinstance(e, router_pb2.ScoredRows)]
        assert max(len(part.best_ids) for part in parts) == 10
        assert sum(len(part.best_ids) for part in parts) == 200
        chunks = [len(o.prompt.tokens) for r in rig.workers[0].rounds for o in r.operations if o.HasField("prompt")]
        assert chunks == [128, 72]


def _part(values: np.ndarray, start: int, follows: int) -> pb.Scores:
    top = values.max(axis=1)
    inside = start <= follows < start + values.shape[1]
    return pb.Scores(
        max=top.astype("<f4").tobytes(),
        sum=np.exp(values.astype(np.float64) - top[:, None]).sum(axis=1).astype("<f8").tobytes(),
        best=(values.argmax(axis=1) + start).astype("<u4").tobytes(),
        next=np.array([values[0, follows - start] if inside else np.nan], "<f4").tobytes(),
    )


def test_ties_go_to_the_lower_id_and_far_apart_ranks_merge() -> None:
    row = np.full((1, 6), -900.0, np.float32)
    row[0, [1, 4]] = 900.0
    parts = [_part(row[:, :3], 0, 4), _part(row[:, 3:], 3, 4)]
    (rows,) = scores.assemble(parts, 1, 10, [4], 6, raw=False)
    assert rows.best_ids == [1]
    assert rows.first_position == 10
    np.testing.assert_allclose(rows.next_log_probs, [-np.log(2)], atol=1e-15)


def test_parts_of_the_wrong_shape_name_the_rank() -> None:
    row = np.zeros((1, 6), np.float32)
    parts = [_part(row[:, :3], 0, 4), _part(row[:, 3:], 3, 4)]
    parts[1].sum = b""
    with pytest.raises(EpochError, match="rank 1 scored 0 rows where 1 were asked"):
        list(scores.assemble(parts, 1, 0, [4], 6, raw=False))
    parts[1] = _part(row[:, 3:], 3, 4)
    with pytest.raises(EpochError, match="rank 0 sent 0 bytes of logits: 1 rows of 3 float32 expected"):
        list(scores.assemble(parts, 1, 0, [4], 6, raw=True))
