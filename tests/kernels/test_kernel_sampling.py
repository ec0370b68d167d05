"""Sampling: the logarithm, the generator, the distribution, and that ranks together draw what one rank draws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import compute, normal

from kernels.api import Kernels
from kernels.numpy.sampling import exp, gumbel, ln, mix
from kernels.rows import Array

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


@given(st.floats(min_value=2.0**-1000, max_value=2.0**1000))
@settings(max_examples=300)
def test_the_logarithm(x: float) -> None:
    assert float(ln(np.array([x]))[0]) == pytest.approx(math.log(x), rel=1e-15, abs=0)


@given(st.integers(1, 1 << 20))
def test_the_logarithm_next_to_one(steps: int) -> None:
    for x in (1 - steps * 2.0**-53, 1 + steps * 2.0**-52):
        assert float(ln(np.array([x]))[0]) == pytest.approx(math.log(x), rel=1e-15, abs=0)


def test_the_mixer_is_the_finaliser_of_splitmix64() -> None:
    """The first outputs of splitmix64 from state 0, as published."""
    with np.errstate(over="ignore"):
        states = np.array([GOLDEN * n & MASK for n in (1, 2, 3)], np.uint64)
    assert [hex(z) for z in mix(states).tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def by_hand(seed: int, position: int, token: int) -> float:
    def finalise(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return z ^ (z >> 31)

    h = finalise((seed + GOLDEN) & MASK)
    h = finalise(((h ^ position) + GOLDEN) & MASK)
    h = finalise(((h ^ token) + GOLDEN) & MASK)
    return -math.log(-math.log((2 * (h >> 12) + 1) / 2**53))


@given(st.integers(0, MASK), st.integers(0, 1 << 40), st.integers(0, 1 << 20))
def test_gumbel_numbers(seed: int, position: int, token: int) -> None:
    ours = float(gumbel(seed, position, np.array([token], np.uint64))[0])
    assert ours == pytest.approx(by_hand(seed, position, token), rel=1e-13, abs=1e-13)


def draw(
    kernels: Kernels, logits: Array, parts: list[int], temperature: float, top_k: int, seed: int, position: int,
    top_p: float = 1.0, min_p: float = 0.0, told: int = 4,
) -> list[int]:  # fmt: skip
    """Tokens of rows [T, V] when the vocabulary is cut at `parts`; each rank tells `told` candidates, then twice as many."""
    T, V = logits.shape
    cut = temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0)
    C = max(top_k, told) if cut else 1
    at = np.full(T, seed, np.uint64), np.full(T, position, np.uint64)
    heat, kept = np.full(T, temperature), np.full(T, C if cut else 0, np.int32)
    edges = [0, *parts, V]
    columns = np.diff(edges).astype(np.int32)
    scores, ids = np.empty((len(columns), T, C)), np.empty((len(columns), T, C), np.int32)
    masses = np.empty((len(columns), T), np.uint64)
    for w, (low, high) in enumerate(itertools.pairwise(edges)):
        mine = np.ascontiguousarray(logits[:, low:high])
        kernels.candidates(mine, low, heat, kept, *at, scores[w], ids[w])
        kernels.mass(mine, logits.max(1).astype(np.float64), heat, masses[w])
    cuts = np.full(T, top_k, np.int32), np.full(T, top_p), np.full(T, min_p)
    out, reverse = np.full(T, -7, np.int32), np.full(T, -7, np.int32)
    kernels.draw(scores, ids, columns, masses, heat, *cuts, *at, out)
    kernels.draw(scores[::-1].copy(), ids[::-1].copy(), columns[::-1].copy(), masses[::-1].copy(), heat, *cuts, *at, reverse)
    assert np.array_equal(out, reverse), "ties are decided by the token id and not by where it stands"
    tokens = out.tolist()
    if -1 in tokens:
        assert columns.max() > C, "every candidate was told"
        more = draw(kernels, logits, parts, temperature, top_k, seed, position, top_p, min_p, 2 * C)
        return [again if token == -1 else token for token, again in zip(tokens, more, strict=True)]
    return tokens


@given(st.floats(min_value=-708.0, max_value=0.0))
@settings(max_examples=300)
def test_the_exponential(x: float) -> None:
    assert float(exp(np.array([x]))[0]) == pytest.approx(math.exp(x), rel=1e-15, abs=0)


def test_the_exponential_far_below() -> None:
    assert exp(np.array([0.0, -709.0, -1e9])).tolist() == [1, 0, 0]


def test_masses_add_up_the_same_however_columns_are_split(kernels: Kernels) -> None:
    logits = compute(kernels, 4 * normal(np.random.default_rng(8), 3, 90))
    top, heat = logits.max(1).astype(np.float64), np.array([1.0, 0.3, 0.0])
    whole, parts = np.empty(3, np.uint64), np.empty((3, 3), np.uint64)
    kernels.mass(logits, top, heat, whole)
    for w, columns in enumerate((slice(0, 7), slice(7, 50), slice(50, 90))):
        kernels.mass(np.ascontiguousarray(logits[:, columns]), top, heat, parts[w])
    assert np.array_equal(parts.sum(0), whole)
    assert whole[2] == 0
    for t in range(2):
        exact = sum(math.floor(math.exp((float(x) - top[t]) / heat[t]) * 2**44) for x in logits[t])
        assert int(whole[t]) == pytest.approx(exact, rel=1e-12)


def nucleus(row: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The tokens that stay, by the definition: temperature, top-k, top-p, min-p, ties to the lower id."""
    order = sorted(range(len(row)), key=lambda t: (-row[t], t))
    weight = {t: math.exp((float(row[t]) - float(row[order[0]])) / temperature) for t in order}
    order = order[:top_k] if top_k else order
    whole = math.fsum(weight[t] for t in order)
    stay: list[int] = []
    for t in order:
        if stay and top_p < 1 and math.fsum(weight[s] for s in stay) >= top_p * whole:
            break
        stay.append(t)
    return [t for t in stay if weight[t] >= min_p]


