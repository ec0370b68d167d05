"""Geometry: what config.json says in its several spellings, what is refused by name, and the real model's byte counts."""

from __future__ import annotations

import copy
import json
from math import ceil
from pathlib import Path

import pytest

from latentpool.errors import GeometryError
from latentpool.geometry import Geometry, share, shares

DATA = Path(__file__).parents[1] / "data"
REAL = json.loads((DATA / "glm-5.3-flash" / "config.json").read_text())
TINY = json.loads((DATA / "oracle" / "tiny" / "config.json").read_text())
MIB = 2**20


def changed(base=TINY, **keys):
    """A config with keys of its text part replaced (None removes)."""
    config = copy.deepcopy(base)
    for key, value in keys.items():
        place = config["text_config"]
        if key.startswith("linear_") and key not in place:
            place, key = place["linear_attn_config"], key.removeprefix("linear_")
        if value is None:
            place.pop(key)
        else:
            place[key] = value
    return config


# ---- spellings ---------------------------------------------------------------------------------------------------


def test_nested_and_flat_are_the_same():
    flat = {key: value for key, value in TINY.items() if key != "text_config"} | TINY["text_config"]
    assert Geometry.from_config(flat) == Geometry.from_config(TINY)


@pytest.mark.parametrize("spelling", ["deepseek_sparse_attention", "indexed_attention", "full_attention"])
def test_spellings_of_the_sparse_layer(spelling):
    kinds = ["linear_attention", "linear_attention", "linear_attention", spelling]
    assert Geometry.from_config(changed(layer_types=kinds)).mla_layers == (3,)


def test_layer_types_decide_over_the_lists_of_linear_attn_config():
    geometry = Geometry.from_config(changed(linear_kda_layers=[3], linear_full_attn_layers=[0, 1, 2]))
    assert geometry.kda_layers == (0, 1, 2)


def test_mlp_layers_follow_first_k_dense_replace_where_no_list_is_given():
    geometry = Geometry.from_config(changed(mlp_layer_types=None, first_k_dense_replace=2))
    assert [layer.sparse_mlp for layer in geometry.layers] == [False, False, True, True]


def indexers(**keys):
    kinds = ["linear_attention", *["deepseek_sparse_attention"] * 3]
    config = changed(indexer_types=None, layer_types=kinds, **keys)
    return [layer.index for layer in Geometry.from_config(config).layers]


def test_indexer_types_derived_as_transformers_does():
    assert indexers() == ["none", "full", "full", "full"]
    assert indexers(index_topk_pattern="SFSF") == ["none", "full", "shared", "full"]
    # full iff max(i - offset + 1, 0) mod freq == 0: with 2 and 2 these are layers 0, 1 and 3.
    assert indexers(index_topk_freq=2) == ["none", "full", "shared", "full"]
    assert indexers(index_topk_freq=2, index_skip_topk_offset=2) == ["none", "full", "shared", "full"]
    assert indexers(index_topk_freq=2, index_skip_topk_offset=0) == ["none", "full", "shared", "full"]
    # 3 and 1: layers 0 and 3, so the sparse layer 1 would share with a KDA layer.
    with pytest.raises(GeometryError, match=r"indexer_types\[1\] = 'shared', but layer 0"):
        indexers(index_topk_freq=3, index_skip_topk_offset=1)
    with pytest.raises(GeometryError, match="index_topk_freq = 0"):
        indexers(index_topk_freq=0)


@pytest.mark.parametrize("case", ["tiny", "shared_index", "long_kpool16", "real_ratio", "mtp"])
def test_reference_configs_are_read(case):
    geometry = Geometry.from_file(DATA / "oracle" / case)
    kinds = [layer.index for layer in geometry.layers if layer.kind == "mla"]
    assert kinds == (["full", "shared"] if case == "shared_index" else ["full"])
    assert geometry.draft_layers == (case == "mtp")
    assert geometry.without_drafts().draft_layers == 0


