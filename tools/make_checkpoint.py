"""Writes a random checkpoint of any `glm5_next` geometry in the release's layout, a byte-level tokenizer, a chat template.

    python tools/make_checkpoint.py OUT --preset demo
    python tools/make_checkpoint.py OUT --config my/config.json --seed 7 --dtype f32 --shards 3

The same arguments give the same bytes. Weights are scaled so that activations keep their size from layer to layer, logits
spread over several units and neither experts, nor pools, nor tokens are near ties.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ml_dtypes
import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from latentpool.errors import LatentPoolError
from latentpool.geometry import Geometry
from services.rank_worker.model.checkpoint import INDEX, SINGLE
from services.rank_worker.model.tensors import Tensor, draft_tensors, main_tensors

BYTES = 256
SPECIAL = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
)
CHAT_TEMPLATE = (
    "[gMASK]<sop>"
    "{% if tools %}<|system|>\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}\n"
)
ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}
# Float32 in every release, whatever the rest is (model specification section 2).
_ALWAYS_F32 = ("A_log", "dt_bias", "e_score_correction_bias", "_base", "_scale")

PRESETS: dict[str, dict[str, Any]] = {
    # Eight heads of each kind, so that it runs on 1 to 8 ranks.
    "demo": {
        "layers": "kkmkkm", "dense": 1, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
        "num_attention_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "kda_heads": 8, "kda_head_dim": 16, "index_n_heads": 4, "index_head_dim": 32, "index_kpool": 4, "index_topk": 64,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 32768,
    },
    "tiny": {
        "layers": "kkkm", "dense": 1, "vocab_size": 272, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "kda_heads": 4, "kda_head_dim": 16, "index_n_heads": 4, "index_head_dim": 16, "index_kpool": 4, "index_topk": 16,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 4096,
    },
    "bench": {
        "layers": "kkkmkkkmkkkm", "dense": 1, "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768,
        "num_attention_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "v_head_dim": 64,
        "kda_heads": 8, "kda_head_dim": 32, "index_n_heads": 8, "index_head_dim": 32, "index_kpool": 4, "index_topk": 256,
        "n_routed_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "max_position_embeddings": 131072,
    },
}  # fmt: skip


def preset_config(name: str) -> dict[str, Any]:
    """A whole config.json with the release's keys and constants, and a preset's sizes."""
    sizes = dict(PRESETS[name])
    kinds: str = sizes.pop("layers")
    dense: int = sizes.pop("dense")
    linear = {
        "num_heads": sizes.pop("kda_heads"),
        "head_dim": sizes.pop("kda_head_dim"),
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "kda_layers": [i for i, kind in enumerate(kinds) if kind == "k"],
        "full_attn_layers": [i for i, kind in enumerate(kinds) if kind == "m"],
    }
    first_special = sizes["vocab_size"] - len(SPECIAL)
    ends = [first_special + SPECIAL.index(token) for token in ENDS]
    text = sizes | {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "num_hidden_layers": len(kinds),
        "num_nextn_predict_layers": 0,
        "num_key_value_heads": sizes["num_attention_heads"],
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "mla_use_nope": True,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "indexer_types": ["full"] * len(kinds),
        "layer_types": ["linear_attention" if kind == "k" else "deepseek_sparse_attention" for kind in kinds],
        "linear_attn_config": linear,
        "mhc": True,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (len(kinds) - dense),
        "first_k_dense_replace": dense,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": ends,
        "pad_token_id": ends[0],
        "use_cache": True,
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "tie_word_embeddings": False,
        "text_config": text,
    }


def random_weight(name: str, tensor: Tensor, geometry: Geometry, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Values of one tensor, f32, from a generator of its own: adding a tensor changes no other."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    draw = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:8], "little")))
    shape = tensor.shape
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf.endswith(("norm", "layernorm")):
        values = draw.normal(1.0, 0.1, shape)
    elif leaf == "bias" or leaf == "index_kpool_compress_ape":
        values = draw.normal(0.0, 0.3, shape)
    elif leaf == "e_score_correction_bias":
        values = draw.normal(0.0, 0.05, shape)
    elif leaf == "A_log":
        values = draw.uniform(-1.0, 1.0, shape)
    elif leaf == "dt_bias":  # a memory of two to a hundred tokens
        values = draw.uniform(-6.0, -2.0, shape)
    elif leaf.endswith("_base"):
        values = draw.normal(0.0, 0.5, shape)
    elif leaf.endswith("_scale"):
        values = draw.uniform(0.3, 0.7, shape)
    elif leaf.endswith("_conv1d"):
        values = draw.normal(0.0, 0.5, shape)
    elif leaf == "embed_tokens":
        values = draw.normal(0.0, 1.0, shape)
    elif leaf == "lm_head":
        values = draw.normal(0.0, 3.0 / geometry.hidden**0.5, shape)
        unreadable = [i for i in range(shape[0]) if not 32 <= i < 127]
        values[unreadable] *= 0.1  # a random reply is printable and does not end by chance
    else:  # a linear weight [out, in]
        values = draw.normal(0.0, shape[-1] ** -0.5, shape)
    return values.astype(np.float32)


def write_weights(out: Path, geometry: Geometry, seed: int, dtype: str, shards: int) -> int:
    """Writes model.safetensors, or shards of about equal bytes and their index. Returns the number of parameters."""
    table = main_tensors(geometry) | (draft_tensors(geometry) if geometry.draft_layers else {})
    tensors = {
        name: random_weight(name, tensor, geometry, seed).astype(_DTYPES["f32" if name.endswith(_ALWAYS_F32) else dtype])
        for name, tensor in table.items()
    }
    if shards == 1:
        (out / SINGLE).write_bytes(save(tensors, metadata={"format": "pt"}))
    else:
        _write_shards(out, tensors, shards)
    return sum(array.size for array in tensors.values())


def _write_shards(out: Path, tensors: Mapping[str, np.ndarray[Any, Any]], shards: int) -> None:
    total = sum(array.nbytes for array in tensors.values())
    parts: list[dict[str, np.ndarray[Any, Any]]] = [{} for _ in range(shards)]
    before = 0
    for name, array in tensors.items():
        parts[before * shards // total][name] = array
        before += array.nbytes
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        (out / file).write_bytes(save(part, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(part, file)
    _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def write_tokenizer(out: Path, vocab: int) -> None:
    """One token a byte (ids 0 to 255, in byte order), special tokens at the end of the vocabulary, no text between."""
    alphabet = _byte_letters()
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [
        {"id": vocab - len(SPECIAL) + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, text in enumerate(SPECIAL)
    ]  # fmt: skip
    spec["model"]["vocab"] |= {text: vocab - len(SPECIAL) + i for i, text in enumerate(SPECIAL)}
    _write_json(out / "tokenizer.json", spec)


def write_chat_template(out: Path) -> None:
    """Roles as the release marks them; what a reply adds to its prompt is what the next prompt says of it."""
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _byte_letters() -> list[str]:
    """The printable letter that the byte-level pre-tokenizer writes for each byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(BYTES)]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def make_checkpoint(out: Path, config: Mapping[str, Any], seed: int, dtype: str, shards: int) -> int:
    """Writes a whole model directory; returns the number of parameters. Raises GeometryError, or ValueError if the
    vocabulary has no room for bytes and special tokens."""
    geometry = Geometry.from_config(config)
    if geometry.vocab < BYTES + len(SPECIAL):
        raise ValueError(f"vocab_size {geometry.vocab} is less than {BYTES} bytes + {len(SPECIAL)} special tokens")
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("model*.safetensors*"):
        old.unlink()
    _write_json(out / "config.json", config)
    text = config.get("text_config", config)
    ends = {key: text[key] for key in ("eos_token_id", "pad_token_id") if key in text}
    _write_json(out / "generation_config.json", ends | {"do_sample": True, "temperature": 1.0, "top_p": 0.95})
    write_tokenizer(out, geometry.vocab)
    write_chat_template(out)
    return write_weights(out, geometry, seed, dtype, shards)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to write")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", type=Path, help="a config.json; its geometry is used as it is")
    source.add_argument("--preset", choices=sorted(PRESETS), default="demo", help="default: demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bf16", help="of the weights; default: bf16")
    parser.add_argument("--shards", type=int, default=1, help="files to spread the weights over; default: 1")
    args = parser.parse_args()
    if args.shards < 1:
        parser.error("--shards must be at least 1")
    try:
        config = json.loads(args.config.read_text(encoding="utf-8")) if args.config else preset_config(args.preset)
        count = make_checkpoint(args.out, config, args.seed, args.dtype, args.shards)
    except (LatentPoolError, OSError, ValueError) as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in args.out.glob("*.safetensors"))
    print(f"{args.out}: {count:,} parameters, {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
