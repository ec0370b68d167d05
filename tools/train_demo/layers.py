"""What every part of the model is made of, and how functions of a training step are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor

_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function on its first training step on a GPU. Without gradients it runs as written: compiled for inference
    (torch 2.11) the same input gave other, wrong values on each run."""

    def call(*arguments: Any) -> Any:
        if not arguments[0].is_cuda or not torch.is_grad_enabled():
            return function(*arguments)
        if function not in _compiled:
            _compiled[function] = torch.compile(function, dynamic=False)
        return _compiled[function](*arguments)

    return call


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] by weight [out, in] f32, in x's dtype."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rounded to x's dtype before it is scaled (specification 3.1)."""
    x32 = x.float()
    y = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight.to(x.dtype)
