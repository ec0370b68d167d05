"""The model's forward pass (specification 3.2 and 3.3): streams through blocks to final hidden rows, then logits."""

from __future__ import annotations

from kernels.api import Kernels, Path
from kernels.rows import Array
from latentpool.geometry import Geometry, share
from services.rank_worker.model.ffn import ffn
from services.rank_worker.model.kda import kda
from services.rank_worker.model.mla import mla
from services.rank_worker.model.pass_ import Pass
from services.rank_worker.model.shard import Block, Hyper, Kda, Shard


class Model:
    """One rank's shard and how to run it."""

    def __init__(self, geometry: Geometry, kernels: Kernels, shard: Shard, world: int, rank: int) -> None:
        self.geometry = geometry
        self.kernels = kernels
        self.shard = shard
        self.vocabulary = share(geometry.vocab, world, rank)
        """Token ids whose embedding and head rows this rank holds."""
        self._kda_index = {layer: i for i, layer in enumerate(geometry.kda_layers)}
        self._mla_index = {layer: i for i, layer in enumerate(geometry.mla_layers)}
        self._indexed = {layer: i for i, layer in enumerate(geometry.indexed_layers)}

    def forward(self, p: Pass) -> Array:
        """Final hidden rows (after the last norm), compute [T, d], valid until the next pass; caches and states of the
        pass's rows are written. Every rank gets the same bits."""
        k, total = self.kernels, p.batch.total
        streams, spare = p.take("streams"), p.take("streams_next")
        partial = p.sums.partial(total)
        k.embed(k.upload(p.batch.tokens, "i32"), self.shard.embed, self.vocabulary.start, partial)
        y = p.take("y")
        p.sums.total(total, y)
        k.hyper_spread(y, streams)
        for layer, block in enumerate(self.shard.blocks):
            streams, spare = self._half(p, block.attn_hyper, block.attn_norm, layer, block, streams, spare), streams
            streams, spare = self._half(p, block.ffn_hyper, block.ffn_norm, None, block, streams, spare), streams
            p.tick()
        k.hyper_mean(streams, y)
        hidden = p.take("hidden")
        k.rms_norm(y, self.shard.norm, self.geometry.rms_eps, hidden)
        p.digest.rows(k.host(hidden)[: p.batch.rows])
        return hidden

    def _half(
        self, p: Pass, hyper: Hyper, norm: Array, attn_layer: int | None, block: Block, streams: Array, out: Array
    ) -> Array:
        """One hyper-connection around a sub-layer: attention of `attn_layer`, or the feed-forward. Returns `out`."""
        k, g, total = self.kernels, self.geometry, p.batch.total
        x, normed, post, comb, y = (p.take(name) for name in ("x", "normed", "post", "comb", "y"))
        k.hyper_pre(
            p.batch.path, streams, hyper.fn, hyper.base, hyper.scale, g.rms_eps, g.hyper_eps, g.sinkhorn_iters, x, post, comb
        )
        k.rms_norm(x, norm, g.rms_eps, normed)
        partial = p.sums.partial(total)
        if attn_layer is None:
            ffn(p, block.ffn, normed, partial)
        elif isinstance(block.attn, Kda):
            kda(p, self._kda_index[attn_layer], block.attn, normed, partial)
        else:
            mla(p, self._mla_index[attn_layer], self._indexed.get(attn_layer, -1), block.attn, normed, partial)
        p.sums.total(total, y)
        k.hyper_post(streams, y, post, comb, out)
        return out

    def logits(self, path: Path, hidden: Array, out: Array) -> None:
        """out compute [T, V_r] = this rank's columns for hidden compute [T, d]; whole blocks on the prompt path."""
        self.kernels.linear(path, hidden, self.shard.head, out)
