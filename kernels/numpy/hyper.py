"""Hyper-connections (specification 3.3): N residual streams read, mixed and written around a sub-layer."""

from __future__ import annotations

import numpy as np

from kernels.api import Path
from kernels.numpy.elementwise import ascending_sum, mean_square, sigmoid
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
    z *= np.repeat(scale, (N, N, N * N))
    z += base

    gates = np.ascontiguousarray(z[:, : 2 * N])
    sigmoid(gates, gates)
    weights = gates[:, :N] + np.float32(hyper_eps)
    np.multiply(gates[:, N:], np.float32(2.0), out=post)
    rounded(post)

    mix = sinkhorn(np.ascontiguousarray(z[:, 2 * N :].T).reshape(N, N, T), np.float32(hyper_eps), iters)
    comb[...] = mix.transpose(2, 0, 1)
    rounded(comb)

    np.multiply(X[:, 0], weights[:, 0, None], out=x)
    for n in range(1, N):
        x += X[:, n] * weights[:, n, None]
    rounded(x)


def sinkhorn(C: Array, eps: np.float32, iters: int) -> Array:
    """Steps 4 and 5 in place on C [N, N, T]: rows last, so that every sum is a few additions of contiguous vectors."""
    rows = C.transpose(1, 0, 2)  # the same memory, indexed [column, row, T]
    top = rows[0].copy()
    for column in rows[1:]:
        np.maximum(top, column, out=top)
    C -= top[:, None]
    np.exp(C, out=C)
    C /= ascending_sum(rows)[:, None]
    C += eps
    for step in range(iters):
        if step:
            total = ascending_sum(rows)
            total += eps
            C /= total[:, None]
        total = ascending_sum(C)
        total += eps
        C /= total
    return C


def post(X: Array, y: Array, weights: Array, comb: Array, out: Array, rounded: Round) -> None:
    """Step 8: weights [T, N] and comb [T, N, N] as `pre` gave them."""
    N = X.shape[1]
    np.multiply(comb[:, 0, :, None], X[:, 0, None, :], out=out)
    for j in range(1, N):
        out += comb[:, j, :, None] * X[:, j, None, :]
    rounded(out)
    written = weights[:, :, None] * y[:, None, :]
    rounded(written)
    out += written
    rounded(out)
