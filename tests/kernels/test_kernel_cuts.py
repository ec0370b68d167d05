"""Cuts (top_k, top_p, min_p) over ranks' candidates against a plain reading of their definition over the whole vocabulary."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.numpy import NumpyKernels
from kernels.numpy.sampling import exp, gumbel

KERNELS = NumpyKernels("f32")
ONE = 2**44


def plain(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int) -> int:
    """One rank, the whole vocabulary, exact integers and fractions."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return order[0]
    order = order[:top_k] if top_k else order
    top = float(logits[order[0]])
    parts = [int(float(exp(np.array([(float(logits[i]) - top) / temperature]))[0]) * ONE) for i in order]
    total, running, kept = sum(parts), 0, []
    for i, part in zip(order, parts, strict=True):
        running += part
        kept.append((i, part))
        if top_p < 1 and float(running) >= top_p * float(total):
            break
    kept = [(i, part) for i, part in kept if Fraction(part) >= int(min_p * ONE)] or kept[:1]
    noise = gumbel(seed, position, np.arange(len(logits), dtype=np.uint64))
    return min((i for i, _ in kept), key=lambda i: (-(float(logits[i]) / temperature + noise[i]), i))


def ranked(
    logits: np.ndarray, columns: list[int], width: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int,
    position: int,
) -> int:  # fmt: skip
    """The same by ranks that give `width` candidates each; -1 where those do not cover the cut."""
    world = len(columns)
    cut = temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0)
    scores, ids = np.empty((world, 1, width)), np.empty((world, 1, width), np.int32)
    masses, seeds, positions = np.zeros((world, 1), np.uint64), np.array([seed], np.uint64), np.array([position], np.uint64)
    heat, kept = np.array([temperature]), np.array([(top_k or width) if cut else 0], np.int32)
    starts = np.cumsum([0, *columns])
    parts = [np.ascontiguousarray(logits[None, a : a + n]) for a, n in zip(starts, columns, strict=False)]
    for rank, part in enumerate(parts):
        KERNELS.candidates(part, int(starts[rank]), heat, kept, seeds, positions, scores[rank], ids[rank])
    top = scores[:, :, 0].max(axis=0)
    for rank, part in enumerate(parts if cut else []):
        KERNELS.mass(part, top, heat, masses[rank])
    out = np.empty(1, np.int32)
    KERNELS.draw(
        scores, ids, np.array(columns, np.int32), masses, heat, np.array([top_k], np.int32), np.array([top_p]),
        np.array([min_p]), seeds, positions, out,
    )  # fmt: skip
    return int(out[0])


cases = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 3, 8]),
        "top_p": st.sampled_from([1.0, 0.99, 0.7, 0.3, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.001, 0.1, 0.9, 1.0]),
        "seed": st.integers(0, 2**64 - 1),
        "position": st.integers(0, 2**20),
    }
)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), case=cases, flat=st.sampled_from([0.01, 1.0, 6.0]), ties=st.booleans())
def test_ranks_draw_what_the_definition_draws(data: st.DataObject, case: dict[str, float], flat: float, ties: bool) -> None:
    columns = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    random = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    logits = (random.standard_normal(sum(columns)) * flat).astype(np.float32)
    logits = np.round(logits) if ties else logits
    expected = plain(logits, **case)  # type: ignore[arg-type]
    assert ranked(logits, columns, max(8, *columns), **case) == expected  # type: ignore[arg-type]
    width = 8
    while (token := ranked(logits, columns, width, **case)) < 0:  # type: ignore[arg-type]
        width *= 2
        assert width <= 64, "the whole vocabulary always covers the cut"
    assert token == expected


def test_candidates_that_do_not_cover_the_cut_are_told() -> None:
    """A flat distribution of 100 tokens on two ranks: half of the mass is 50 tokens, and 8 candidates a rank give 16."""
    logits = np.zeros(100, np.float32)
    case = {"temperature": 1.0, "top_k": 0, "top_p": 0.5, "min_p": 0.0, "seed": 1, "position": 1}
    assert ranked(logits, [50, 50], 8, **case) == -1  # type: ignore[arg-type]
    assert ranked(logits, [50, 50], 32, **case) == -1  # type: ignore[arg-type]
    assert ranked(logits, [50, 50], 64, **case) == plain(logits, **case)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [[100], [50, 50], [1, 98, 1], [34, 33, 33]])
def test_mass_does_not_depend_on_the_split(split: list[int]) -> None:
    logits = (np.random.default_rng(5).standard_normal(100) * 4).astype(np.float32)
    total, start = 0, 0
    for count in split:
        out = np.empty(1, np.uint64)
        KERNELS.mass(logits[None, start : start + count], np.array([float(logits.max())]), np.array([0.8]), out)
        total, start = total + int(out[0]), start + count
    exact = sum(math.exp((float(x) - float(logits.max())) / 0.8) for x in logits)
    assert abs(total / ONE - exact) < 100 / ONE + 1e-14 * exact


@settings(max_examples=300, deadline=None)
@given(st.floats(-707.9, 0.0))
def test_exp_is_accurate(x: float) -> None:
    assert float(exp(np.array([x]))[0]) == pytest.approx(math.exp(x), rel=1e-14)


def test_exp_ends_at_zero() -> None:
    np.testing.assert_array_equal(exp(np.array([-709.0, -1e9, -np.inf])), 0.0)
    assert exp(np.array([0.0]))[0] == 1.0
