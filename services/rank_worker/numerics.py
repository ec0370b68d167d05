"""The numerics digest: what a backend, its BLAS, the processor and library versions do to bits (design section 3).

A small model of this geometry, one layer of each kind in rank 0's shapes for this W, is run on fixed weights and tokens: one
prompt block, then decode windows of 1, 2 and 8 rows. Every rank computes the same thing, so ranks can compare.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np

from kernels.api import Kernels
from kernels.rows import Array
from latentpool.geometry import BLOCK, Geometry, Layer, shares
from services.rank_worker import frames
from services.rank_worker.arena import Arena
from services.rank_worker.exchange.inproc import Hub
from services.rank_worker.model.model import Model
from services.rank_worker.model.shard import Block, Hyper, Indexer, Kda, Mla, Mlp, Moe, Shard
from services.rank_worker.rounds import RAW_LOGITS, Rounds

_LANES = 8
_VOCABULARY = 4096
"""Rows of the embedding and head that are made at most: more would only repeat the same product."""
_SEED = 20260101
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 0},
    {"temperature": 0.0, "top_k": 0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.3, "top_k": 0, "top_p": 0.9, "min_p": 0.01},
)
"""Every way to draw a token."""


def numerics_digest(geometry: Geometry, kernels: Kernels, kv_dtype: str, world: int) -> str:
    """Hex, 16 characters; equal where two hosts give equal bits for this geometry, W and dtypes."""
    small = _small(geometry, world)
    shard = _Maker(small, kernels, world).shard()
    model = Model(small, kernels, shard, world=1, rank=0)
    arena = Arena(small, kernels, kv_dtype, world=world, rank=0, pages=2 * _LANES, lanes=_LANES, context=BLOCK, page_rows=BLOCK)
    rounds = Rounds(
        small, kernels, model, arena, Hub(1).member(0), chunk_rows=BLOCK, deadline=0.0, tick=lambda: None,
        shapes_of=(world, 0),
    )  # fmt: skip
    operations: list[frames.Operation] = []
    for lane in range(_LANES):
        operations += [
            frames.Bind(lane, lane, seed=_SEED + lane, **_SAMPLING[lane % len(_SAMPLING)]),
            frames.Table(lane, 0, [2 * lane, 2 * lane + 1]),
        ]
    tokens = [(37 * i + 11) % small.vocab for i in range(BLOCK - 3)]
    operations.append(frames.Prompt(0, 0, tokens, last=True, logits=RAW_LOGITS))
    operations.append(frames.Decode([0], 1, [], logits=RAW_LOGITS))
    operations.append(frames.Decode([0], 2, tokens[:2], logits=RAW_LOGITS))
    operations += [frames.Prompt(lane, 0, tokens[:lane], last=True) for lane in range(1, _LANES)]
    operations.append(frames.Decode(list(range(_LANES)), 1, [], logits=RAW_LOGITS))
    operations.append(frames.Decode(list(range(_LANES)), 1, [], log_probs=4))
    result = rounds.execute(frames.Round(1, 1, 1, operations))
    digest = hashlib.sha256(f"{kernels.name} {kernels.dtype} {kv_dtype} {world}".encode())
    for part in result.results:
        digest.update(part.digest.to_bytes(8, "little"))
        if part.scores is not None:
            digest.update(part.scores.raw + part.scores.sum + part.scores.top_logits)
    return digest.hexdigest()[:16]


def _small(g: Geometry, world: int) -> Geometry:
    """One layer of each kind in order of first appearance, few experts, rank 0's vocabulary rows."""
    layers: list[Layer] = []
    for layer in g.layers:
        if layer not in layers:
            layers.append(layer)
    a_group = max(2, -(-2 * g.experts_per_token // g.groups))
    experts = min(g.experts, g.groups * a_group)
    vocabulary = min(shares(g.vocab, world)[0], _VOCABULARY)
    return replace(g.without_drafts(), layers=tuple(layers), experts=experts, vocab=vocabulary, image_ids=())


class _Maker:
    """Fixed random weights in rank 0's shapes."""

    def __init__(self, geometry: Geometry, kernels: Kernels, world: int) -> None:
        self._g = geometry
        self._kernels = kernels
        self._world = world
        self._random = np.random.Generator(np.random.PCG64(_SEED))

    def shard(self) -> Shard:
        g = self._g
        return Shard(
            embed=self._weight(g.vocab, g.hidden, scale=1.0),
            blocks=tuple(self._block(layer) for layer in g.layers),
            norm=self._norm(g.hidden),
            head=self._weight(g.vocab, g.hidden),
        )

    def _mine(self, total: int) -> int:
        return shares(total, self._world)[0]

    def _values(self, shape: tuple[int, ...], scale: float, mean: float = 0.0) -> Array:
        return self._random.standard_normal(shape, dtype=np.float32) * np.float32(scale) + np.float32(mean)

    def _weight(self, *shape: int, scale: float | None = None) -> Array:
        """compute [..., out, in], scaled so that products keep the size of their input."""
        return self._kernels.upload(self._values(shape, shape[-1] ** -0.5 if scale is None else scale), "compute")

    def _norm(self, *shape: int) -> Array:
        return self._kernels.upload(self._values(shape, 0.1, 1.0), "compute")

    def _f32(self, *shape: int, scale: float = 0.5) -> Array:
        return self._kernels.upload(self._values(shape, scale), "f32")

    def _hyper(self) -> Hyper:
        g = self._g
        rows = (2 + g.streams) * g.streams
        return Hyper(self._f32(rows, g.streams * g.hidden, scale=0.02), self._f32(rows), self._f32(3))

    def _block(self, layer: Layer) -> Block:
        g = self._g
        attn = self._kda() if layer.kind == "kda" else self._mla(layer.index == "full")
        ffn = self._moe() if layer.sparse_mlp else self._mlp(self._mine(g.dense_width))
        return Block(self._hyper(), self._norm(g.hidden), attn, self._hyper(), self._norm(g.hidden), ffn)

    def _kda(self) -> Kda:
        g = self._g
        heads, dim = self._mine(g.kda_heads), g.kda_head_dim
        width = heads * dim
        return Kda(
            qkv=self._weight(3 * width, g.hidden), conv=self._f32(g.conv_taps, 3 * width),
            f_a=self._weight(dim, g.hidden), f_b=self._weight(width, dim),
            dt_bias=self._f32(width), a_log=self._f32(heads), b=self._weight(heads, g.hidden),
            g_a=self._weight(dim, g.hidden), g_b=self._weight(width, dim),
            o_norm=self._f32(dim), o=self._weight(g.hidden, width),
        )  # fmt: skip

    def _mla(self, indexed: bool) -> Mla:
        g = self._g
        heads = self._mine(g.heads)
        return Mla(
            q_a=self._weight(g.q_rank, g.hidden), q_norm=self._norm(g.q_rank),
            q_b=self._weight(heads * g.nope_dim, g.q_rank),
            kv_a=self._weight(g.latent, g.hidden), kv_norm=self._norm(g.latent),
            b_k=self._weight(heads, g.latent, g.nope_dim), b_v=self._weight(heads, g.v_dim, g.latent),
            o=self._weight(g.hidden, heads * g.v_dim), indexer=self._indexer() if indexed else None,
        )  # fmt: skip

    def _indexer(self) -> Indexer:
        g = self._g
        return Indexer(
            q_b=self._weight(g.index_heads * g.index_dim, g.q_rank), k=self._weight(g.index_dim, g.hidden),
            k_norm=self._norm(g.index_dim), k_bias=self._weight(g.index_dim),
            weights=self._weight(g.index_heads, g.hidden), ape=self._weight(g.pool, g.index_dim),
            gate=self._weight(g.index_dim, g.hidden),
        )  # fmt: skip

    def _mlp(self, width: int) -> Mlp:
        return Mlp(self._weight(2 * width, self._g.hidden), self._weight(self._g.hidden, width))

    def _moe(self) -> Moe:
        g = self._g
        width = self._mine(g.expert_width)
        return Moe(
            router=self._f32(g.experts, g.hidden, scale=0.1), bias=self._f32(g.experts, scale=0.1),
            gate_up=self._weight(g.experts, 2 * width, g.hidden), down=self._weight(g.experts, g.hidden, width),
            shared=self._mlp(self._mine(g.expert_width * g.shared_experts)),
        )  # fmt: skip
