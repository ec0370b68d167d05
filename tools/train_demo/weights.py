"""The trained model's weights: a flat dictionary in a form that is fast to train, and its way to the release's names and back.

In memory the three KDA projections are one matrix, and so are gate and up; experts are stacked. Draft tensors stand behind the
last layer, as on disk. Source: model specification section 2.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from latentpool.geometry import Geometry
from tools.train_demo.settings import generation_config

Weights = dict[str, Tensor]
_ROOT = "model.language_model."
_FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias", "_base", "_scale")
_FILE_BYTES = 14 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in memory: its name, its shape, the disk tensors it joins along its first axis (stacked: along a new one,
    each group of names joined first), and the standard deviation it starts with."""

    name: str
    shape: tuple[int, ...]
    disk: tuple[tuple[str, ...], ...]
    std: float
    stacked: bool = False


def entries(g: Geometry) -> Iterator[Entry]:
    """Every tensor of the model and its draft layer."""
    d = g.hidden
    yield Entry("embed", (g.vocab, d), ((f"{_ROOT}embed_tokens.weight",),), 0.7)
    yield Entry("norm", (d,), ((f"{_ROOT}norm.weight",),), 0)
    yield Entry("head", (g.vocab, d), (("lm_head.weight",),), 0.5 / math.sqrt(d))
    for i, layer in enumerate(g.layers):
        at, disk = f"{i}.", f"{_ROOT}layers.{i}."
        for which in ("attn", "ffn"):
            rows = (2 + g.streams) * g.streams
            yield Entry(f"{at}{which}.hc_fn", (rows, g.streams * d), ((f"{disk}hc_{which}_fn",),), 0.02)
            yield Entry(f"{at}{which}.hc_base", (rows,), ((f"{disk}hc_{which}_base",),), 0)
            yield Entry(f"{at}{which}.hc_scale", (3,), ((f"{disk}hc_{which}_scale",),), 0)
        yield from _norms(g, at, disk)
        yield from _kda(g, at, disk) if layer.kind == "kda" else _mla(g, at, disk)
        yield from _moe(g, at, disk) if layer.sparse_mlp else _swiglu(g, f"{at}mlp.", f"{disk}mlp.", g.dense_width)
    if g.draft_layers:
        at, disk = "draft.", f"{_ROOT}layers.{len(g.layers)}."
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield Entry(f"{at}{name}", (d,), ((f"{disk}{name}.weight",),), 0)
        yield Entry(f"{at}eh_proj", (d, 2 * d), ((f"{disk}eh_proj.weight",),), 1 / math.sqrt(2 * d))
        yield from _norms(g, at, disk)
        yield from _mla(g, at, disk)
        yield from _moe(g, at, disk)


def _norms(g: Geometry, at: str, disk: str) -> Iterator[Entry]:
    yield Entry(f"{at}attn.norm", (g.hidden,), ((f"{disk}input_layernorm.weight",),), 0)
    yield Entry(f"{at}ffn.norm", (g.hidden,), ((f"{disk}post_attention_layernorm.weight",),), 0)


def _linear(name: str, out: int, inner: int, *disk: str, gain: float = 1.0) -> Entry:
    return Entry(name, (out, inner), (disk,), gain / math.sqrt(inner))


def _kda(g: Geometry, at: str, disk: str) -> Iterator[Entry]:
    d, dim = g.hidden, g.kda_head_dim
    width, disk = g.kda_heads * dim, f"{disk}self_attn."
    yield _linear(f"{at}qkv", 3 * width, d, *(f"{disk}{n}_proj.weight" for n in "qkv"))
    yield Entry(f"{at}conv", (3 * width, 1, g.conv_taps), (tuple(f"{disk}{n}_conv1d.weight" for n in "qkv"),), 0.3)
    for name in "fg":
        yield _linear(f"{at}{name}_a", dim, d, f"{disk}{name}_a_proj.weight")
        yield _linear(f"{at}{name}_b", width, dim, f"{disk}{name}_b_proj.weight")
    yield Entry(f"{at}dt_bias", (width,), ((f"{disk}dt_bias",),), 0)
    yield Entry(f"{at}A_log", (g.kda_heads,), ((f"{disk}A_log",),), 0)
    yield _linear(f"{at}b", g.kda_heads, d, f"{disk}b_proj.weight")
    yield Entry(f"{at}o_norm", (dim,), ((f"{disk}o_norm.weight",),), 0)
    yield _linear(f"{at}o", d, width, f"{disk}o_proj.weight", gain=0.35)


def _mla(g: Geometry, at: str, disk: str) -> Iterator[Entry]:
    disk = f"{disk}self_attn."
    yield _linear(f"{at}q_a", g.q_rank, g.hidden, f"{disk}q_a_proj.weight")
    yield Entry(f"{at}q_norm", (g.q_rank,), ((f"{disk}q_a_layernorm.weight",),), 0)
    yield _linear(f"{at}q_b", g.heads * g.nope_dim, g.q_rank, f"{disk}q_b_proj.weight")
    yield _linear(f"{at}kv_a", g.latent, g.hidden, f"{disk}kv_a_proj_with_mqa.weight")
    yield Entry(f"{at}kv_norm", (g.latent,), ((f"{disk}kv_a_layernorm.weight",),), 0)
    yield _linear(f"{at}kv_b", g.heads * (g.nope_dim + g.v_dim), g.latent, f"{disk}kv_b_proj.weight")
    yield _linear(f"{at}o", g.hidden, g.heads * g.v_dim, f"{disk}o_proj.weight", gain=0.35)
    at, disk = f"{at}index.", f"{disk}indexer."
    yield _linear(f"{at}q_b", g.index_heads * g.index_dim, g.q_rank, f"{disk}wq_b.weight")
    yield _linear(f"{at}k", g.index_dim, g.hidden, f"{disk}wk.weight")
    yield Entry(f"{at}k_norm", (g.index_dim,), ((f"{disk}k_norm.weight",),), 0)
    yield Entry(f"{at}k_bias", (g.index_dim,), ((f"{disk}k_norm.bias",),), 0)
    yield _linear(f"{at}weights", g.index_heads, g.hidden, f"{disk}weights_proj.weight")
    yield Entry(f"{at}ape", (g.pool, g.index_dim), ((f"{disk}index_kpool_compress_ape",),), 0)
    yield Entry(f"{at}gate", (g.index_dim, g.hidden), ((f"{disk}index_kpool_compress_gate",),), 0.02)


