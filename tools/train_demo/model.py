"""The forward pass of a `glm5_next` model for training: functions of a weights dictionary.

Rows of all conversations stand in one axis of T = B L tokens, so that shapes, and what is compiled for them, do not change with
the length L. Source: model specification section 3; its symbols name the variables. Weights are f32 and are rounded to the
activations' dtype where they are used; norms, gates, Sinkhorn and softmax are f32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor

from latentpool.geometry import Geometry
from tools.train_demo.attention import Focus, Supervision, attend
from tools.train_demo.kernels import kda, sinkhorn
from tools.train_demo.layers import fused, linear, rms_norm
from tools.train_demo.weights import Weights


@dataclass(slots=True)
class Result:
    """`hidden` [T, d] after the final norm; `draft` [T, d] after the draft layer's norm, or None; what the attention layers
    were told off for; `loads` by router name: the part of tokens each expert got [E]."""

    hidden: Tensor
    draft: Tensor | None
    supervisions: dict[str, Supervision]
    loads: dict[str, Tensor]


# ---- hyper-connections -----------------------------------------------------------------------------------------------


@fused
def _hyper_in(X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, eps: float, eps_h: float) -> tuple[Tensor, ...]:
    """X [T, N, d] -> the sub-layer's normed input [T, d], post [T, N], and C before Sinkhorn [T, N, N] f32."""
    T, N = X.shape[:2]
    v = X.float().flatten(1)
    z = F.linear(v, fn) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    pre = torch.sigmoid(scale[0] * z[:, :N] + base[:N]) + eps_h
    post = 2 * torch.sigmoid(scale[1] * z[:, N : 2 * N] + base[N : 2 * N])
    C = torch.softmax((scale[2] * z[:, 2 * N :] + base[2 * N :]).view(T, N, N), -1) + eps_h
    x = (pre[:, :, None] * X.float()).sum(1).to(X.dtype)
    return rms_norm(x, norm, eps), post.to(X.dtype), C


@fused
def _hyper_out(X: Tensor, y: Tensor, post: Tensor, C: Tensor) -> Tensor:
    """Stream n receives post_n y and column n of C."""
    mix = C.to(X.dtype).float()
    X32, y32, post32 = X.float(), y.float(), post.float()
    N = X.shape[1]
    streams = [post32[:, n, None] * y32 + sum(mix[:, j, n, None] * X32[:, j] for j in range(N)) for n in range(N)]
    return torch.stack(streams, 1).to(X.dtype)


# ---- KDA -------------------------------------------------------------------------------------------------------------


