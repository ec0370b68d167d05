"""The router and the routed experts (specification 3.7)."""

from __future__ import annotations

import numpy as np

from kernels.api import Path
from kernels.numpy.elementwise import sigmoid
from kernels.numpy.norms import swiglu
from kernels.numpy.products import BLOCK, product
from kernels.numpy.rounding import Round
from kernels.rows import Array


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
    weights[...] = np.take_along_axis(p, chosen, axis=-1)
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
    out[...] = 0
    if path is Path.DECODE:
        _rows(x[:rows], experts[:rows], weights[:rows], gate_up, down, limit, out[:rows], rounded)
        return
    for start in range(0, rows, BLOCK):
        here = slice(start, min(start + BLOCK, rows))
        _block(x[here], experts[here], weights[here], gate_up, down, limit, out[here], rounded)


def _rows(
    x: Array, experts: Array, weights: Array, gate_up: Array, down: Array, limit: float, out: Array, rounded: Round
) -> None:
    """A gemv a row and chosen expert."""
    T, k = experts.shape
    hidden = np.empty((T, k, gate_up.shape[1]), np.float32)
    for t in range(T):
        for i, e in enumerate(experts[t]):
            np.matmul(gate_up[e], x[t], out=hidden[t, i])
    rounded(hidden)
    active = np.empty((T, k, down.shape[2]), np.float32)
    swiglu(hidden, limit, active, rounded)
    for t in range(T):
        for i, e in enumerate(experts[t]):
            part = np.matmul(down[e], active[t, i])
            part *= weights[t, i]
            out[t] += part


def _block(
    x: Array, experts: Array, weights: Array, gate_up: Array, down: Array, limit: float, out: Array, rounded: Round
) -> None:
    """The real rows of one block, grouped by expert, experts ascending."""
    for e in np.unique(experts):
        rows, places = np.nonzero(experts == e)
        hidden = np.matmul(x[rows], gate_up[e].T)
        rounded(hidden)
        active = np.empty((len(rows), down.shape[2]), np.float32)
        swiglu(hidden, limit, active, rounded)
        part = np.matmul(active, down[e].T)
        part *= weights[rows, places][:, None]
        out[rows] += part