def test_the_unusual_constants_of_shared_index():
    g = Geometry.from_file(DATA / "oracle" / "shared_index")
    assert (g.rms_eps, g.hyper_eps, g.sinkhorn_iters, g.gate_lower_bound, g.routed_scale) == (0.01, 0.003, 7, -3.0, 1.5)
    assert (g.heads, g.groups, g.shared_experts) == (6, 2, 2)
    assert g.nope_dim != g.v_dim


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"model_type": "llama"}, "model_type = 'llama': only glm5_next is served"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim = 64 is not supported: only 0 is served"),
        ({"mla_use_nope": False}, "mla_use_nope = False is not supported: only True is served"),
        ({"mhc": False}, "mhc = False is not supported"),
        ({"index_kpool_compress": False}, "index_kpool_compress = False is not supported"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail = False is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported: only 'sigmoid' is served"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2 is not supported: at most 1 is served"),
        ({"linear_gate_lower_bound": None}, "gate_lower_bound = None is not supported"),
        ({"linear_gate_lower_bound": 1.0}, "gate_lower_bound = 1.0 is not supported"),
        ({"linear_gate_lower_bound": -10.5}, "gate_lower_bound = -10.5 is not supported: a number from -10 to below 0"),
        ({"dtype": "float16"}, "dtype = 'float16' is not supported: bfloat16, float32 are served"),
        ({"linear_attn_config": None}, "linear_attn_config is missing"),
        ({"hidden_size": None}, "hidden_size = None: a whole number of at least 1 is needed"),
        ({"hidden_size": True}, "hidden_size = True: a whole number"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0: a whole number of at least 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0: a number above 0 is needed"),
        ({"eos_token_id": "x"}, "eos_token_id = 'x': a token id or a list"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types: a list of num_hidden_layers = 4 entries is needed"),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, r"layer_types\[3\] = 'sliding_attention'"),
        ({"layer_types": ["linear_attention"] * 4}, "no sparse-attention layer"),
        ({"mlp_layer_types": ["dense"] * 3 + ["soft"]}, r"mlp_layer_types\[3\] = 'soft'"),
        ({"indexer_types": ["full"] * 3 + ["half"]}, r"indexer_types\[3\] = 'half'"),
        ({"indexer_types": ["full"] * 3 + ["shared"]}, r"indexer_types\[3\] = 'shared', but layer 2 is not an MLA layer"),
        ({"indexer_types": None, "index_topk_pattern": "FFX"}, "index_topk_pattern = 'FFX': 4 letters F or S are needed"),
        ({"index_kpool": 3}, "index_kpool = 3 is not supported: it must divide the block of 64 rows"),
        ({"index_kpool": 128}, "index_kpool = 128 is not supported"),
        ({"index_topk": 18}, "index_topk = 18 is not a multiple of index_kpool = 4"),
        ({"n_group": 3}, "n_routed_experts = 8 does not divide into n_group = 3 groups"),
        ({"n_group": 8}, "n_group = 8 leaves groups of one expert"),
        ({"n_group": 2, "topk_group": 3}, "topk_group = 3 is more than n_group = 2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than the kept groups' experts"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused_by_name(keys, text):
    with pytest.raises(GeometryError, match=text):
        Geometry.from_config(changed(**keys))


def test_two_shared_layers_in_a_row_are_refused():
    kinds = ["linear_attention", *["deepseek_sparse_attention"] * 3]
    config = changed(layer_types=kinds, indexer_types=["full", "full", "shared", "shared"])
    with pytest.raises(GeometryError, match=r"indexer_types\[3\] = 'shared', but layer 2"):
        Geometry.from_config(config)


def test_errors_of_a_file_name_the_file(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(GeometryError, match=r"config\.json: no such file"):
        Geometry.from_file(tmp_path)
    path.write_text("{")
    with pytest.raises(GeometryError, match=r"config\.json: cannot be read as JSON"):
        Geometry.from_file(tmp_path)
    path.write_text("[]")
    with pytest.raises(GeometryError, match=r"config\.json: the file is not a JSON object"):
        Geometry.from_file(tmp_path)
    path.write_text(json.dumps(changed(index_topk=18)))
    with pytest.raises(GeometryError, match=r"config\.json: index_topk = 18"):
        Geometry.from_file(tmp_path)


# ---- the real model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    return Geometry.from_config(REAL)


def test_real_layers(real):
    assert real.mla_layers == real.indexed_layers == tuple(range(3, 44, 4))
    assert (len(real.kda_layers), real.latent_layers, real.index_layers) == (34, 12, 12)
    assert [layer.sparse_mlp for layer in real.layers].count(False) == 3
    assert (real.pools_kept, real.list_length) == (512, 2051)
    assert real.eos_ids == (154820, 154827, 154829)
    assert set(real.image_ids) == {154830, 154831, 154832, 154833, 154854, 154855}


def test_real_bytes_a_token(real):
    assert (real.latent_bytes("bf16"), real.index_bytes("bf16"), real.row_bytes("bf16")) == (12_288, 768, 13_056)
    assert 512 * real.row_bytes("bf16") == 6_684_672
    assert [real.latent_bytes("bf16") // world + real.index_bytes("bf16") for world in (2, 3, 4)] == [6_912, 4_864, 3_840]
    assert real.latent_bytes("fp8") == 12 * (512 + 4)
    assert real.index_bytes("fp8") == 768
    assert real.row_bytes("f32") == 2 * 13_056
    assert real.without_drafts().row_bytes("bf16") == 13_056 * 11 // 12


@pytest.mark.parametrize(("world", "mib"), [(2, 150), (3, 103), (4, 75)])
def test_real_fixed_bytes_a_lane(real, world, mib):
    assert ceil(max(real.lane_fixed_bytes(world, rank, "bf16") for rank in range(world)) / MIB) == mib


def test_an_uneven_token_share_of_index_bytes_is_refused():
    geometry = Geometry.from_config(changed(index_kpool=64, index_topk=64, index_head_dim=16))
    with pytest.raises(GeometryError, match="index_kpool 64 does not divide"):
        geometry.index_bytes("bf16")


# ---- splitting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "world", "counts"), [(64, 3, [22, 21, 21]), (4, 4, [1, 1, 1, 1]), (10, 4, [3, 3, 2, 2])])
def test_remainder_goes_to_the_lowest_ranks(total, world, counts):
    assert shares(total, world) == counts
    parts = [share(total, world, rank) for rank in range(world)]
    assert [i for part in parts for i in range(total)[part]] == list(range(total))


@pytest.mark.parametrize("world", range(1, 9))
def test_the_real_model_splits_over_one_to_eight_ranks(real, world):
    real.check_world(world)


@pytest.mark.parametrize("world", [0, 9])
def test_worlds_outside_one_to_eight(real, world):
    with pytest.raises(GeometryError, match=f"{world} ranks: a group has 1 to 8"):
        real.check_world(world)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "5 ranks is more than num_attention_heads = 4: serve with --ranks 4 or fewer"),
        ({"num_attention_heads": 8}, r"5 ranks is more than linear_attn_config.num_heads = 4"),
        ({"num_attention_heads": 8, "linear_num_heads": 8, "moe_intermediate_size": 3}, "moe_intermediate_size = 3"),
        ({"num_attention_heads": 8, "linear_num_heads": 8, "intermediate_size": 2}, "intermediate_size = 2"),
    ],
)
def test_more_ranks_than_heads_or_columns(keys, text):
    with pytest.raises(GeometryError, match=text):
        Geometry.from_config(changed(**keys)).check_world(5)
