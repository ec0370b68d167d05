"""The model's geometry, derived from its config.json, and the byte arithmetic that follows from it.

Source: model specification sections 1 and 5; design section 4. Nothing here is specific to one release: every number
comes from the file. Values that this build does not serve are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from latentpool.errors import GeometryError

LayerKind = Literal["kda", "mla"]
Dtype = Literal["f32", "bf16"]

BLOCK = 64
"""Rows of a prompt block (design 3.2): the unit of the prompt path."""
DTYPE_BYTES: dict[str, int] = {"f32": 4, "bf16": 2}
MAX_WORLD = 8
R_MAX = 4
"""Rows of the largest decode window: sizes a lane's rings."""


def shares(total: int, world: int) -> list[int]:
    """Splits `total` columns (heads, expert columns, vocabulary) over ranks: as even as possible, the remainder to the
    lowest ranks. shares(64, 3) == [22, 21, 21]."""
    return [total // world + (rank < total % world) for rank in range(world)]


def share(total: int, world: int, rank: int) -> slice:
    """The half-open range of `total` that `rank` holds."""
    counts = shares(total, world)
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. `index`: own indexer (`full`), the previous MLA layer's selection (`shared`), or none (KDA)."""

    kind: LayerKind
    sparse_mlp: bool
    index: Literal["full", "shared", "none"]


@dataclass(frozen=True)
class Geometry:
    """Sizes of a `glm5_next` text model. Symbols in brackets are the specification's."""

    hidden: int  # d
    vocab: int  # V
    layers: tuple[Layer, ...]
    draft_layers: int  # MTP layers that are loaded and cached: 0 or 1
    streams: int  # N
    kda_heads: int  # H_k
    kda_head_dim: int  # D_k
    conv_taps: int  # c
    gate_lower_bound: float  # γ
    heads: int  # h
    q_rank: int  # r_q
    latent: int  # r
    nope_dim: int  # d_n
    v_dim: int  # d_v
    index_heads: int  # n_I
    index_dim: int  # d_I
    pool: int  # P
    index_topk: int  # K, in tokens
    experts: int  # E
    experts_per_token: int  # k_e
    expert_width: int  # m
    shared_experts: int  # n_s
    groups: int
    groups_kept: int
    normalise_weights: bool
    routed_scale: float  # s_r
    dense_width: int  # f
    swiglu_limit: float  # λ
    rms_eps: float  # ε
    hyper_eps: float  # ε_h
    sinkhorn_iters: int  # I_h
    max_context: int
    eos_ids: tuple[int, ...]
    image_ids: tuple[int, ...]
    dtype: Dtype

    # ---- reading ---------------------------------------------------------------------------------------------

    @classmethod
    def from_file(cls, model_dir: Path | str) -> Geometry:
        """Reads `model_dir/config.json`. Raises GeometryError naming the file, key and value."""
        path = Path(model_dir) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise GeometryError(f"{path}: no such file; a model directory holds config.json and *.safetensors") from None
        except (OSError, ValueError) as error:
            raise GeometryError(f"{path}: cannot be read as JSON: {error}") from None
        try:
            return cls.from_config(config)
        except GeometryError as error:
            raise GeometryError(f"{path}: {error}") from None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Geometry:
        """Builds the geometry from a parsed config.json, nested (`text_config`) or flat."""
        from latentpool.model_config import read_geometry

        return read_geometry(config)

    def without_drafts(self) -> Geometry:
        """The same model served with `--no-drafts`: no draft layer is loaded or cached."""
        return replace(self, draft_layers=0)

    # ---- layers ----------------------------------------------------------------------------------------------

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """MLA layers of the main model, ascending; position in this tuple is the latent plane's layer axis."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind == "mla")

    @property
    def indexed_layers(self) -> tuple[int, ...]:
        """MLA layers of the main model with an indexer of their own; position is the index plane's layer axis."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.index == "full")

    @property
    def latent_layers(self) -> int:
        """L of design section 4: MLA layers, the draft layer counted."""
        return len(self.mla_layers) + self.draft_layers

    @property
    def index_layers(self) -> int:
        """L_I of design section 4: layers with an indexer of their own, the draft layer counted."""
        return len(self.indexed_layers) + self.draft_layers

    @property
    def pools_kept(self) -> int:
        """K / P: pools a query selects."""
        return self.index_topk // self.pool

    @property
    def list_length(self) -> int:
        """Entries of the longest selection: K + P - 1."""
        return self.index_topk + self.pool - 1

    # ---- bytes (design section 4) ------------------------------------------------------------------------------

    def latent_bytes(self, kv_dtype: str) -> int:
        """Bytes of a token's latent rows over all latent layers. fp8 rows are codes and one fp32 scale."""
        row = self.latent + 4 if kv_dtype == "fp8" else self.latent * DTYPE_BYTES[kv_dtype]
        return self.latent_layers * row

    def index_bytes(self, kv_dtype: str) -> int:
        """Bytes of a token's share of pooled keys over all index layers: bf16, or f32 in an f32 cache. The pool
        divides the page, so whole pages are whole bytes; a token's share may not be, hence the check."""
        whole, rest = divmod(self.index_layers * self.index_dim * (4 if kv_dtype == "f32" else 2), self.pool)
        if rest:
            raise GeometryError(f"index_kpool {self.pool} does not divide a token's pooled-key bytes")
        return whole

    def row_bytes(self, kv_dtype: str) -> int:
        """Bytes a token costs on a rank that keeps everything (replicated pages and windows)."""
        return self.latent_bytes(kv_dtype) + self.index_bytes(kv_dtype)

    def lane_fixed_bytes(self, world: int, rank: int, dtype: str) -> int:
        """`fixed`: what a lane needs on `rank` at any length. KDA state in two parities, conv window, index ring, and
        the KDA inputs of one decode window (to rebuild an accepted prefix)."""
        element = DTYPE_BYTES[dtype]
        heads = shares(self.kda_heads, world)[rank]
        width = heads * self.kda_head_dim
        state = 2 * width * self.kda_head_dim * 4
        conv = self.conv_rows * 3 * width * element
        inputs = R_MAX * (2 * width * element + width * 4 + heads * 4)
        ring = self.ring_rows * 2 * self.index_dim * element
        return len(self.kda_layers) * (state + conv + inputs) + self.index_layers * ring

    def kept_bytes(self, world: int, rank: int, dtype: str) -> int:
        """What a kept state needs on `rank` beyond its rows (design section 6): one KDA state, and the rows before the next one
        in the convolution windows. Index rings hold nothing then: a state ends at a multiple of 64, where no pool is open."""
        element = DTYPE_BYTES[dtype]
        width = shares(self.kda_heads, world)[rank] * self.kda_head_dim
        kda = width * self.kda_head_dim * 4 + (self.conv_taps - 1) * 3 * width * element
        return len(self.kda_layers) * kda

    @property
    def conv_rows(self) -> int:
        """Rows of a lane's convolution window ring: the taps before a token, and two decode windows."""
        return self.conv_taps - 1 + 2 * R_MAX

    @property
    def ring_rows(self) -> int:
        """Rows of a lane's index ring: an incomplete pool, and two decode windows."""
        return self.pool - 1 + 2 * R_MAX

    # ---- splitting -----------------------------------------------------------------------------------------------

    def check_world(self, world: int) -> None:
        """Raises GeometryError if the model cannot be split over `world` ranks."""
        if not 1 <= world <= MAX_WORLD:
            raise GeometryError(f"{world} ranks: a group has 1 to {MAX_WORLD}")
        for name, count in (
            ("num_attention_heads", self.heads),
            ("linear_attn_config.num_heads", self.kda_heads),
            ("moe_intermediate_size", self.expert_width),
            ("intermediate_size", self.dense_width),
            ("vocab_size", self.vocab),
        ):
            if count < world:
                raise GeometryError(f"{world} ranks is more than {name} = {count}: serve with --ranks {count} or fewer")
