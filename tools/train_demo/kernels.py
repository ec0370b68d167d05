"""Sinkhorn normalisation and the KDA recurrence: their definitions in PyTorch, and on a GPU fast forms of the same.

Sources: model specification 3.3 (Sinkhorn) and 3.4 (KDA); the fast recurrence is fla-core's chunked kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU: the definitions serve
    triton = None

BLOCK = 128

# ---- Sinkhorn --------------------------------------------------------------------------------------------------------


def sinkhorn_definition(C: Tensor, iterations: int, eps: float) -> Tensor:
    """C [T, N, N] f32, positive. Columns first, then rows and columns in turn; ends on columns."""
    C = C / (C.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        C = C / (C.sum(2, keepdim=True) + eps)
        C = C / (C.sum(1, keepdim=True) + eps)
    return C


if triton is not None:

    @triton.jit
    def _divided(C, sums_at, row, n, T, eps, step, N: tl.constexpr, AXIS: tl.constexpr):
        total = tl.sum(C, axis=AXIS)
        tl.store(sums_at + (step * T + row[:, None]) * N + n[None, :], total, mask=(row < T)[:, None])
        return C / (tl.expand_dims(total, AXIS) + eps)

    @triton.jit
    def _undone(C, grad, sums_at, row, n, T, eps, step, N: tl.constexpr, AXIS: tl.constexpr):
        total = tl.load(sums_at + (step * T + row[:, None]) * N + n[None, :], mask=(row < T)[:, None], other=1.0)
        divisor = tl.expand_dims(total, AXIS) + eps
        return C * divisor, (grad - tl.expand_dims(tl.sum(grad * C, axis=AXIS), AXIS)) / divisor

    @triton.jit
    def _forward(c_at, out_at, sums_at, T, eps, ROUNDS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        n = tl.arange(0, N)
        at = row[:, None, None] * (N * N) + n[None, :, None] * N + n[None, None, :]
        known = (row < T)[:, None, None]
        C = tl.load(c_at + at, mask=known, other=1.0)
        C = _divided(C, sums_at, row, n, T, eps, 0, N, 1)
        for i in range(ROUNDS):
            C = _divided(C, sums_at, row, n, T, eps, 2 * i + 1, N, 2)
            C = _divided(C, sums_at, row, n, T, eps, 2 * i + 2, N, 1)
        tl.store(out_at + at, C, mask=known)

    @triton.jit
    def _backward(out_at, sums_at, grad_at, c_grad_at, T, eps, ROUNDS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        n = tl.arange(0, N)
        at = row[:, None, None] * (N * N) + n[None, :, None] * N + n[None, None, :]
        known = (row < T)[:, None, None]
        C = tl.load(out_at + at, mask=known, other=1.0)
        grad = tl.load(grad_at + at, mask=known, other=0.0)
        for i in range(ROUNDS):
            C, grad = _undone(C, grad, sums_at, row, n, T, eps, 2 * (ROUNDS - i), N, 1)
            C, grad = _undone(C, grad, sums_at, row, n, T, eps, 2 * (ROUNDS - i) - 1, N, 2)
        C, grad = _undone(C, grad, sums_at, row, n, T, eps, 0, N, 1)
        tl.store(c_grad_at + at, grad, mask=known)


class _Sinkhorn(torch.autograd.Function):  # type: ignore[misc, unused-ignore]  # Any where torch is not installed
    """One kernel each way. The forward keeps every step's sums, from which the backward rebuilds the matrices."""

    @staticmethod
    def forward(ctx: Any, C: Tensor, iterations: int, eps: float) -> Tensor:
        C = C.contiguous()
        T, N = C.shape[:2]
        out = torch.empty_like(C)
        sums = torch.empty((2 * iterations - 1, T, N), device=C.device, dtype=C.dtype)
        _forward[(triton.cdiv(T, BLOCK),)](C, out, sums, T, eps, iterations - 1, N, BLOCK)
        ctx.save_for_backward(out, sums)
        ctx.rounds, ctx.eps = iterations - 1, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out, sums = ctx.saved_tensors
        T, N = out.shape[:2]
        c_grad = torch.empty_like(out)
        _backward[(triton.cdiv(T, BLOCK),)](out, sums, grad.contiguous(), c_grad, T, ctx.eps, ctx.rounds, N, BLOCK)
        return c_grad, None, None


def sinkhorn(C: Tensor, iterations: int, eps: float) -> Tensor:
    """As `sinkhorn_definition`, in one kernel on a GPU."""
    if C.is_cuda:
        return _Sinkhorn.apply(C, iterations, eps)
    return sinkhorn_definition(C, iterations, eps)


# ---- KDA -------------------------------------------------------------------------------------------------------------


def kda_definition(q: Tensor, k: Tensor, v: Tensor, G: Tensor, beta: Tensor) -> Tensor:
    """Token by token. q, k, v [B, L, H, D] before normalisation; G [B, L, H, D] f32 log decay; beta [B, L, H]. Returns
    [B, L, H, D] in v's dtype."""
    q, k, values = q.float(), k.float(), v.float()
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    state = torch.zeros(*q.shape[:1], q.shape[2], q.shape[3], v.shape[3], device=q.device)
    rows = []
    for t in range(q.shape[1]):
        state = state * G[:, t, :, :, None].exp()
        seen = (state * k[:, t, :, :, None]).sum(2)
        delta = beta[:, t, :, None].float() * (values[:, t] - seen)
        state = state + k[:, t, :, :, None] * delta[:, :, None, :]
        rows.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(rows, 1).to(v.dtype)


def kda(q: Tensor, k: Tensor, v: Tensor, G: Tensor, beta: Tensor) -> Tensor:
    """As `kda_definition`, by fla-core's chunked kernel on a GPU."""
    if not q.is_cuda:
        return kda_definition(q, k, v, G, beta)
    _untuned()
    from fla.ops.kda import chunk_kda

    return chunk_kda(q, k, v, G, beta, use_qk_l2norm_in_kernel=True)[0]


_patched = False


def _untuned() -> None:
    """Triton takes one configuration a kernel instead of timing dozens: that costs minutes at start, for no faster steps."""
    global _patched
    if _patched:
        return
    _patched = True
    from triton.runtime.autotuner import Autotuner

    whole = Autotuner.__init__

    def first(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        if configs:
            configs = [min(configs, key=lambda c: (abs(c.num_warps - 4), abs(c.num_stages - 2)))]
        whole(self, fn, arg_names, configs, *args, **kwargs)

    Autotuner.__init__ = first
