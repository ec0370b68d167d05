"""Every operation against the specification, written again in float64 with loops (kernel_reference)."""

from __future__ import annotations

import kernel_reference as ref
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import compute, contents, normal

from kernels.api import Kernels, Path
from kernels.rows import Array

SEEDS = st.integers(0, 2**31)
WIDTHS = st.integers(1, 300)
PATHS = pytest.mark.parametrize("path", list(Path))
few = settings(max_examples=12, deadline=None)


def close(kernels: Kernels, ours: Array, theirs: Array, roundings: int = 1) -> None:
    """Float32 sums agree to 2e-5 of the largest value; a bf16 rounding may fall to the other side, one ulp each."""
    ours, theirs = ours.astype(np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    size = max(float(np.abs(theirs).max(initial=0)), 1e-30)
    allowed = np.full(theirs.shape, 2e-5 * size)
    if kernels.dtype == "bf16":
        assert np.array_equal(ref.rounder("bf16")(ours), ours), "an output is not rounded to bf16"
        allowed += roundings * 2.0**-7 * np.abs(theirs)
        differing = np.count_nonzero(ours != theirs)  # few, when both round at the same points
        assert differing <= 2 + roundings * 0.02 * theirs.size, f"{differing} of {theirs.size} values are rounded otherwise"
    worst = np.max(np.abs(ours - theirs) - allowed, initial=0)
    assert worst <= 0, f"off by {np.abs(ours - theirs).max()} where values reach {size}"


def close_f32(ours: Array, theirs: Array, size: float | None = None) -> None:
    size = size or max(float(np.abs(theirs).max(initial=0)), 1e-30)
    assert np.abs(ours - theirs).max(initial=0) <= 2e-5 * size


@PATHS
@given(K=WIDTHS, N=WIDTHS, seed=SEEDS)
@few
def test_linear(kernels: Kernels, path: Path, K: int, N: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    T = 128 if path is Path.PROMPT else 3
    x, w = compute(kernels, normal(rng, T, K)), compute(kernels, normal(rng, N, K))
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    out = kernels.empty((T, N), "compute")
    kernels.linear(path, x, w, out)
    close(kernels, out, ref.rounder(kernels.dtype)(exact))
    kernels.linear_f32(path, x, w, out)
    close_f32(out, exact)


@PATHS
def test_absorb(kernels: Kernels, path: Path) -> None:
    rng = np.random.default_rng(1)
    q, w = compute(kernels, normal(rng, 64, 3, 20)), compute(kernels, normal(rng, 3, 33, 20))
    out = kernels.empty((64, 3, 33), "compute")
    kernels.absorb(path, q, w, out)
    exact = [[w[a].astype(np.float64) @ q[t, a] for a in range(3)] for t in range(64)]
    close(kernels, out, ref.rounder(kernels.dtype)(np.array(exact)))


def test_embed_knows_only_its_part() -> None:
    from kernels.numpy import NumpyKernels

    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    out = np.full((5, 3), np.nan, np.float32)
    NumpyKernels("f32").embed(np.array([9, 10, 13, 14, 0], np.int32), table, 10, out)
    assert out.tolist() == [[0, 0, 0], [0, 1, 2], [9, 10, 11], [0, 0, 0], [0, 0, 0]]


def test_sums_over_ranks_are_added_in_rank_order_and_rounded_once(kernels: Kernels) -> None:
    parts = [np.array([[x]], np.float32) for x in (1.0, 2.0**-8, 2.0**-9, 2.0**30, -(2.0**30))]
    out = kernels.empty((1, 1), "compute")
    kernels.sum_ranks(parts[:3], out)
    # 1 + 2^-8 is half a bf16 ulp and would fall to 1 if it were rounded before 2^-9 comes
    assert out[0, 0] == (1 + 2.0**-8 + 2.0**-9 if kernels.dtype == "f32" else 1 + 2.0**-7)
    kernels.sum_ranks(parts, out)
    assert out[0, 0] == 0
    kernels.sum_ranks([parts[3], parts[4], parts[0]], out)
    assert out[0, 0] == 1


@given(n=WIDTHS, seed=SEEDS)
@few
def test_norms(kernels: Kernels, n: int, seed: int) -> None:
    rng, r = np.random.default_rng(seed), ref.rounder(kernels.dtype)
    x = compute(kernels, contents(rng, 5, n))
    w, b = compute(kernels, normal(rng, n)), compute(kernels, normal(rng, n))
    x64, w64, b64 = (y.astype(np.float64) for y in (x, w, b))
    out = kernels.empty((5, n), "compute")
    kernels.rms_norm(x, w, 1e-5, out)
    close(kernels, out, np.stack([ref.rms_norm(row, w64, 1e-5, r) for row in x64]), 2)
    kernels.layer_norm(x, w, b, 1e-6, out)
    if n > 1:
        exact = np.stack([ref.layer_norm(row, w64, b64, 1e-6, r) for row in x64])
        assert np.abs(out - exact).max() <= (2.0**-7 if kernels.dtype == "bf16" else 2e-5) * np.abs(exact).max()


def test_the_rms_norm_rounds_before_it_scales() -> None:
    from kernels.numpy import NumpyKernels

    kernels = NumpyKernels("bf16")
    rng, r = np.random.default_rng(0), ref.rounder("bf16")
    x, w = compute(kernels, normal(rng, 50, 64)), compute(kernels, normal(rng, 64))
    out = kernels.empty((50, 64), "compute")
    kernels.rms_norm(x, w, 1e-5, out)
    twice = np.stack([ref.rms_norm(row.astype(np.float64), w.astype(np.float64), 1e-5, r) for row in x])
    assert np.mean(out != twice) < 0.001


@given(f=WIDTHS, seed=SEEDS)
@few
def test_swiglu(kernels: Kernels, f: int, seed: int) -> None:
    rng, r = np.random.default_rng(seed), ref.rounder(kernels.dtype)
    x = compute(kernels, 20 * contents(rng, 4, 2 * f))
    out = kernels.empty((4, f), "compute")
    kernels.swiglu(x, 1.5, out)
    close(kernels, out, np.stack([ref.swiglu(row.astype(np.float64), 1.5, r) for row in x]), 2)


@PATHS
@pytest.mark.parametrize(("N", "d", "iters"), [(4, 32, 20), (2, 17, 7), (1, 8, 1)])
def test_hyper_connections(kernels: Kernels, path: Path, N: int, d: int, iters: int) -> None:
    rng, r = np.random.default_rng(5), ref.rounder(kernels.dtype)
    T, width = 64, (2 + N) * N
    X, y = compute(kernels, contents(rng, T, N, d)), compute(kernels, normal(rng, T, d))
    fn, base, scale = normal(rng, width, N * d), normal(rng, width), np.array([0.3, 1.1, 0.7], np.float32)
    x, post, comb, out = (kernels.empty((T, *s), "compute") for s in ((d,), (N,), (N, N), (N, d)))
    kernels.hyper_pre(path, X, fn, base, scale, 0.01, 0.003, iters, x, post, comb)
    kernels.hyper_post(X, y, post, comb, out)
    theirs = [ref.hyper_pre(*(a.astype(np.float64) for a in (row, fn, base, scale)), 0.01, 0.003, iters, r) for row in X]
    for ours, exact in zip((x, post, comb), zip(*theirs, strict=True), strict=True):
        close(kernels, ours, np.stack(exact))
    again = [ref.hyper_post(*(a[t].astype(np.float64) for a in (X, y, post, comb)), r) for t in range(T)]
    assert np.abs(out - np.stack(again)).max() <= (2.0**-6 if kernels.dtype == "bf16" else 1e-5) * np.abs(out).max()


def test_streams_are_copies_and_their_mean(kernels: Kernels) -> None:
    rng = np.random.default_rng(6)
    e = compute(kernels, normal(rng, 3, 10))
    X, back = kernels.empty((3, 4, 10), "compute"), kernels.empty((3, 10), "compute")
    kernels.hyper_spread(e, X)
    kernels.hyper_mean(X, back)
    assert np.array_equal(back, e)
    X = compute(kernels, normal(rng, 3, 4, 10))
    kernels.hyper_mean(X, back)
    close(kernels, back, ref.rounder(kernels.dtype)(X.astype(np.float64).mean(1)))


@given(T=st.integers(1, 9), taps=st.integers(1, 5), seed=SEEDS)
@few
def test_convolution(kernels: Kernels, T: int, taps: int, seed: int) -> None:
    rng, r = np.random.default_rng(seed), ref.rounder(kernels.dtype)
    u, w = compute(kernels, contents(rng, 2, taps - 1 + T, 7)), normal(rng, taps, 7)
    out = kernels.empty((2, T, 7), "compute")
    kernels.kda_conv(u, w, out)
    close(kernels, out, np.stack([ref.conv(row.astype(np.float64), w.astype(np.float64), r) for row in u]))


def test_gates_stay_in_range_however_large_their_input(kernels: Kernels) -> None:
    f = compute(kernels, np.array([[-1e30, -200, -1, 0, 1, 200, 1e30, 3]], np.float32))
    a_log, dt_bias = np.array([0.5, -1.0], np.float32), np.linspace(-1, 1, 8).astype(np.float32)
    G, beta = kernels.empty((1, 8), "f32"), kernels.empty((1, 8), "f32")
    kernels.kda_gate(f, dt_bias, a_log, -5.0, G)
    kernels.sigmoid(f, beta)
    exact = -5 * ref.sigmoid(np.repeat(np.exp(a_log.astype(np.float64)), 4) * (f.astype(np.float64) + dt_bias))
    close_f32(G, exact)
    close_f32(beta, ref.sigmoid(f))


def test_output_gate(kernels: Kernels) -> None:
    rng, r = np.random.default_rng(7), ref.rounder(kernels.dtype)
    o, gate, w = compute(kernels, normal(rng, 5, 3, 20)), compute(kernels, normal(rng, 5, 60)), normal(rng, 20)
    out = kernels.empty((5, 60), "compute")
    kernels.kda_output(o, gate, w, 1e-5, out)
    theirs = [ref.kda_output(*(x.astype(np.float64) for x in (o[t], gate[t].reshape(3, 20), w)), 1e-5, r) for t in range(5)]
    close(kernels, out, np.stack(theirs))


@given(P=st.integers(1, 16), seed=SEEDS)
@few
def test_pooled_keys(kernels: Kernels, P: int, seed: int) -> None:
    rng, r = np.random.default_rng(seed), ref.rounder(kernels.dtype)
    keys, gates = (compute(kernels, normal(rng, 20, P, 32)) for _ in range(2))
    ape = compute(kernels, normal(rng, P, 32))
    out = kernels.empty((20, 32), "compute")
    kernels.pool_keys(keys, gates, ape, out)
    theirs = np.stack([ref.pool_key(*(x.astype(np.float64) for x in (keys[n], gates[n], ape)), r) for n in range(20)])
    assert np.abs(out - theirs).max() <= (2.0**-6 if kernels.dtype == "bf16" else 1e-5) * np.abs(keys).max()
    if kernels.dtype == "bf16":
        assert np.mean(out != theirs) < 0.03, "the shares, their products or the sum are rounded elsewhere"


@PATHS
@pytest.mark.parametrize(("groups", "kept", "normalise"), [(1, 1, True), (4, 2, True), (2, 1, False)])
def test_routing(kernels: Kernels, path: Path, groups: int, kept: int, normalise: bool) -> None:
    rng = np.random.default_rng(8)
    x, w, bias = compute(kernels, normal(rng, 64, 30)), normal(rng, 16, 30), normal(rng, 16) / 4
    chosen, weights = kernels.empty((64, 3), "i32"), kernels.empty((64, 3), "f32")
    kernels.route(path, x, w, bias, groups, kept, normalise, 2.5, chosen, weights)
    for t in range(64):
        row = (a.astype(np.float64) for a in (x[t], w, bias))
        best, exact = ref.route(*row, 3, groups, kept, normalise, 2.5)
        assert chosen[t].tolist() == best
        close_f32(weights[t], exact)


def test_equal_experts_go_to_the_lower_number(kernels: Kernels) -> None:
    x, w = np.zeros((1, 4), np.float32), np.ones((8, 4), np.float32)
    chosen, weights = kernels.empty((1, 3), "i32"), kernels.empty((1, 3), "f32")
    kernels.route(Path.DECODE, x, w, np.zeros(8, np.float32), 4, 2, True, 1.0, chosen, weights)
    assert chosen.tolist() == [[0, 1, 2]]
    kernels.route(Path.DECODE, x, w, np.array([0, 0, 0, 0, 1, 0, 0, 1], np.float32), 1, 1, True, 1.0, chosen, weights)
    assert chosen.tolist() == [[0, 4, 7]]


@PATHS
def test_experts(kernels: Kernels, path: Path) -> None:
    rng, r = np.random.default_rng(9), ref.rounder(kernels.dtype)
    T, E, d, m, rows = 128, 6, 24, 10, 101
    x = compute(kernels, normal(rng, T, d))
    x[rows:] = np.nan
    chosen = np.stack([np.sort(rng.permutation(E)[:2]) for _ in range(T)]).astype(np.int32)
    weights = np.abs(normal(rng, T, 2))
    gate_up, down = compute(kernels, normal(rng, E, 2 * m, d)), compute(kernels, normal(rng, E, d, m))
    out = np.full((T, d), np.nan, np.float32)
    kernels.experts(path, x, chosen, weights, rows, gate_up, down, 1.5, out)
    assert not out[rows:].any()
    inputs = [a.astype(np.float64) for a in (x, weights, gate_up, down)]
    theirs = [ref.experts(inputs[0][t], chosen[t], inputs[1][t], inputs[2], inputs[3], 1.5, r) for t in range(rows)]
    assert np.abs(out[:rows] - theirs).max() <= (2.0**-6 if kernels.dtype == "bf16" else 2e-5) * np.abs(theirs).max()
