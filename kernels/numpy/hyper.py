"""Hyper-connections (specification 3.3): N residual streams read, mixed and written around a sub-layer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from kernels.api import Path
from kernels.numpy.elementwise import TWO, mean_square, sigmoid, slabs
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
    x: Array, post: Array, comb: Array, rounded: Round, balancers: Balancers,
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
    z *= scale.take(_scale_of_entry(N))
    z += base

    gates = z[:, : 2 * N].copy()
    sigmoid(gates, gates)
    np.multiply(gates[:, N:], TWO, out=post)
    rounded(post)
    logits = z[:, 2 * N :].reshape(T, N, N)
    if path is Path.DECODE:
        key = (T, N, hyper_eps)
        balancer = balancers.get(key)
        if balancer is None:
            balancer = balancers[key] = RowBalancer(*key)
        balancer(logits, iters, comb)
    else:
        mix = logits.transpose(1, 2, 0).copy()
        balance_block(mix, hyper_eps, iters)
        comb[...] = mix.transpose(2, 0, 1)
    rounded(comb)

    gates += np.float32(hyper_eps)
    np.matmul(gates[:, None, :N], X, out=x[:, None, :])
    rounded(x)


@functools.cache
def _scale_of_entry(N: int) -> Array:
    """Which of the three scales each entry of z takes."""
    return np.repeat(np.arange(3), (N, N, N * N))


def balance_block(C: Array, eps: float, iters: int) -> None:
    """Steps 4 and 5 in place on logits C [N, N, T], for many rows.

    Rows of the call come last: every sum is then a few additions of contiguous vectors, eps first and members ascending.
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


class RowBalancer:
    """Steps 4 and 5 for few rows of one N and eps; keeps its scratch and the views of it, one set a number of rows.

    The matrix stays K = softmax + eps and only its scalings change: C = diag(1/u) K diag(1/w). Dividing the rows of C by
    their sum + eps is u <- K (1/w) + eps u, and the columns w <- Kᵀ (1/u) + eps w: a gemv with [K | eps I] and a reciprocal
    instead of a pass over C. A vector holds the reciprocals of one side and the last values of the other; there are two of
    each, so that a product never writes what it reads.
    """

    def __init__(self, T: int, N: int, eps: float) -> None:
        self._eps = np.float32(eps)
        self._ones = np.ones(N, np.float32)
        self._total = np.empty((T, N), np.float32)
        by_row, by_column = sides = np.empty((2, T, N, 2 * N), np.float32)
        sides[..., N:] = np.eye(N, dtype=np.float32) * self._eps
        self._K, self._turned = np.empty((T, N, N), np.float32), by_column[:, :, :N]
        self._by_row = by_row[:, :, :N]
        self._vectors = np.empty((2, 2, T, 2 * N), np.float32)  # [1/w and u, 1/u and w], each twice
        rows, columns = self._vectors
        self._inverse, value = self._vectors[..., :N], self._vectors[..., N:]
        self._turns = [
            (
                _gemv(by_row, rows[1 - turn], value[0, turn]), value[0, turn], self._inverse[1, turn],
                _gemv(by_column, columns[turn], value[1, 1 - turn]), value[1, 1 - turn], self._inverse[0, turn],
            )
            for turn in (0, 1)
        ]  # fmt: skip

    def __call__(self, logits: Array, iters: int, out: Array) -> None:
        """logits, out [T, N, N]."""
        K = self._K
        np.subtract(logits, np.maximum.reduce(logits, axis=-1, keepdims=True), K)
        np.exp(K, K)
        np.vecdot(K, self._ones, self._total)
        np.divide(K, self._total[..., None], K)
        np.add(K, self._eps, K)
        self._by_row[...] = K
        self._turned[...] = K.transpose(0, 2, 1)
        self._vectors.fill(1)
        reciprocal = np.reciprocal
        for step in range(iters):
            sum_rows, u, one_by_u, sum_columns, w, one_by_w = self._turns[step & 1]
            if step:
                sum_rows()
                reciprocal(u, one_by_u)
            sum_columns()
            reciprocal(w, one_by_w)
        last = (iters - 1) & 1
        np.multiply(K, self._inverse[1, last, :, :, None], out)
        np.multiply(out, self._inverse[0, last, :, None, :], out)


Balancers = dict[tuple[int, int, float], RowBalancer]
"""By rows, streams and eps; scratch, so every backend instance has its own."""


def _gemv(w: Array, x: Array, out: Array) -> Callable[[], Array]:
    """out = w x a row: w [T, N, K], x [T, K], out [T, N]. One row skips the setting up of a stack, not the gemv."""
    if len(w) == 1:
        return functools.partial(w[0].dot, x[0], out[0])
    return functools.partial(np.matmul, w, x[..., None], out[..., None])


def post(X: Array, y: Array, weights: Array, comb: Array, out: Array, rounded: Round) -> None:
    """Step 8: weights [T, N] and comb [T, N, N] as `pre` gave them."""
    for rows in slabs(X.shape[0]):
        mixed = out[rows]
        np.matmul(comb[rows].transpose(0, 2, 1), X[rows], out=mixed)
        rounded(mixed)
        added = weights[rows, :, None] * y[rows, None, :]
        rounded(added)
        mixed += added
        rounded(mixed)
