"""The demonstration model's config.json and generation_config.json, in the release's keys."""

from __future__ import annotations

from typing import Any

from tools.train_demo.tokens import ENDS, SPECIAL_IDS, VOCAB

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "v_head_dim": 64, "index_n_heads": 4,
    "index_head_dim": 64, "index_kpool": 4, "index_topk": 256, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "n_shared_experts": 1, "max_position_embeddings": 131072,
}  # fmt: skip
_TOY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "index_head_dim": 16, "index_topk": 32, "moe_intermediate_size": 32,
}  # fmt: skip
_KINDS = "kkkmkkkm"


def model_config(toy: bool = False) -> dict[str, Any]:
    """config.json: 6 KDA and 2 MLA layers and a draft layer. `toy`: the same with small widths, for a look on a CPU."""
    kinds = _KINDS[:4] if toy else _KINDS
    heads = {"num_heads": 4, "head_dim": 16 if toy else 64, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}
    layers = {
        "kda_layers": [i for i, kind in enumerate(kinds) if kind == "k"],
        "full_attn_layers": [i for i, kind in enumerate(kinds) if kind == "m"],
    }
    ends = [SPECIAL_IDS[token] for token in ENDS]
    text = _SIZES | (_TOY if toy else {}) | {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "num_hidden_layers": len(kinds),
        "num_nextn_predict_layers": 1,
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "mla_use_nope": True,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "indexer_types": ["full"] * len(kinds),
        "layer_types": ["linear_attention" if kind == "k" else "deepseek_sparse_attention" for kind in kinds],
        "linear_attn_config": heads | layers,
        "mhc": True,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "mlp_layer_types": ["dense"] + ["sparse"] * (len(kinds) - 1),
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "routed_scaling_factor": 1.0,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": ends,
        "pad_token_id": ends[0],
        "use_cache": True,
    }  # fmt: skip
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "tie_word_embeddings": False,
        "text_config": text,
    }


def generation_config() -> dict[str, Any]:
    """generation_config.json: the end tokens; greedy, because the model was trained to say one right thing."""
    ends = [SPECIAL_IDS[token] for token in ENDS]
    return {"eos_token_id": ends, "pad_token_id": ends[0], "do_sample": False}
