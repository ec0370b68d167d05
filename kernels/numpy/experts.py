"""The router and the routed experts (specification 3.7)."""

from __future__ import annotations

import numpy as np

from kernels.api import Path
from kernels.numpy.elementwise import sigmoid
from kernels.numpy.norms import swiglu
from kernels.numpy.products import BLOCK, product
from kernels.numpy.rounding import Round
from kernels.rows import Array

GEMM_ROWS = 3
"""Rows of a group from which one gemm takes less time than a gemv each (measured; weights first, BLAS packs less)."""


def route(
    path: Path, x: Array, w: Array, bias: Array, groups: int, groups_kept: int, normalise: bool, scale: float,
    experts: Array, weights: Array,
) -> None:  # fmt: skip
    T, k = experts.shape
    p = np.empty((T, w.shape[0]), np.float32)
    product(path, x, w, p)
    sigmoid(p, p)
    biased = p + bias
    if groups_kept < groups:
        members = biased.reshape(T, groups, -1)
        two = -np.sort(-members, axis=-1)[..., :2]
        group_score = two[..., 0] + two[..., 1] if two.shape[-1] == 2 else two[..., 0]
        dropped = np.argsort(-group_score, axis=-1, kind="stable")[:, groups_kept:]
        np.put_along_axis(members, dropped[:, :, None], -np.inf, axis=1)
    chosen = np.sort(np.argsort(-biased, axis=-1, kind="stable")[:, :k], axis=-1)
    experts[...] = chosen
    weights[...] = p[np.arange(T)[:, None], chosen]
    if normalise:
        total = weights[:, 0].copy()
        for i in range(1, k):
            total += weights[:, i]
        total += np.float32(1e-20)
        weights /= total[:, None]
    weights *= np.float32(scale)


def routed(
    path: Path, x: Array, experts: Array, weights: Array, rows: int, gate_up: Array, down: Array, limit: float,
    out: Array, rounded: Round,
) -> None:  # fmt: skip
    if rows < len(out):
        out[rows:] = 0
    if path is Path.DECODE:
        _rows(x[:rows], experts[:rows], weights[:rows], gate_up, down, limit, out[:rows], rounded)
        return
    for start in range(0, rows, BLOCK):
        here = slice(start, min(start + BLOCK, rows))
        _block(x[here], experts[here], weights[here], gate_up, down, limit, out[here], rounded)


def _rows(
    x: Array, experts: Array, weights: Array, gate_up: Array, down: Array, limit: float, out: Array, rounded: Round
) -> None:
    """A gemv a pair of a row and one of its experts, whoever else chose the expert; in order of experts, so that the rows of
    one find its weights in the processor's cache."""
    T, k = experts.shape
    names = experts.ravel()
    pairs = list(enumerate(names.tolist()))
    if T > 1:
        pairs.sort(key=lambda pair: pair[1])
    hidden = np.empty((T * k, gate_up.shape[1]), np.float32)
    for pair, e in pairs:
        gate_up[e].dot(x[pair // k], hidden[pair])
    rounded(hidden)
    active = np.empty((T * k, down.shape[2]), np.float32)
    swiglu(hidden, limit, active, rounded)
    parts = np.empty((T, k, x.shape[1]), np.float32)
    flat = parts.reshape(T * k, -1)
    for pair, e in pairs:
        down[e].dot(active[pair], flat[pair])
    _weigh(parts, weights, out)


def _weigh(parts: Array, weights: Array, out: Array) -> None:
    """out[t] = sum over experts, ascending, of weight * part; parts [T, k, d] is overwritten."""
    parts *= weights[:, :, None]
    if parts.shape[1] == 1:
        out[...] = parts[:, 0]
        return
    np.add(parts[:, 0], parts[:, 1], out=out)
    for i in range(2, parts.shape[1]):
        out += parts[:, i]


def _block(
    x: Array, experts: Array, weights: Array, gate_up: Array, down: Array, limit: float, out: Array, rounded: Round
) -> None:
    """The real rows of one block. A pair is a row and one of its experts, sorted by expert."""
    T, k = experts.shape
    names = experts.ravel()
    order = np.argsort(names, kind="stable")
    found, starts = np.unique(names[order], return_index=True)
    groups = list(zip(found.tolist(), starts.tolist(), [*starts[1:].tolist(), T * k], strict=True))

    inputs = x[order // k]
    hidden = np.empty((T * k, gate_up.shape[1]), np.float32)
    for e, first, end in groups:
        _group_product(inputs[first:end], gate_up[e], hidden[first:end])
    rounded(hidden)
    active = np.empty((T * k, down.shape[2]), np.float32)
    swiglu(hidden, limit, active, rounded)
    sorted_parts = np.empty((T * k, x.shape[1]), np.float32)
    for e, first, end in groups:
        _group_product(active[first:end], down[e], sorted_parts[first:end])

    parts = np.empty_like(sorted_parts)
    parts[order] = sorted_parts
    _weigh(parts.reshape(T, k, -1), weights, out)


def _group_product(x: Array, w: Array, out: Array) -> None:
    """A gemv a row, or a gemm where the group is worth it."""
    if len(x) >= GEMM_ROWS:
        out[...] = np.matmul(w, x.T).T
    else:
        np.matmul(w, x[:, :, None], out=out[:, :, None])
