"""Reads a `glm5_next` config.json into a Geometry and refuses, by name, what this build does not serve.

Source: model specification section 1. Keys have no silent defaults where a wrong value would only show as wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from latentpool.errors import GeometryError
from latentpool.geometry import BLOCK, Dtype, Geometry, Layer

_MLA_SPELLINGS = {"deepseek_sparse_attention", "indexed_attention", "full_attention"}
_DTYPES: dict[str, Dtype] = {"bfloat16": "bf16", "float32": "f32"}
_IMAGE_KEYS = (
    "image_token_id",
    "video_token_id",
    "image_start_token_id",
    "image_end_token_id",
    "video_start_token_id",
    "video_end_token_id",
)
# Values that change the mathematics and are not built: (key, the only value served).
_FIXED: tuple[tuple[str, object], ...] = (
    ("qk_rope_head_dim", 0),
    ("mla_use_nope", True),
    ("mhc", True),
    ("index_kpool_compress", True),
    ("index_kpool_always_select_tail", True),
    ("scoring_func", "sigmoid"),
    ("topk_method", "noaux_tc"),
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("tie_word_embeddings", False),
)


def read_geometry(config: Mapping[str, Any]) -> Geometry:
    """Builds the Geometry of a parsed config.json (nested under `text_config`, or flat). Raises GeometryError."""
    if not isinstance(config, Mapping):
        raise GeometryError("the file is not a JSON object")
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise GeometryError("text_config is not an object")
    return _Reader(config, text).geometry()


class _Reader:
    def __init__(self, outer: Mapping[str, Any], text: Mapping[str, Any]) -> None:
        self.outer = outer
        self.text = text
        linear = text.get("linear_attn_config")
        if not isinstance(linear, Mapping):
            raise GeometryError("linear_attn_config is missing or not an object")
        self.linear = linear

    def geometry(self) -> Geometry:
        family = str(self.text.get("model_type", self.outer.get("model_type")))
        if not family.startswith("glm5_next"):
            raise GeometryError(f"model_type = {family!r}: only glm5_next is served")
        for key, served in _FIXED:
            if self.text.get(key, served) != served:
                raise GeometryError(f"{key} = {self.text[key]!r} is not supported: only {served!r} is served")
        geometry = Geometry(
            hidden=self.size("hidden_size"),
            vocab=self.size("vocab_size"),
            layers=self.layers(),
            draft_layers=self.size("num_nextn_predict_layers", least=0, most=1),
            streams=self.size("hc_mult"),
            kda_heads=self.size("num_heads", self.linear),
            kda_head_dim=self.size("head_dim", self.linear),
            conv_taps=self.size("short_conv_kernel_size", self.linear),
            gate_lower_bound=self.gate_lower_bound(),
            heads=self.size("num_attention_heads"),
            q_rank=self.size("q_lora_rank"),
            latent=self.size("kv_lora_rank"),
            nope_dim=self.size("qk_nope_head_dim"),
            v_dim=self.size("v_head_dim"),
            index_heads=self.size("index_n_heads"),
            index_dim=self.size("index_head_dim"),
            pool=self.size("index_kpool"),
            index_topk=self.size("index_topk"),
            experts=self.size("n_routed_experts"),
            experts_per_token=self.size("num_experts_per_tok"),
            expert_width=self.size("moe_intermediate_size"),
            shared_experts=self.size("n_shared_experts"),
            groups=self.size("n_group"),
            groups_kept=self.size("topk_group"),
            normalise_weights=bool(self.text.get("norm_topk_prob", True)),
            routed_scale=self.real("routed_scaling_factor"),
            dense_width=self.size("intermediate_size"),
            swiglu_limit=self.real("swiglu_limit"),
            rms_eps=self.real("rms_norm_eps"),
            hyper_eps=self.real("hc_eps"),
            sinkhorn_iters=self.size("hc_sinkhorn_iters"),
            max_context=self.size("max_position_embeddings"),
            eos_ids=self.ids(self.text.get("eos_token_id", self.outer.get("eos_token_id", []))),
            image_ids=tuple(int(self.outer[key]) for key in _IMAGE_KEYS if isinstance(self.outer.get(key), int)),
            dtype=self.dtype(),
        )
        self.check_divisions(geometry)
        return geometry

    # ---- one value -------------------------------------------------------------------------------------------

    def size(self, key: str, source: Mapping[str, Any] | None = None, least: int = 1, most: int | None = None) -> int:
        value = (self.text if source is None else source).get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise GeometryError(f"{key} = {value!r}: a whole number of at least {least} is needed")
        if most is not None and value > most:
            raise GeometryError(f"{key} = {value} is not supported: at most {most} is served")
        return value

    def real(self, key: str) -> float:
        value = self.text.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise GeometryError(f"{key} = {value!r}: a number above 0 is needed")
        return float(value)

    def gate_lower_bound(self) -> float:
        value = self.linear.get("gate_lower_bound")
        if not isinstance(value, int | float) or isinstance(value, bool) or not -10 <= value < 0:
            raise GeometryError(f"gate_lower_bound = {value!r} is not supported: a number from -10 to below 0 is served")
        return float(value)

    def dtype(self) -> Dtype:
        name = str(self.text.get("dtype", self.text.get("torch_dtype", "bfloat16")))
        if name not in _DTYPES:
            raise GeometryError(f"dtype = {name!r} is not supported: {', '.join(_DTYPES)} are served")
        return _DTYPES[name]

    @staticmethod
    def ids(value: object) -> tuple[int, ...]:
        items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        ids = tuple(item for item in items if isinstance(item, int))
        if len(ids) != len(items):
            raise GeometryError(f"eos_token_id = {value!r}: a token id or a list of token ids is needed")
        return ids

    # ---- layers ----------------------------------------------------------------------------------------------

    def layers(self) -> tuple[Layer, ...]:
        count = self.size("num_hidden_layers")
        kinds = self.listed("layer_types", count)
        dense_first = self.size("first_k_dense_replace", least=0) if "first_k_dense_replace" in self.text else 0
        mlps = (
            self.listed("mlp_layer_types", count)
            if "mlp_layer_types" in self.text
            else ["dense" if i < dense_first else "sparse" for i in range(count)]
        )
        indexers = self.listed("indexer_types", count) if "indexer_types" in self.text else self.indexers(count)
        layers: list[Layer] = []
        for i, (kind, mlp, indexer) in enumerate(zip(kinds, mlps, indexers, strict=True)):
            if mlp not in ("dense", "sparse"):
                raise GeometryError(f"mlp_layer_types[{i}] = {mlp!r} is not supported: 'dense' or 'sparse'")
            if kind == "linear_attention":
                layers.append(Layer("kda", mlp == "sparse", "none"))
            elif kind in _MLA_SPELLINGS:
                layers.append(Layer("mla", mlp == "sparse", self.index_kind(i, indexer, layers)))
            else:
                raise GeometryError(
                    f"layer_types[{i}] = {kind!r} is not supported: 'linear_attention' or one of {sorted(_MLA_SPELLINGS)}"
                )
        return tuple(layers)

    def index_kind(self, i: int, name: str, before: Sequence[Layer]) -> Literal["full", "shared"]:
        if name == "full":
            return "full"
        if name != "shared":
            raise GeometryError(f"indexer_types[{i}] = {name!r} is not supported: 'full' or 'shared'")
        if not before or before[-1].index != "full":
            raise GeometryError(f"indexer_types[{i}] = 'shared', but layer {i - 1} is not an MLA layer with a 'full' indexer")
        return "shared"

    def indexers(self, count: int) -> list[str]:
        """The list transformers derives when the file has none (specification section 1)."""
        pattern = self.text.get("index_topk_pattern")
        if pattern is not None:
            if len(pattern) != count or set(pattern) - set("FS"):
                raise GeometryError(f"index_topk_pattern = {pattern!r}: {count} letters F or S are needed")
            return ["full" if letter == "F" else "shared" for letter in pattern]
        every = self.size("index_topk_freq") if "index_topk_freq" in self.text else 1
        offset = self.size("index_skip_topk_offset", least=0) if "index_skip_topk_offset" in self.text else 2
        return ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(count)]

    def listed(self, key: str, count: int) -> list[str]:
        value = self.text.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise GeometryError(f"{key}: a list of num_hidden_layers = {count} entries is needed")
        return [str(item) for item in value]

    # ---- together ----------------------------------------------------------------------------------------------

    @staticmethod
    def check_divisions(g: Geometry) -> None:
        if BLOCK % g.pool:
            raise GeometryError(f"index_kpool = {g.pool} is not supported: it must divide the block of {BLOCK} rows")
        if g.index_topk % g.pool:
            raise GeometryError(f"index_topk = {g.index_topk} is not a multiple of index_kpool = {g.pool}")
        if g.experts % g.groups:
            raise GeometryError(f"n_routed_experts = {g.experts} does not divide into n_group = {g.groups} groups")
        if g.experts // g.groups < 2:
            raise GeometryError(f"n_group = {g.groups} leaves groups of one expert: a group's score needs two")
        if g.groups_kept > g.groups:
            raise GeometryError(f"topk_group = {g.groups_kept} is more than n_group = {g.groups}")
        if g.experts_per_token > g.groups_kept * (g.experts // g.groups):
            raise GeometryError(f"num_experts_per_tok = {g.experts_per_token} is more than the kept groups' experts")
        if not g.mla_layers:
            raise GeometryError("layer_types has no sparse-attention layer: there is nothing to pool")
