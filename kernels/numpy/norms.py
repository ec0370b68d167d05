"""Norms and the activation of the MLP (specification 3.1)."""

from __future__ import annotations

import functools

import numpy as np

from kernels.numpy.elementwise import mean_square, silu
from kernels.numpy.rounding import Round
from kernels.rows import Array


def rms_norm(x: Array, w: Array, eps: float, out: Array, rounded: Round) -> None:
    root = mean_square(x)
    root += np.float32(eps)
    np.sqrt(root, out=root)
    np.divide(x, root[:, None], out=out)
    rounded(out)
    out *= w
    rounded(out)


def layer_norm(x: Array, w: Array, b: Array, eps: float, out: Array, rounded: Round) -> None:
    mean = np.vecdot(x, _ones(x.shape[-1]))
    mean /= np.float32(x.shape[-1])
    np.subtract(x, mean[:, None], out=out)
    root = mean_square(out)
    root += np.float32(eps)
    np.sqrt(root, out=root)
    out /= root[:, None]
    out *= w
    out += b
    rounded(out)


@functools.cache
def _ones(width: int) -> Array:
    return np.ones(width, np.float32)


def swiglu(gate_up: Array, limit: float, out: Array, rounded: Round) -> None:
    width = gate_up.shape[-1] // 2
    bound = np.float32(limit)
    gate = np.minimum(gate_up[..., :width], bound)
    silu(gate, out)
    rounded(out)
    up = np.minimum(gate_up[..., width:], bound, out=gate)
    out *= np.maximum(up, -bound, out=up)
    rounded(out)