@fused
def _kda_in(
    x: Tensor, place: Tensor, qkv: Tensor, conv: Tensor, f_a: Tensor, f_b: Tensor, dt_bias: Tensor, a_log: Tensor, b: Tensor,
    gamma: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """x [T, d], place [T] in its conversation -> q, k, v [T, H D], G [T, H D] f32, beta [T, H] f32."""
    u = linear(x, qkv)
    taps = conv.shape[-1]
    a = u.float() * conv[:, 0, taps - 1]
    for back in range(1, taps):
        earlier = F.pad(u, (0, 0, back, 0))[: u.shape[0]].float()
        a = a + earlier * conv[:, 0, taps - 1 - back] * (place >= back)[:, None]
    q, k, v = F.silu(a).to(x.dtype).chunk(3, -1)
    f = linear(linear(x, f_a), f_b).float() + dt_bias
    H = a_log.shape[0]
    G = gamma * torch.sigmoid(torch.exp(a_log)[:, None] * f.view(-1, H, f.shape[1] // H))
    return q.contiguous(), k.contiguous(), v.contiguous(), G, torch.sigmoid(linear(x, b)).float()


@fused
def _kda_out(o: Tensor, x: Tensor, g_a: Tensor, g_b: Tensor, o_norm: Tensor, out: Tensor, eps: float) -> Tensor:
    """o [T, H, D] -> [T, d]: gated norm a head, then the output projection."""
    gate = torch.sigmoid(linear(linear(x, g_a), g_b).float()).view(o.shape)
    o32 = o.float()
    n = o_norm * o32 * torch.rsqrt(o32.square().mean(-1, keepdim=True) + eps) * gate
    return linear(n.to(x.dtype).flatten(1), out)


def _kda(w: Weights, g: Geometry, at: str, x: Tensor, place: Tensor, length: int) -> Tensor:
    names = ("qkv", "conv", "f_a", "f_b", "dt_bias", "A_log", "b")
    q, k, v, G, beta = _kda_in(x, place, *(w[at + name] for name in names), g.gate_lower_bound)
    shape = (-1, length, g.kda_heads, g.kda_head_dim)
    o = kda(q.view(shape), k.view(shape), v.view(shape), G.view(shape), beta.view(shape[:3]))
    o = o.reshape(-1, g.kda_heads, g.kda_head_dim)
    return _kda_out(o, x, w[at + "g_a"], w[at + "g_b"], w[at + "o_norm"], w[at + "o"], g.rms_eps)


# ---- MLP and MoE -----------------------------------------------------------------------------------------------------


def _clamped(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


@fused
def _dense(x: Tensor, gate_up: Tensor, down: Tensor, limit: float) -> Tensor:
    return linear(_clamped(linear(x, gate_up), limit), down)


@fused
def _mix(
    x: Tensor, router: Tensor, bias: Tensor, gate_up: Tensor, down: Tensor, shared: Tensor, shared_down: Tensor, limit: float,
    chosen: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [T, d] -> [T, d] and the part of tokens each expert got. All experts run on all tokens as one product: they are few
    and small, and those not chosen weigh nothing."""
    E, twice, d = gate_up.shape
    p = torch.sigmoid(F.linear(x.float(), router))
    picked = torch.zeros_like(p).scatter(1, (p + bias).topk(chosen, -1).indices, 1.0)
    weight = p * picked
    weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * scale
    inner = _clamped(linear(x, gate_up.reshape(E * twice, d)).view(-1, E, twice), limit)
    inner = (inner * weight[:, :, None].to(x.dtype)).flatten(1)
    y = linear(inner, down.permute(1, 0, 2).reshape(d, -1))
    return y + linear(_clamped(linear(x, shared), limit), shared_down), picked.mean(0)


def _feed(w: Weights, g: Geometry, at: str, x: Tensor, loads: dict[str, Tensor]) -> Tensor:
    at += "mlp."
    if at + "router" not in w:
        return _dense(x, w[at + "gate_up"], w[at + "down"], g.swiglu_limit)
    names = ("router", "bias", "experts.gate_up", "experts.down", "shared.gate_up", "shared.down")
    y, load = _mix(x, *(w[at + name] for name in names), g.swiglu_limit, g.experts_per_token, g.routed_scale)
    loads[at + "bias"] = load.detach()
    return y


# ---- the whole -------------------------------------------------------------------------------------------------------


@fused
def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps)


@fused
def _paired(embedded: Tensor, hidden: Tensor, enorm: Tensor, hnorm: Tensor, eh_proj: Tensor, eps: float) -> Tensor:
    both = torch.cat([rms_norm(embedded, enorm, eps), rms_norm(hidden, hnorm, eps)], -1)
    return linear(both, eh_proj)


def forward(
    w: Weights, g: Geometry, tokens: Tensor, dtype: torch.dtype, sparse: bool, focus: Focus | None = None, draft: bool = True
) -> Result:
    """tokens [B, L] -> a Result. `sparse`: attention over the index's selection instead of all earlier tokens. `focus`: where
    attention is supervised. The draft layer gets the main model's hidden rows and embeddings detached: it learns alone."""
    B, L = tokens.shape
    place = torch.arange(L, device=tokens.device).repeat(B)
    result = Result(torch.empty(0), None, {}, {})
    X = F.embedding(tokens.flatten(), w["embed"]).to(dtype)[:, None].expand(-1, g.streams, -1).contiguous()
    for i, layer in enumerate(g.layers):
        at = f"{i}."
        x, post, C = _hyper_in(X, *_hyper(w, at + "attn."), g.rms_eps, g.hyper_eps)
        supervised = (sparse, focus, result.supervisions)
        y = _kda(w, g, at, x, place, L) if layer.kind == "kda" else attend(w, g, at, x, L, *supervised)
        X = _hyper_out(X, y, post, sinkhorn(C, g.sinkhorn_iters, g.hyper_eps))
        x, post, C = _hyper_in(X, *_hyper(w, at + "ffn."), g.rms_eps, g.hyper_eps)
        y = _feed(w, g, at, x, result.loads)
        X = _hyper_out(X, y, post, sinkhorn(C, g.sinkhorn_iters, g.hyper_eps))
    result.hidden = _normed(X.float().mean(1).to(dtype), w["norm"], g.rms_eps)
    if draft and g.draft_layers:
        result.draft = _draft(w, g, tokens, result, sparse, focus)
    return result


def _hyper(w: Weights, at: str) -> tuple[Tensor, ...]:
    return w[at + "hc_fn"], w[at + "hc_base"], w[at + "hc_scale"], w[at + "norm"]


def _draft(w: Weights, g: Geometry, tokens: Tensor, result: Result, sparse: bool, focus: Focus | None) -> Tensor:
    """Row p pairs hidden row p with token p+1 and speaks of token p+2 (specification section 4). A conversation's last row
    has no token behind it; it gets the first one's, and nothing looks at it."""
    hidden = result.hidden.detach()
    following = F.embedding(tokens.roll(-1, 1).flatten(), w["embed"].detach()).to(hidden.dtype)
    names = ("draft.enorm", "draft.hnorm", "draft.eh_proj")
    x = _paired(following, hidden, *(w[name] for name in names), g.rms_eps)
    normed = _normed(x, w["draft.attn.norm"], g.rms_eps)
    before = focus.one_earlier() if focus is not None else None
    x = x + attend(w, g, "draft.", normed, tokens.shape[1], sparse, before, result.supervisions)
    x = x + _feed(w, g, "draft.", _normed(x, w["draft.ffn.norm"], g.rms_eps), result.loads)
    return _normed(x, w["draft.shared_head.norm"], g.rms_eps)
