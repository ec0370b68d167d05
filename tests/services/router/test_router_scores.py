"""Scores, put together from the ranks' columns, against NumPy over whole rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_fake_model import VOCAB, fold, logits
from router_fakes import Rig

from latentpool.errors import EpochError
from latentpool.geometry import shares
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


# ---- sampled tokens -------------------------------------------------------------------------------------------------


def _sampled_parts(values: np.ndarray, world: int, tokens: list[int], width: int) -> list[pb.Scores]:
    """What the ranks send by the proto's words: columns cut among them, `width` likeliest of each, padded."""
    parts, start = [], 0
    for columns in shares(values.shape[1], world):
        mine = values[:, start : start + columns]
        order = np.argsort(-mine, axis=1, kind="stable")[:, :width]
        ids = np.full((len(values), width), 2**32 - 1, np.uint32)
        logits = np.full((len(values), width), -np.inf, np.float32)
        ids[:, : order.shape[1]] = order + start
        logits[:, : order.shape[1]] = np.take_along_axis(mine, order, axis=1)
        inside = [start <= token < start + columns for token in tokens]
        after = [row[t - start] if here else np.nan for row, t, here in zip(mine, tokens, inside, strict=True)]
        largest = mine.max(axis=1)
        parts.append(
            pb.Scores(
                max=largest.astype("<f4").tobytes(),
                sum=np.exp(mine.astype(np.float64) - largest[:, None]).sum(axis=1).astype("<f8").tobytes(),
                best=(mine.argmax(axis=1) + start).astype("<u4").tobytes(),
                next=np.array(after, "<f4").tobytes(),
                top_ids=ids.astype("<u4").tobytes(),
                top_logits=logits.astype("<f4").tobytes(),
            )
        )
        start += columns
    return parts


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_sampled_tokens_are_scored_as_by_whole_rows(data: st.DataObject) -> None:
    world, rows = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 5))
    vocab = data.draw(st.integers(world, 60))
    top = data.draw(st.integers(0, 20))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scale = data.draw(st.sampled_from([0.01, 3.0, 300.0]))
    values = (random.standard_normal((rows, vocab)) * scale).astype(np.float32)
    if data.draw(st.booleans()):
        values = np.round(values)  # ties, among ranks too
    tokens = random.integers(0, vocab, rows).tolist()
    got = scores.sampled(_sampled_parts(values, world, tokens, top + data.draw(st.integers(0, 3))), tokens, top)

    wide = values.astype(np.float64)
    shifted = wide - wide.max(axis=1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    assert len(got) == rows
    for row, entry in enumerate(got):
        np.testing.assert_allclose(entry.log_prob, log_softmax[row, tokens[row]], rtol=1e-13, atol=1e-12)
        order = sorted(range(vocab), key=lambda i: (-values[row, i], i))[:top]
        assert list(entry.top_ids) == order
        np.testing.assert_allclose(entry.top_log_probs, log_softmax[row, order], rtol=1e-13, atol=1e-12)
        if tokens[row] in order:
            assert entry.top_log_probs[order.index(tokens[row])] == entry.log_prob  # the same bits


def test_the_order_of_ranks_is_the_order_of_the_sum() -> None:
    """Sums that differ by their order in float64: rank order is the one that counts."""
    largest, sums = np.float32(0), [1.0, 1e-16, 1e-16]
    parts = [
        pb.Scores(
            max=largest.tobytes(),
            sum=np.array([s], "<f8").tobytes(),
            next=np.array([0.0 if rank == 0 else np.nan], "<f4").tobytes(),
        )
        for rank, s in enumerate(sums)
    ]
    assert scores.sampled(parts, [0], 0)[0].log_prob == 0.0
    assert scores.sampled(parts[::-1], [0], 0)[0].log_prob == -np.log(np.float64(1e-16 + 1e-16) + 1.0) != 0.0


def test_sampled_parts_of_the_wrong_shape_name_the_rank() -> None:
    values = np.zeros((2, 6), np.float32)
    parts = _sampled_parts(values, 2, [1, 4], 2)
    with pytest.raises(
        EpochError, match="rank 0 sent 16 bytes of likeliest ids and 16 of their logits for 2 rows: 3 of 4 bytes"
    ):
        scores.sampled(parts, [1, 4], 3)
    parts[1].top_logits = b""
    with pytest.raises(EpochError, match="rank 1 sent 16 bytes of likeliest ids and 0 of their logits"):
        scores.sampled(parts, [1, 4], 1)
    parts = _sampled_parts(values, 2, [1, 4], 2)
    parts[1].next = np.array([np.nan, np.nan], "<f4").tobytes()
    with pytest.raises(EpochError, match="no rank scored token 4, which was sampled"):
        scores.sampled(parts, [1, 4], 1)
