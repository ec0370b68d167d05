"""One rank's part of the weights, in the form the operations take.

Columns of per-head weights, expert columns and vocabulary are split (latentpool.geometry.share); everything else is whole
on every rank. `compute` and `f32` arrays are as in kernels.api. d hidden, H KDA heads here, D their dim, w = H D, h MLA
heads here, m and f expert and dense columns here, V vocabulary rows here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.rows import Array


@dataclass(frozen=True, slots=True)
class Hyper:
    """A hyper-connection: fn f32 [(2+N)N, N d], base f32 [(2+N)N], scale f32 [3]."""

    fn: Array
    base: Array
    scale: Array


@dataclass(frozen=True, slots=True)
class Kda:
    qkv: Array  # compute [3w, d]: q rows of this rank's heads, then k, then v
    conv: Array  # f32 [c, 3w]: tap-major, the last tap weighs the current token
    f_a: Array  # compute [D, d]
    f_b: Array  # compute [w, D]
    dt_bias: Array  # f32 [w]
    a_log: Array  # f32 [H]
    b: Array  # compute [H, d]
    g_a: Array  # compute [D, d]
    g_b: Array  # compute [w, D]
    o_norm: Array  # f32 [D]
    o: Array  # compute [d, w]


@dataclass(frozen=True, slots=True)
class Indexer:
    q_b: Array  # compute [n_I d_I, r_q]
    k: Array  # compute [d_I, d]
    k_norm: Array  # compute [d_I]
    k_bias: Array  # compute [d_I]
    weights: Array  # compute [n_I, d]
    ape: Array  # compute [P, d_I]
    gate: Array  # compute [d_I, d]


@dataclass(frozen=True, slots=True)
class Mla:
    q_a: Array  # compute [r_q, d]
    q_norm: Array  # compute [r_q]
    q_b: Array  # compute [h d_n, r_q]
    kv_a: Array  # compute [r, d]
    kv_norm: Array  # compute [r]
    b_k: Array  # compute [h, r, d_n]: (B^K)ᵀ a head
    b_v: Array  # compute [h, d_v, r]
    o: Array  # compute [d, h d_v]
    indexer: Indexer | None  # None: a `shared` layer


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Array  # compute [2f, d]: gate rows, then up rows
    down: Array  # compute [d, f]


@dataclass(frozen=True, slots=True)
class Moe:
    router: Array  # f32 [E, d]
    bias: Array  # f32 [E]
    gate_up: Array  # compute [E, 2m, d]
    down: Array  # compute [E, d, m]
    shared: Mlp  # f = this rank's columns of n_s m


@dataclass(frozen=True, slots=True)
class Block:
    attn_hyper: Hyper
    attn_norm: Array  # compute [d]
    attn: Kda | Mla
    ffn_hyper: Hyper
    ffn_norm: Array  # compute [d]
    ffn: Mlp | Moe


@dataclass(frozen=True, slots=True)
class Shard:
    embed: Array  # compute [V, d]
    blocks: tuple[Block, ...]
    norm: Array  # compute [d]
    head: Array  # compute [V, d]
