"""Both forms of KDA against the sequential recurrence in float64."""

from __future__ import annotations

import kernel_reference as ref
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import compute, normal

from kernels.api import Kernels
from kernels.rows import Array


def inputs(kernels: Kernels, rng: np.random.Generator, T: int, H: int, D: int, decay: float) -> list[Array]:
    q, k, v = (compute(kernels, normal(rng, T, H, D)) for _ in range(3))
    G = (-decay * rng.random((T, H, D))).astype(np.float32)
    return [q, k, v, G, rng.random((T, H)).astype(np.float32)]


def agree(kernels: Kernels, out: Array, state: Array, exact: tuple[Array, Array]) -> None:
    size = max(1.0, float(np.abs(exact[0]).max()))
    assert np.abs(out - exact[0]).max() <= (2.0**-8 if kernels.dtype == "bf16" else 2e-5) * size
    assert np.abs(state - exact[1]).max() <= 2e-5 * max(1.0, float(np.abs(exact[1]).max()))


@given(
    rows=st.integers(1, 192), D=st.sampled_from([8, 16, 33]), decay=st.sampled_from([1e-4, 0.2, 5.0]), seed=st.integers(0, 999)
)
@settings(max_examples=8, deadline=None)
def test_the_chunked_form_is_the_recurrence(kernels: Kernels, rows: int, D: int, decay: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    T, H = -(-rows // 64) * 64, 2
    data = inputs(kernels, rng, T, H, D, decay)
    for x in data:
        x[rows:] = np.nan  # padding rows hold anything
    before, after = normal(rng, H, D, D), np.full((H, D, D), np.nan, np.float32)
    out = np.full((T, H, D), np.nan, np.float32)
    kernels.kda_prompt(*data, rows, before, after, out)
    agree(kernels, out[:rows], after, ref.kda(*(x[:rows].astype(np.float64) for x in data), before))
    assert not out[rows:].any()


def test_the_strongest_decay_neither_overflows_nor_leaves_anything(kernels: Kernels) -> None:
    rng = np.random.default_rng(1)
    data = inputs(kernels, rng, 128, 2, 16, 0.0)
    data[3][...] = -4.9999
    data[3][:, 1, :8] = -1e-6  # beside channels that keep everything
    before, after, out = normal(rng, 2, 16, 16), np.empty((2, 16, 16), np.float32), np.empty((128, 2, 16), np.float32)
    with np.errstate(over="raise", invalid="raise"):
        kernels.kda_prompt(*data, 128, before, after, out)
    agree(kernels, out, after, ref.kda(*(x.astype(np.float64) for x in data), before))


def test_equal_keys_without_decay_are_the_hardest_system_to_solve(kernels: Kernels) -> None:
    """All keys equal, beta near 1 and no decay: I + A is full of ones below its diagonal."""
    rng = np.random.default_rng(2)
    data = inputs(kernels, rng, 64, 1, 16, 0.0)
    data[1][...] = data[1][0]
    data[4][...] = 0.999
    before, after, out = normal(rng, 1, 16, 16), np.empty((1, 16, 16), np.float32), np.empty((64, 1, 16), np.float32)
    kernels.kda_prompt(*data, 64, before, after, out)
    agree(kernels, out, after, ref.kda(*(x.astype(np.float64) for x in data), before))


def test_a_zero_key_is_no_division_by_zero(kernels: Kernels) -> None:
    rng = np.random.default_rng(3)
    data = inputs(kernels, rng, 64, 1, 8, 1.0)
    data[0][5], data[1][7] = 0, 0
    before, after, out = normal(rng, 1, 8, 8), np.empty((1, 8, 8), np.float32), np.empty((64, 1, 8), np.float32)
    kernels.kda_prompt(*data, 64, before, after, out)
    agree(kernels, out, after, ref.kda(*(x.astype(np.float64) for x in data), before))


@pytest.mark.parametrize("R", [1, 3])
def test_decode_is_the_recurrence_and_leaves_other_states_alone(kernels: Kernels, R: int) -> None:
    rng = np.random.default_rng(4)
    B, H, D = 3, 2, 16
    windows = [inputs(kernels, rng, R, H, D, 5.0) for _ in range(B)]
    states = normal(rng, 8, H, D, D)
    before = states.copy()
    source, target = np.array([6, 1, 4], np.int32), np.array([7, 0, 5], np.int32)
    out = np.full((B, R, H, D), np.nan, np.float32)
    kernels.kda_decode(*(np.stack(x) for x in zip(*windows, strict=True)), states, source, target, out)
    for b, data in enumerate(windows):
        exact = ref.kda(*(x.astype(np.float64) for x in data), before[source[b]])
        agree(kernels, out[b], states[target[b]], exact)
    untouched = [s for s in range(8) if s not in target]
    assert np.array_equal(states[untouched], before[untouched])


def test_both_forms_agree_over_many_rows(kernels: Kernels) -> None:
    rng = np.random.default_rng(5)
    T, H, D = 128, 2, 16
    data = inputs(kernels, rng, T, H, D, 0.5)
    before, after, out = normal(rng, H, D, D), np.empty((H, D, D), np.float32), np.empty((T, H, D), np.float32)
    kernels.kda_prompt(*data, T, before, after, out)
    states, single = np.stack([before, before]), np.empty((1, T, H, D), np.float32)
    first, second = np.array([0], np.int32), np.array([1], np.int32)
    kernels.kda_decode(*(x[None] for x in data), states, first, second, single)
    agree(kernels, out, after, (single[0].astype(np.float64), states[1].astype(np.float64)))