@pytest.mark.parametrize("parts", [[], [20], [2, 5, 60]])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 0.9, 0.0), (0, 0.999, 0.0), (5, 0.7, 0.0), (0, 1.0, 0.05), (9, 0.95, 0.1), (0, 0.0, 0.0)]
)
def test_cuts(kernels: Kernels, parts: list[int], top_k: int, top_p: float, min_p: float) -> None:
    logits = compute(kernels, 2 * normal(np.random.default_rng(11), 10, 64))
    for position in range(4):
        tokens = draw(kernels, logits, parts, 1.3, top_k, 77, position, top_p, min_p)
        for row, token in zip(logits, tokens, strict=True):
            stay = nucleus(row, 1.3, top_k, top_p, min_p)
            assert token == max(stay, key=lambda t: float(row[t]) / 1.3 + by_hand(77, position, t))


@pytest.mark.parametrize("parts", [[32], [20, 43], [2, 5, 60]])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (0.0, 5), (1.0, 0), (0.7, 1), (0.7, 5), (2.0, 64), (1.0, 500)])
def test_ranks_together_draw_what_one_draws(kernels: Kernels, parts: list[int], temperature: float, top_k: int) -> None:
    rng = np.random.default_rng(1)
    logits = np.round(compute(kernels, 3 * normal(rng, 12, 64)))  # many equal logits
    for position in range(3):
        together = draw(kernels, logits, [], temperature, top_k, 9, position)
        assert draw(kernels, logits, parts, temperature, top_k, 9, position) == together


def test_a_draw_is_the_best_of_logit_over_temperature_plus_gumbel(kernels: Kernels) -> None:
    rng = np.random.default_rng(2)
    logits = compute(kernels, 3 * normal(rng, 20, 50))
    for position in range(5):
        tokens = draw(kernels, logits, [], 0.8, 0, 1234, position)
        some = draw(kernels, logits, [], 0.8, 7, 1234, position)
        for row, token, limited in zip(logits, tokens, some, strict=True):
            score = {t: float(row[t]) / 0.8 + by_hand(1234, position, t) for t in range(50)}
            assert token == max(score, key=lambda t: score[t])
            best = sorted(range(50), key=lambda t: (-row[t], t))[:7]
            assert limited == max(best, key=lambda t: score[t])


def test_greedy_takes_the_lowest_of_equal_logits(kernels: Kernels) -> None:
    logits = np.array([[0, 3, 1, 3, 3, 0], [-5, -5, -5, -5, -5, -5]], np.float32)
    for parts in ([], [2], [1, 4], [1, 2, 3, 4, 5]):
        assert draw(kernels, logits, parts, 0.0, 0, 1, 1) == [1, 0]
        assert draw(kernels, logits, parts, 1.0, 1, 1, 1) == [1, 0]


def test_draws_follow_the_distribution(kernels: Kernels) -> None:
    """Chi-squared over 4,000 positions: 7 degrees of freedom, 35 is far beyond chance; the draws are fixed by the seed."""
    logits = np.array([[0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 1.5, 0.25]], np.float32)
    counts = np.zeros(8)
    for position in range(4000):
        counts[draw(kernels, logits, [], 1.0, 0, 7, position)[0]] += 1
    p = np.exp(logits[0].astype(np.float64))
    expected = 4000 * p / p.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 35


def test_candidates_are_padded_and_descending(kernels: Kernels) -> None:
    logits = np.array([[1, 5, 3, 5]], np.float32)
    scores, ids = np.empty((1, 6)), np.empty((1, 6), np.int32)
    one = np.ones(1, np.uint64)
    kernels.candidates(logits, 10, np.ones(1), np.array([6], np.int32), one, one, scores, ids)
    assert ids.tolist() == [[11, 13, 12, 10, -1, -1]]
    assert scores[0, :4].tolist() == [5, 5, 3, 1]
    assert np.all(np.isneginf(scores[0, 4:]))


def test_score_rows(kernels: Kernels) -> None:
    rng = np.random.default_rng(3)
    logits = compute(kernels, 5 * normal(rng, 6, 40))
    logits[2, 30] = logits[2, 8] = logits[2].max() + 1
    following = np.array([100, 139, 99, 140, -1, 105], np.int32)
    top, total = np.empty(6, np.float32), np.empty(6)
    best, following_logit = np.empty(6, np.int32), np.empty(6, np.float32)
    kernels.score_rows(logits, 100, following, top, total, best, following_logit)
    assert np.array_equal(top, logits.max(1))
    assert best[2] == 108
    assert np.array_equal(best, 100 + np.argmax(logits, 1))
    exact = [math.fsum(math.exp(float(x) - float(m)) for x in row) for row, m in zip(logits, top, strict=True)]
    assert total == pytest.approx(exact, rel=1e-13)
    assert following_logit[[0, 1, 5]].tolist() == [logits[0, 0], logits[1, 39], logits[5, 5]]
    assert np.isnan(following_logit[[2, 3, 4]]).all()
