"""The sampler over ranks: the same token however the vocabulary is split and however many candidates it takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from harness import Ranks, oracle

from kernels.numpy import NumpyKernels
from latentpool.geometry import shares
from services.rank_worker import frames
from services.rank_worker.exchange.inproc import Hub
from services.rank_worker.link import Link
from services.rank_worker.sample import WIDTH, Draws, Sampler

VOCABULARY = 7001


def draws(**changes: object) -> Draws:
    """Eight rows: greedy, plain, and every cut; others flat enough to need more candidates than WIDTH."""
    values: dict[str, np.ndarray] = {
        "temperature": np.array([0.0, 1.0, 1.0, 1.0, 4.0, 0.7, 50.0, 2.0]),
        "top_k": np.array([0, 0, 40, 0, 0, 1024, 0, 0], np.int32),
        "top_p": np.array([1.0, 1.0, 1.0, 0.9, 0.99, 0.5, 0.95, 1.0]),
        "min_p": np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.0, 1e-6]),
        "seed": np.arange(8, dtype=np.uint64) + np.uint64(2**63),
        "position": np.arange(8, dtype=np.uint64) * np.uint64(100),
    }
    return Draws(**(values | changes))  # type: ignore[arg-type]


def sampled(logits: np.ndarray, world: int) -> list[list[int]]:
    """Every rank's tokens for logits [8, VOCABULARY] split over `world` ranks."""
    columns = shares(VOCABULARY, world)
    starts = np.cumsum([0, *columns])
    hub = Hub(world)
    members = [hub.member(rank) for rank in range(world)]
    samplers = [Sampler(NumpyKernels("f32"), Link(member, 20.0), columns, 8) for member in members]

    def run(rank: int) -> list[int]:
        members[rank].connect([member.address for member in members], 1, 10.0)
        part = np.ascontiguousarray(logits[:, starts[rank] : starts[rank + 1]])
        tokens = samplers[rank].sample(part, draws()).tolist()
        members[rank].close()
        return tokens  # type: ignore[no-any-return]

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_tokens_do_not_depend_on_the_split(scale: float) -> None:
    logits = (np.random.default_rng(3).standard_normal((8, VOCABULARY)) * scale).astype(np.float32)
    alone = sampled(logits, 1)[0]
    assert alone[0] == int(logits[0].argmax())
    for world in (2, 3, 5):
        assert sampled(logits, world) == [alone] * world


def test_flat_rows_really_need_more_than_the_first_candidates() -> None:
    """0.95 of a nearly flat distribution over 7,001 tokens is far more than WIDTH tokens: asking once does not do."""
    logits = np.random.default_rng(3).standard_normal((8, VOCABULARY)).astype(np.float32)
    member = Hub(1).member(0)
    sampler = Sampler(NumpyKernels("f32"), Link(member, 1.0), [VOCABULARY], 8)
    member.connect([member.address], 1, 1.0)
    first = sampler._draw(logits, draws(), WIDTH)
    assert first[6] == -1
    assert (sampler.sample(logits, draws()) >= 0).all()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_log_probs_are_those_of_the_raw_logits(world: int) -> None:
    """Scores of sampled tokens, merged over ranks, against a log-softmax of the same row scored as a forced token."""
    model, expected = oracle("tiny")
    prompt = expected["input_ids"].tolist()
    ranks = Ranks(model, world)
    ranks.begin(0, range(4), temperature=1.3, seed=5, top_p=0.8)
    results = ranks.agree(frames.Prompt(0, 0, prompt, True, log_probs=4))
    check(ranks, results, results[0].results[0].tokens, expected["logits"][-1:])
    ranks.begin(1, range(4, 8))
    ranks.prompt(1, prompt)
    for _ in range(6):
        token = results[0].results[0].tokens[-1]
        row, _ = ranks.decode([1], 1, [token])
        results = ranks.agree(frames.Decode([0], 1, [], log_probs=4))
        check(ranks, results, results[0].results[0].tokens, row)
    ranks.close()


def check(ranks: Ranks, results: list[frames.RoundResult], tokens: list[int], logits: np.ndarray) -> None:
    scores = [result.results[0].scores for result in results]
    top = np.concatenate([np.frombuffer(s.max, np.float32) for s in scores])  # type: ignore[union-attr]
    sums = np.concatenate([np.frombuffer(s.sum, np.float64) for s in scores])  # type: ignore[union-attr]
    chosen = np.concatenate([np.frombuffer(s.next, np.float32) for s in scores])  # type: ignore[union-attr]
    row = logits[0].astype(np.float64)
    log_z = np.log(np.exp(row - row.max()).sum()) + row.max()
    assert np.log((sums * np.exp(top.astype(np.float64) - top.max())).sum()) + top.max() == pytest.approx(log_z, abs=1e-3)
    assert np.isfinite(chosen).sum() == 1
    assert np.nanmax(chosen) == pytest.approx(row[tokens[0]], abs=1e-3)
    ids = np.stack([np.frombuffer(s.top_ids, np.uint32) for s in scores])  # type: ignore[union-attr]
    tops = np.stack([np.frombuffer(s.top_logits, np.float32) for s in scores])  # type: ignore[union-attr]
    order = np.argsort(-tops.reshape(-1), kind="stable")[:3]
    assert ids.reshape(-1)[order].tolist() == np.argsort(-row, kind="stable")[:3].tolist()
