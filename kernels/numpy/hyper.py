"""Hyper-connections (specification 3.3): N residual streams read, mixed and written around a sub-layer."""

from __future__ import annotations

import functools

import numpy as np

from kernels.api import Path
from kernels.numpy.elementwise import mean_square, sigmoid, slabs
from kernels.numpy.products import product
from kernels.numpy.rounding import Round
from kernels.rows import Array


def spread(e: Array, out: Array) -> None:
    out[...] = e[:, None, :]


def mean(X: Array, out: Array, rounded: Round) -> None:
    streams = X.shape[1]
    out[...] = X[:, 0]
    for n in range(1, streams):
        out += X[:, n]
    out /= np.float32(streams)
    rounded(out)


def pre(
    path: Path, X: Array, fn: Array, base: Array, scale: Array, rms_eps: float, hyper_eps: float, iters: int,
    x: Array, post: Array, comb: Array, rounded: Round,
) -> None:  # fmt: skip
    """Steps 1 to 6. The norm of the flattened streams is a scalar a row, so it divides z instead of the streams."""
    T, N, d = X.shape
    flat = X.reshape(T, N * d)
    root = mean_square(flat)
    root += np.float32(rms_eps)
    np.sqrt(root, out=root)
    z = np.empty((T, (2 + N) * N), np.float32)
    product(path, flat, fn, z)
    z /= root[:, None]
    z *= scale[_scale_of_entry(N)]
    z += base

    gates = z[:, : 2 * N].copy()
    sigmoid(gates, gates)
    np.multiply(gates[:, N:], np.float32(2.0), out=post)
    rounded(post)
    mix = z[:, 2 * N :].T.copy().reshape(N, N, T)
    sinkhorn(mix, hyper_eps, iters)
    comb[...] = mix.transpose(2, 0, 1)
    rounded(comb)

    weights = gates[:, :N, None] + np.float32(hyper_eps)
    for rows in slabs(T):
        weighted = X[rows] * weights[rows]
        total = x[rows]
        total[...] = weighted[:, 0]
        for n in range(1, N):
            total += weighted[:, n]
    rounded(x)


@functools.cache
def _scale_of_entry(N: int) -> Array:
    """Which of the three scales each entry of z takes."""
    return np.repeat(np.arange(3), (N, N, N * N))


def sinkhorn(C: Array, eps: float, iters: int) -> None:
    """Steps 4 and 5 in place on logits C [N, N, T].

    Rows of the call come last: every sum is then a few additions of contiguous vectors, eps first and members ascending,
    which look the same for one row and for many. 39 normalisations a call: views are made once, calls are kept few.
    """
    N, _, T = C.shape
    by_row = list(C)
    by_column = list(C.transpose(1, 0, 2))
    top = by_column[0].copy()
    for column in by_column[1:]:
        np.maximum(top, column, out=top)
    C -= top[:, None]
    np.exp(C, out=C)

    total, margin = np.zeros((N, T), np.float32), np.full((N, T), eps, np.float32)
    total_of_row = total[:, None]
    _sum(total, by_column, total)
    C /= total_of_row
    C += margin
    for step in range(iters):
        if step:
            _sum(margin, by_column, total)
            np.divide(C, total_of_row, C)
        _sum(margin, by_row, total)
        np.divide(C, total, C)


def _sum(start: Array, parts: list[Array], total: Array) -> None:
    np.add(start, parts[0], total)
    for part in parts[1:]:
        np.add(total, part, total)


def post(X: Array, y: Array, weights: Array, comb: Array, out: Array, rounded: Round) -> None:
    """Step 8: weights [T, N] and comb [T, N, N] as `pre` gave them."""
    for rows in slabs(X.shape[0]):
        _post(X[rows], y[rows], weights[rows], comb[rows], out[rows], rounded)


def _post(X: Array, y: Array, weights: Array, comb: Array, out: Array, rounded: Round) -> None:
    np.multiply(comb[:, 0, :, None], X[:, 0, None, :], out=out)
    part = np.empty_like(out)
    for j in range(1, X.shape[1]):
        np.multiply(comb[:, j, :, None], X[:, j, None, :], out=part)
        out += part
    rounded(out)
    np.multiply(weights[:, :, None], y[:, None, :], out=part)
    rounded(part)
    out += part
    rounded(out)
