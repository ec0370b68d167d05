"""The MLA sub-layer in absorbed form with its index selection (specification 3.5 and 3.6)."""

from __future__ import annotations

from kernels.api import Path
from kernels.rows import Array
from services.rank_worker.model.pass_ import Pass, Selection
from services.rank_worker.model.shard import Indexer, Mla


def mla(p: Pass, layer: int, index_layer: int, weights: Mla, x: Array, partial: Array) -> None:
    """partial f32 [T, d] = this rank's heads of the sub-layer's output; x compute [T, d], normed. `layer` counts MLA layers,
    `index_layer` those with an indexer. Writes the pass's latent rows and pooled keys before anything reads them."""
    k, g, batch = p.kernels, p.geometry, p.batch
    path = batch.path
    q_raw, q_low = p.take("q_a"), p.take("q_normed")
    k.linear(path, x, weights.q_a, q_raw)
    k.rms_norm(q_raw, weights.q_norm, g.rms_eps, q_low)

    latent_raw, latent = p.take("latent_raw"), p.take("latent")
    k.linear(path, x, weights.kv_a, latent_raw)
    k.rms_norm(latent_raw, weights.kv_norm, g.rms_eps, latent)
    p.latent_rows.store(p, layer, latent)

    q, absorbed = p.take("q"), p.take("absorbed")
    k.linear(path, q_low, weights.q_b, q.reshape(batch.total, -1))
    k.absorb(path, q, weights.b_k, absorbed)
    p.latent_rows.send_queries(p, absorbed)
    if weights.indexer is not None:
        _write_pools(p, index_layer, weights.indexer, x)
        p.selection = _select(p, index_layer, weights.indexer, x, q_low)

    attended, values = p.take("attended"), p.take("values")
    p.latent_rows.attend(p, layer, absorbed, attended)
    k.absorb(path, attended, weights.b_v, values)
    k.linear_f32(path, values.reshape(batch.total, -1), weights.o, partial)


def _write_pools(p: Pass, layer: int, weights: Indexer, x: Array) -> None:
    """Index key and gate of every row into the lane's ring, and the keys of the pools that they complete."""
    k, g, batch, pools = p.kernels, p.geometry, p.batch, p.batch.pools
    raw, part = p.take("index_key_raw"), p.take("index_part")
    pairs = p.take("index_pair")
    k.linear(batch.path, x, weights.k, raw)
    k.layer_norm(raw, weights.k_norm, weights.k_bias, 1e-6, part)
    pairs[:, 0] = part
    k.linear(batch.path, x, weights.gate, part)
    pairs[:, 1] = part

    ring = p.arena.rings[layer]
    flat = pairs.reshape(batch.total, -1)
    if batch.path is Path.PROMPT:
        members = pairs[: pools.count * g.pool]
        left = slice(pools.count * g.pool, batch.rows)
    else:
        left = slice(0, batch.rows)
    k.write_ring(flat[left], ring, batch.lanes[left], batch.positions[left])
    if not pools.count:
        return
    if batch.path is Path.DECODE:
        members = p.workspace.take("members", pools.count * g.pool)
        k.read_ring(ring, pools.member_lanes, pools.members, members.reshape(pools.count * g.pool, -1))
    members = members.reshape(pools.count, g.pool, 2, g.index_dim)
    pooled = p.workspace.take("pooled", pools.count)
    k.pool_keys(members[:, :, 0], members[:, :, 1], weights.ape, pooled)
    view = p.arena.index_view(layer)
    k.write_rows(pooled, view, pools.pages, pools.offsets)
    p.digest.rows(k.read_rows(view, pools.pages, pools.offsets))


def _select(p: Pass, layer: int, weights: Indexer, x: Array, q_low: Array) -> Selection:
    k, g, batch = p.kernels, p.geometry, p.batch
    q, raw, head_weights = p.take("index_q"), p.take("index_w_raw"), p.take("index_w")
    k.linear(batch.path, q_low, weights.q_b, q.reshape(batch.total, -1))
    k.linear(batch.path, x, weights.weights, raw)
    k.scale(raw, g.index_heads**-0.5, head_weights)
    selection = Selection(p.take("lists"), p.take("counts"))
    k.select(
        batch.path, q, head_weights, p.arena.index_view(layer), batch.lanes, batch.positions, g.pool, g.pools_kept,
        selection.lists, selection.counts,
    )  # fmt: skip
    p.digest.rows(k.host(selection.lists)[: batch.rows])
    return selection
