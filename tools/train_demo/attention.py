"""MLA with its pooled index for training: dense or over the selection, and what teaches both where to look.

Source: model specification sections 3.5 and 3.6. Two auxiliary losses come from here. Attention: at a position whose next
token is copied, the probability (mean over heads) of the token it is copied from. Index: how far the scores of pools are
from the mass that attention puts on them; the index sees detached inputs, so it follows attention and does not steer it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor

from latentpool.geometry import Geometry
from tools.train_demo.layers import linear, rms_norm
from tools.train_demo.weights import Weights

_MASK_ELEMENTS = 1 << 29


@dataclass(frozen=True, slots=True)
class Focus:
    """[B, n] each: positions before a copied token, the positions it is copied from (-1: none), and positions anywhere."""

    asked: Tensor
    sources: Tensor
    others: Tensor

    def one_earlier(self) -> Focus:
        """The same for the draft layer, whose row p holds token p+1 and speaks of token p+2."""
        return Focus((self.asked - 1).clamp(min=0), self.sources - 1, self.others)


@dataclass(frozen=True, slots=True)
class Supervision:
    """Scalars: -log of the attention on the source, the index's divergence, and the attention on the source itself."""

    attention: Tensor
    index: Tensor
    on_source: Tensor


@dataclass(frozen=True, slots=True)
class Index:
    """What selection needs, of B conversations: queries [B, L, n, d], head weights [B, L, n] f32, pooled keys [B, L/P, d]."""

    queries: Tensor
    weights: Tensor
    keys: Tensor

    def scores(self, rows: Tensor) -> Tensor:
        """f32 scores [B, R, L/P] of the positions `rows` [B, R] for every pool, visible or not."""
        queries = _at(self.queries, rows).transpose(1, 2)
        weights = _at(self.weights, rows).transpose(1, 2)[..., None]
        products = queries @ self.keys[:, None].transpose(2, 3)
        return (F.relu(products * queries.shape[-1] ** -0.5).float() * weights).sum(1)


def _at(values: Tensor, rows: Tensor) -> Tensor:
    """values [B, L, ...] at positions rows [B, R] -> [B, R, ...]."""
    return values[torch.arange(rows.shape[0], device=rows.device)[:, None], rows]