def _swiglu(g: Geometry, at: str, disk: str, width: int) -> Iterator[Entry]:
    yield _linear(f"{at}gate_up", 2 * width, g.hidden, f"{disk}gate_proj.weight", f"{disk}up_proj.weight")
    yield _linear(f"{at}down", g.hidden, width, f"{disk}down_proj.weight", gain=0.35)


def _moe(g: Geometry, at: str, disk: str) -> Iterator[Entry]:
    at, disk, d, m = f"{at}mlp.", f"{disk}mlp.", g.hidden, g.expert_width
    experts = [f"{disk}experts.{e}." for e in range(g.experts)]
    yield _linear(f"{at}router", g.experts, d, f"{disk}gate.weight")
    yield Entry(f"{at}bias", (g.experts,), ((f"{disk}gate.e_score_correction_bias",),), 0)
    both = tuple((f"{e}gate_proj.weight", f"{e}up_proj.weight") for e in experts)
    yield Entry(f"{at}experts.gate_up", (g.experts, 2 * m, d), both, 1 / math.sqrt(d), stacked=True)
    down = tuple((f"{e}down_proj.weight",) for e in experts)
    yield Entry(f"{at}experts.down", (g.experts, d, m), down, 0.35 / math.sqrt(m), stacked=True)
    yield from _swiglu(g, f"{at}shared.", f"{disk}shared_experts.", g.shared_experts * m)


def initial(g: Geometry, seed: int) -> Weights:
    """Starting values, f32 on the CPU. Norms and scales are ones; a KDA channel remembers 1 to 20 tokens."""
    draw = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for entry in entries(g):
        leaf = entry.name.rsplit(".", 1)[-1]
        if leaf == "conv":
            weights[entry.name] = torch.rand(entry.shape, generator=draw) - 0.5
        elif leaf == "dt_bias":  # the specification's G = -5 sigmoid(bias) at first
            rate = torch.exp(torch.rand(entry.shape, generator=draw) * math.log(20.0) + math.log(0.01))
            weights[entry.name] = torch.log(rate / (1 - rate))
        elif entry.std:
            weights[entry.name] = torch.randn(entry.shape, generator=draw) * entry.std
        else:
            ones = leaf.endswith("norm") or leaf == "hc_scale"
            weights[entry.name] = torch.full(entry.shape, 1.0 if ones else 0.0)
    return weights


def to_disk(g: Geometry, weights: Weights, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """The weights under the release's names, in its dtypes, on the CPU."""
    out: Weights = {}
    for entry in entries(g):
        whole = weights[entry.name].detach().float().cpu()
        groups = whole.unbind(0) if entry.stacked else (whole,)
        for names, part in zip(entry.disk, groups, strict=True):
            for name, piece in zip(names, part.chunk(len(names), 0), strict=True):
                kept = torch.float32 if name.endswith(_FLOAT32) else dtype
                out[name] = piece.to(kept).contiguous()
    return out


def from_disk(g: Geometry, tensors: Weights) -> Weights:
    """The inverse of `to_disk`: f32."""
    weights: Weights = {}
    for entry in entries(g):
        groups = [torch.cat([tensors[name].float() for name in names]) for names in entry.disk]
        weights[entry.name] = torch.stack(groups) if entry.stacked else groups[0]
    return weights


def save(out: Path, config: dict[str, object], g: Geometry, weights: Weights, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes config.json, generation_config.json, the chat template, and shards of at most 14 MiB with their index. No shard
    is left half written under its name."""
    out.mkdir(parents=True, exist_ok=True)
    parts: list[Weights] = [{}]
    room = _FILE_BYTES
    for name, tensor in to_disk(g, weights, dtype).items():
        size = tensor.numel() * tensor.element_size()
        if size > room and parts[-1]:
            parts.append({})
            room = _FILE_BYTES
        parts[-1][name] = tensor
        room -= size
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, out / f"{file}.part", metadata={"format": "pt"})
        (out / f"{file}.part").rename(out / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for part in parts for t in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    shutil.copyfile(Path(__file__).with_name("chat_template.jinja"), out / "chat_template.jinja")
    for file, value in (
        ("config.json", config),
        ("generation_config.json", generation_config()),
        ("model.safetensors.index.json", index),
    ):
        (out / file).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def load(model: Path) -> tuple[Geometry, Weights]:
    """Reads a checkpoint back: its geometry and its weights in f32."""
    g = Geometry.from_file(model)
    tensors: Weights = {}
    for file in sorted(model.glob("model*.safetensors")):
        tensors |= load_file(file)
    return g, from_disk(g, tensors)
