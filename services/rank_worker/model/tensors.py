"""The tensors of a `glm5_next` checkpoint: their on-disk names, whole shapes, and the part of each that a rank reads.

Source: model specification section 2; splitting: design section 8. One table serves checking, loading, byte counts and the
tool that writes checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from latentpool.geometry import Geometry, Layer, share

MODEL = "model.language_model."


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: its whole shape, and how it is cut. Along `axis` it consists of units of `width` entries (a head, an
    expert column, a vocabulary row), which are shared out over the ranks; `axis` None: every rank reads the whole."""

    shape: tuple[int, ...]
    axis: int | None = None
    width: int = 1

    def part(self, world: int, rank: int) -> tuple[slice, ...]:
        """The half-open ranges, one an axis, that `rank` of `world` reads."""
        whole = [slice(0, size) for size in self.shape]
        if self.axis is not None:
            units = share(self.shape[self.axis] // self.width, world, rank)
            whole[self.axis] = slice(units.start * self.width, units.stop * self.width)
        return tuple(whole)

    def part_size(self, world: int, rank: int) -> int:
        """Elements that `rank` of `world` reads."""
        return prod(cut.stop - cut.start for cut in self.part(world, rank))


Table = dict[str, Tensor]


def layer_prefix(index: int) -> str:
    return f"{MODEL}layers.{index}."


def main_tensors(g: Geometry) -> Table:
    """Every tensor of the main model, by on-disk name."""
    table: Table = {
        f"{MODEL}embed_tokens.weight": Tensor((g.vocab, g.hidden), axis=0),
        f"{MODEL}norm.weight": Tensor((g.hidden,)),
        "lm_head.weight": Tensor((g.vocab, g.hidden), axis=0),
    }
    for i, layer in enumerate(g.layers):
        at = layer_prefix(i)
        table |= _norms(g, at) | _hyper(g, at) | _attention(g, layer, at)
        table |= _experts(g, at) if layer.sparse_mlp else _dense(g, at)
    return table


def draft_tensors(g: Geometry) -> Table:
    """Every tensor of one draft layer, stored after the last layer of the main model."""
    at = layer_prefix(len(g.layers))
    own = {f"{at}{name}.weight": Tensor((g.hidden,)) for name in ("enorm", "hnorm", "shared_head.norm")}
    own[f"{at}eh_proj.weight"] = Tensor((g.hidden, 2 * g.hidden))
    return own | _norms(g, at) | _attention(g, Layer("mla", True, "full"), at) | _experts(g, at)


def _norms(g: Geometry, at: str) -> Table:
    return {f"{at}{name}.weight": Tensor((g.hidden,)) for name in ("input_layernorm", "post_attention_layernorm")}


def _hyper(g: Geometry, at: str) -> Table:
    rows = (2 + g.streams) * g.streams
    table: Table = {}
    for which in ("attn", "ffn"):
        table[f"{at}hc_{which}_fn"] = Tensor((rows, g.streams * g.hidden))
        table[f"{at}hc_{which}_base"] = Tensor((rows,))
        table[f"{at}hc_{which}_scale"] = Tensor((3,))
    return table


def _attention(g: Geometry, layer: Layer, at: str) -> Table:
    if layer.kind == "kda":
        return _kda(g, f"{at}self_attn.")
    return _mla(g, f"{at}self_attn.") | (_indexer(g, f"{at}self_attn.indexer.") if layer.index == "full" else {})


def _kda(g: Geometry, at: str) -> Table:
    d, dim = g.hidden, g.kda_head_dim
    width = g.kda_heads * dim
    table: Table = {}
    for name in "qkv":
        table[f"{at}{name}_proj.weight"] = Tensor((width, d), axis=0, width=dim)
        table[f"{at}{name}_conv1d.weight"] = Tensor((width, 1, g.conv_taps), axis=0, width=dim)
    for name in "fg":
        table[f"{at}{name}_a_proj.weight"] = Tensor((dim, d))
        table[f"{at}{name}_b_proj.weight"] = Tensor((width, dim), axis=0, width=dim)
    return table | {
        f"{at}dt_bias": Tensor((width,), axis=0, width=dim),
        f"{at}A_log": Tensor((g.kda_heads,), axis=0),
        f"{at}b_proj.weight": Tensor((g.kda_heads, d), axis=0),
        f"{at}o_norm.weight": Tensor((dim,)),
        f"{at}o_proj.weight": Tensor((d, width), axis=1, width=dim),
    }


def _mla(g: Geometry, at: str) -> Table:
    both = g.nope_dim + g.v_dim
    return {
        f"{at}q_a_proj.weight": Tensor((g.q_rank, g.hidden)),
        f"{at}q_a_layernorm.weight": Tensor((g.q_rank,)),
        f"{at}q_b_proj.weight": Tensor((g.heads * g.nope_dim, g.q_rank), axis=0, width=g.nope_dim),
        f"{at}kv_a_proj_with_mqa.weight": Tensor((g.latent, g.hidden)),
        f"{at}kv_a_layernorm.weight": Tensor((g.latent,)),
        f"{at}kv_b_proj.weight": Tensor((g.heads * both, g.latent), axis=0, width=both),
        f"{at}o_proj.weight": Tensor((g.hidden, g.heads * g.v_dim), axis=1, width=g.v_dim),
    }


def _indexer(g: Geometry, at: str) -> Table:
    return {
        f"{at}wq_b.weight": Tensor((g.index_heads * g.index_dim, g.q_rank)),
        f"{at}wk.weight": Tensor((g.index_dim, g.hidden)),
        f"{at}k_norm.weight": Tensor((g.index_dim,)),
        f"{at}k_norm.bias": Tensor((g.index_dim,)),
        f"{at}weights_proj.weight": Tensor((g.index_heads, g.hidden)),
        f"{at}index_kpool_compress_ape": Tensor((g.pool, g.index_dim)),
        f"{at}index_kpool_compress_gate": Tensor((g.index_dim, g.hidden)),
    }


def _dense(g: Geometry, at: str) -> Table:
    return _swiglu(g.hidden, g.dense_width, f"{at}mlp.")


def _experts(g: Geometry, at: str) -> Table:
    table: Table = {
        f"{at}mlp.gate.weight": Tensor((g.experts, g.hidden)),
        f"{at}mlp.gate.e_score_correction_bias": Tensor((g.experts,)),
    }
    for e in range(g.experts):
        table |= _swiglu(g.hidden, g.expert_width, f"{at}mlp.experts.{e}.")
    return table | _swiglu(g.hidden, g.shared_experts * g.expert_width, f"{at}mlp.shared_experts.")


def _swiglu(hidden: int, width: int, at: str) -> Table:
    return {
        f"{at}gate_proj.weight": Tensor((width, hidden), axis=0),
        f"{at}up_proj.weight": Tensor((width, hidden), axis=0),
        f"{at}down_proj.weight": Tensor((hidden, width), axis=1),
    }
