"""The feed-forward sub-layer (specification 3.7): a dense MLP, or routed experts and a shared one."""

from __future__ import annotations

from kernels.rows import Array
from services.rank_worker.model.pass_ import Pass
from services.rank_worker.model.shard import Mlp, Moe


def ffn(p: Pass, weights: Mlp | Moe, x: Array, partial: Array) -> None:
    """partial f32 [T, d] = this rank's columns of the sub-layer's output; x compute [T, d], normed."""
    if isinstance(weights, Mlp):
        _mlp(p, weights, x, partial)
    else:
        _moe(p, weights, x, partial)


def _mlp(p: Pass, weights: Mlp, x: Array, partial: Array) -> None:
    k, path, total = p.kernels, p.batch.path, p.batch.total
    width = weights.down.shape[1]
    gate_up = p.workspace.take("gate_up", total, 2 * width)
    activated = p.workspace.take("activated", total, width)
    k.linear(path, x, weights.gate_up, gate_up)
    k.swiglu(gate_up, p.geometry.swiglu_limit, activated)
    k.linear_f32(path, activated, weights.down, partial)


def _moe(p: Pass, weights: Moe, x: Array, partial: Array) -> None:
    k, g, batch = p.kernels, p.geometry, p.batch
    chosen, shares = p.take("experts"), p.take("expert_weights")
    k.route(
        batch.path,
        x,
        weights.router,
        weights.bias,
        g.groups,
        g.groups_kept,
        g.normalise_weights,
        g.routed_scale,
        chosen,
        shares,
    )
    k.experts(batch.path, x, chosen, shares, batch.rows, weights.gate_up, weights.down, g.swiglu_limit, partial)
    shared = p.take("shared")
    _mlp(p, weights.shared, x, shared)
    k.add(partial, shared, partial)