def _index(w: Weights, g: Geometry, at: str, x: Tensor, c_q: Tensor, length: int) -> Index:
    """The index's part of a layer, on detached inputs [T, d] and [T, r_q]."""
    x, c_q = x.detach(), c_q.detach()
    kappa = F.layer_norm(linear(x, w[at + "k"]).float(), (g.index_dim,), w[at + "k_norm"], w[at + "k_bias"], 1e-6)
    gate = linear(x, w[at + "gate"]).view(-1, g.pool, g.index_dim)
    alpha = torch.softmax(gate.float() + w[at + "ape"], 1).to(x.dtype)
    keys = (alpha * kappa.to(x.dtype).view(gate.shape)).sum(1)
    queries = linear(c_q, w[at + "q_b"]).view(-1, length, g.index_heads, g.index_dim)
    weights = linear(x, w[at + "weights"]).float().view(-1, length, g.index_heads) * g.index_heads**-0.5
    return Index(queries, weights, keys.view(-1, length // g.pool, g.index_dim))


def selection(index: Index, g: Geometry, rows: Tensor) -> Tensor:
    """Whether each of the L tokens is attended by the positions `rows` [B, R]: bool [B, R, L]. By the indices of the best
    pools and not by a threshold: many pools may tie at score 0."""
    B, R = rows.shape
    pools = index.keys.shape[1]
    last = torch.arange(pools, device=rows.device) * g.pool + g.pool - 1
    hidden = last > rows[:, :, None]
    scores = index.scores(rows).masked_fill(hidden, -torch.inf)
    best = scores.topk(min(g.pools_kept, pools), -1).indices
    kept = torch.zeros((B, R, pools), dtype=torch.bool, device=rows.device).scatter(2, best, True) & ~hidden
    place = torch.arange(pools * g.pool, device=rows.device)
    tail = (place >= (rows[:, :, None] + 1) // g.pool * g.pool) & (place <= rows[:, :, None])
    return kept.repeat_interleave(g.pool, -1) | tail


def _sparse(q: Tensor, k: Tensor, v: Tensor, index: Index, g: Geometry) -> Tensor:
    """Attention over the selection, [B, h, L, d_v], in chunks of queries whose masks fit in memory."""
    B, _, L, _ = q.shape
    step = max(1, min(L, _MASK_ELEMENTS // (B * L)))
    outputs = []
    for start in range(0, L, step):
        rows = torch.arange(start, min(L, start + step), device=q.device).expand(B, -1)
        with torch.no_grad():
            mask = selection(index, g, rows)[:, None]
        outputs.append(F.scaled_dot_product_attention(q[:, :, start : start + step], k, v, attn_mask=mask))
    return torch.cat(outputs, 2)


def attend(
    w: Weights, g: Geometry, at: str, x: Tensor, length: int, sparse: bool, focus: Focus | None,
    supervisions: dict[str, Supervision],
) -> Tensor:  # fmt: skip
    """The MLA sub-layer: x [T, d] normed -> [T, d]. With `focus` it also adds its Supervision under `at`."""
    c_q = rms_norm(linear(x, w[at + "q_a"]), w[at + "q_norm"], g.rms_eps)
    row = rms_norm(linear(x, w[at + "kv_a"]), w[at + "kv_norm"], g.rms_eps)
    q = linear(c_q, w[at + "q_b"]).view(-1, length, g.heads, g.nope_dim).transpose(1, 2)
    both = linear(row, w[at + "kv_b"]).view(-1, length, g.heads, g.nope_dim + g.v_dim).transpose(1, 2)
    k, v = both[..., : g.nope_dim], both[..., g.nope_dim :]
    index = _index(w, g, at + "index.", x, c_q, length) if sparse or focus is not None else None
    o = _sparse(q, k, v, index, g) if sparse and index else F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if focus is not None and index is not None:
        supervisions[at] = _supervise(q, k, index, g, focus)
    return linear(o.transpose(1, 2).reshape(x.shape[0], -1), w[at + "o"])


def _mass(q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """Attention probabilities of positions rows [B, R] over all L tokens, mean over heads: [B, R, L] f32."""
    hidden = torch.arange(k.shape[2], device=q.device) > rows[:, None, :, None]
    queries = _at(q.transpose(1, 2), rows).transpose(1, 2)
    scores = (queries @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).mean(1)


def _supervise(q: Tensor, k: Tensor, index: Index, g: Geometry, focus: Focus) -> Supervision:
    asked = _mass(q, k, focus.asked)
    known = (focus.sources >= 0).float()
    on_source = asked.gather(2, focus.sources.clamp(min=0)[:, :, None])[:, :, 0]
    count = known.sum().clamp(min=1)
    attention = -(torch.log(on_source + 1e-9) * known).sum() / count
    with torch.no_grad():
        others = _mass(q, k, focus.others)
    divergence = _divergence(index, g, focus.asked, asked.detach(), known)
    divergence = divergence + _divergence(index, g, focus.others, others, torch.ones_like(known))
    return Supervision(attention, divergence / 2, (on_source.detach() * known).sum() / count)


def _divergence(index: Index, g: Geometry, rows: Tensor, mass: Tensor, known: Tensor) -> Tensor:
    """KL(attention's mass of the visible complete pools || softmax of the index's scores), mean over the known rows."""
    last = torch.arange(index.keys.shape[1], device=rows.device) * g.pool + g.pool - 1
    visible = last <= rows[:, :, None]
    target = mass.view(*mass.shape[:2], -1, g.pool).sum(-1) * visible
    target = target / (target.sum(-1, keepdim=True) + 1e-9)
    scores = torch.log_softmax(index.scores(rows).masked_fill(~visible, -1e9), -1)
    each = (target * (torch.log(target + 1e-9) - scores)).sum(-1)
    known = known * (rows >= g.pool - 1)
    return (each * known).sum() / known.sum().clamp(min=1)
