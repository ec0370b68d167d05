"""The KDA sub-layer (specification 3.4) on both paths."""

from __future__ import annotations

import numpy as np

from kernels.api import Path
from kernels.rows import Array
from services.rank_worker.model.batch import Batch
from services.rank_worker.model.pass_ import Pass
from services.rank_worker.model.shard import Kda


def kda(p: Pass, layer: int, weights: Kda, x: Array, partial: Array) -> None:
    """partial f32 [T, d] = this rank's heads of the sub-layer's output; x compute [T, d], normed. `layer` counts KDA layers.
    Reads and writes the lanes' convolution windows and states."""
    k, g, batch = p.kernels, p.geometry, p.batch
    total, dim = batch.total, g.kda_head_dim
    heads = weights.a_log.shape[0]
    convolved = _convolve(p, p.arena.conv[layer], weights, x).reshape(total, 3, heads, dim)
    queries, keys, values = convolved[:, 0], convolved[:, 1], convolved[:, 2]

    decay, beta = p.take("decay"), p.take("beta")
    forget = _low_rank(p, x, weights.f_a, weights.f_b, "forget")
    k.kda_gate(forget, weights.dt_bias, weights.a_log, g.gate_lower_bound, decay)
    beta_raw = p.take("beta_raw")
    k.linear(batch.path, x, weights.b, beta_raw)
    k.sigmoid(beta_raw, beta)

    out = p.take("kda_out")
    states = p.arena.states[layer]
    decay = decay.reshape(total, heads, dim)
    if batch.path is Path.PROMPT:
        state = states[int(batch.source[0])]
        k.kda_prompt(queries, keys, values, decay, beta, batch.rows, state, state, out)
    else:
        window = (batch.windows, batch.width)
        k.kda_decode(
            queries.reshape(*window, heads, dim), keys.reshape(*window, heads, dim), values.reshape(*window, heads, dim),
            decay.reshape(*window, heads, dim), beta.reshape(*window, heads), states, batch.source, batch.target,
            out.reshape(*window, heads, dim),
        )  # fmt: skip
    gate = _low_rank(p, x, weights.g_a, weights.g_b, "gate")
    gated = p.take("kda_gated")
    k.kda_output(out, gate, weights.o_norm, g.rms_eps, gated)
    k.linear_f32(batch.path, gated, weights.o, partial)


def _low_rank(p: Pass, x: Array, a: Array, b: Array, name: str) -> Array:
    narrow, out = p.take("narrow"), p.take(name)
    p.kernels.linear(p.batch.path, x, a, narrow)
    p.kernels.linear(p.batch.path, narrow, b, out)
    return out


def _convolve(p: Pass, ring: Array, weights: Kda, x: Array) -> Array:
    """q, k, v after convolution and silu, compute [T, 3w]."""
    k, batch = p.kernels, p.batch
    before = p.geometry.conv_taps - 1
    raw = p.take("qkv")
    k.linear(batch.path, x, weights.qkv, raw)
    width = raw.shape[1]

    lanes, positions = _rows_before(batch, before)
    head = p.workspace.take("conv_before", batch.windows * before)
    k.read_ring(ring, lanes, positions, head)
    u = p.workspace.take("conv_in", batch.windows * before + batch.total).reshape(batch.windows, before + batch.width, width)
    u[:, :before] = head.reshape(batch.windows, before, width)
    u[:, before:] = raw.reshape(batch.windows, batch.width, width)
    convolved = p.take("conv")
    k.kda_conv(u, weights.conv, convolved.reshape(batch.windows, batch.width, width))

    first = max(0, batch.rows - ring.shape[1]) if batch.path is Path.PROMPT else 0
    kept = slice(first, batch.rows)
    k.write_ring(raw[kept], ring, batch.lanes[kept], batch.positions[kept])
    return convolved


def _rows_before(batch: Batch, before: int) -> tuple[Array, Array]:
    positions = batch.starts[:, None] + np.arange(-before, 0, dtype=np.int32)
    return np.repeat(batch.window_lanes, before), positions.reshape(-1)
