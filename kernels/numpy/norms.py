"""Norms and the activation of the MLP (specification 3.1)."""

from __future__ import annotations

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
    mean = np.vecdot(x, np.ones(x.shape[-1], np.float32))
    mean /= np.float32(x.shape[-1])
    np.subtract(x, mean[:, None], out=out)
    root = mean_square(out)
    root += np.float32(eps)
    np.sqrt(root, out=root)
    out /= root[:, None]
    out *= w
    out += b
    rounded(out)


def swiglu(gate_up: Array, limit: float, out: Array, rounded: Round) -> None:
    width = gate_up.shape[-1] // 2
    bound = np.float32(limit)
    gate = np.minimum(gate_up[..., :width], bound)
    silu(gate, out)
    rounded(out)
    out *= np.clip(gate_up[..., width:], -bound, bound)
    rounded(out)
