"""Loading: shards of any world put together are the whole tensors, and everything wrong with a checkpoint is told at once."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from latentpool.errors import CheckpointError
from latentpool.geometry import Geometry
from services.rank_worker.model.checkpoint import load_shard, open_checkpoint

ORACLE = Path(__file__).parents[2] / "data" / "oracle"
PREFIX = "model.language_model.layers."


class HostKernels:
    """Only `upload`: f32 arrays, and a note of which kind each was."""

    def __init__(self):
        self.kinds = {}

    def upload(self, array, kind):
        result = np.array(array, dtype=np.float32, order="C")
        self.kinds[id(result)] = kind
        return result


def load(case, world, rank, drafts=False):
    geometry = Geometry.from_file(ORACLE / case)
    kernels = HostKernels()
    checkpoint = open_checkpoint(ORACLE / case, geometry if drafts else geometry.without_drafts())
    calls = []
    shard = load_shard(checkpoint, world, rank, kernels, lambda done, total: calls.append((done, total)))
    return shard, kernels, calls, checkpoint


def flatten(node, path=""):
    """{"blocks.3.attn.b_k": array} of a Shard."""
    if is_dataclass(node):
        return {k: v for f in fields(node) for k, v in flatten(getattr(node, f.name), f"{path}{f.name}.").items()}
    if isinstance(node, tuple):
        return {k: v for i, item in enumerate(node) for k, v in flatten(item, f"{path}{i}.").items()}
    return {} if node is None else {path[:-1]: node}


def whole_tensors(case):
    tensors = {}
    for file in (ORACLE / case).glob("model*.safetensors"):
        tensors |= load_file(file)
    return {name: array.astype(np.float32) for name, array in tensors.items()}


# The axis along which parts of ranks are put together. q|k|v and gate|up are three and two such parts.
AXES = {
    "embed": 0, "head": 0,
    "qkv": (0, 3), "conv": (1, 3), "f_b": 0, "dt_bias": 0, "a_log": 0, "b": 0, "g_b": 0, "attn.o": 1,
    "attn.q_b": 0, "b_k": 0, "b_v": 0,
    "ffn.gate_up": (0, 2), "moe.gate_up": (1, 2), "ffn.down": 1, "moe.down": 2, "shared.gate_up": (0, 2), "shared.down": 1,
}  # fmt: skip


def axis_of(name, array):
    if "indexer" in name:
        return None
    if name.endswith(("ffn.gate_up", "ffn.down")) and array.ndim == 3:
        name = name.replace("ffn.", "moe.")
    for ending, axis in AXES.items():
        if name == ending or name.endswith(f".{ending}"):
            return axis
    return None


def join(parts, axis):
    if axis is None:
        for other in parts[1:]:
            np.testing.assert_array_equal(other, parts[0])
        return parts[0]
    axis, sections = axis if isinstance(axis, tuple) else (axis, 1)
    split = [np.split(part, sections, axis) for part in parts]
    return np.concatenate([piece[s] for s in range(sections) for piece in split], axis)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("case", ["tiny", "shared_index", "real_ratio"])
def test_parts_of_all_ranks_are_the_whole(case, world):
    whole = flatten(load(case, 1, 0)[0])
    ranks = [flatten(load(case, world, rank)[0]) for rank in range(world)]
    for name, expected in whole.items():
        np.testing.assert_array_equal(join([part[name] for part in ranks], axis_of(name, expected)), expected, err_msg=name)
    split = [name for name, array in whole.items() if any(part[name].shape != array.shape for part in ranks)]
    assert {name.rsplit(".", 1)[-1] for name in split} >= {"embed", "head", "qkv", "conv", "b_k", "b_v", "o", "gate_up", "down"}


@pytest.mark.parametrize(("rank", "heads"), list(enumerate([slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6)])))
def test_a_rank_holds_whole_heads(rank, heads):
    shard, _, _, checkpoint = load("shared_index", 4, rank)  # 6 heads over 4 ranks
    g, t = checkpoint.geometry, whole_tensors("shared_index")

    def of_heads(array, axis, dim):
        return np.take(array, range(heads.start * dim, heads.stop * dim), axis)

    equal = np.testing.assert_array_equal
    kda, mla, dim = shard.blocks[0].attn, shard.blocks[1].attn, g.kda_head_dim
    at = f"{PREFIX}0.self_attn."
    equal(kda.qkv, np.concatenate([of_heads(t[f"{at}{x}_proj.weight"], 0, dim) for x in "qkv"]))
    equal(kda.conv, np.concatenate([of_heads(t[f"{at}{x}_conv1d.weight"], 0, dim)[:, 0] for x in "qkv"]).T)
    for array, name, axis, width in (
        (kda.f_b, "f_b_proj.weight", 0, dim),
        (kda.g_b, "g_b_proj.weight", 0, dim),
        (kda.dt_bias, "dt_bias", 0, dim),
        (kda.a_log, "A_log", 0, 1),
        (kda.b, "b_proj.weight", 0, 1),
        (kda.o, "o_proj.weight", 1, dim),
    ):
        equal(array, of_heads(t[at + name], axis, width))
    at = f"{PREFIX}1.self_attn."
    kv_b = t[f"{at}kv_b_proj.weight"].reshape(g.heads, g.nope_dim + g.v_dim, g.latent)[heads]
    equal(mla.b_k, kv_b[:, : g.nope_dim].transpose(0, 2, 1))
    equal(mla.b_v, kv_b[:, g.nope_dim :])
    equal(mla.q_b, of_heads(t[f"{at}q_b_proj.weight"], 0, g.nope_dim))
    equal(mla.o, of_heads(t[f"{at}o_proj.weight"], 1, g.v_dim))


@pytest.mark.parametrize("case", ["tiny", "shared_index", "long_kpool16", "real_ratio"])
def test_one_rank_holds_the_tensors_of_the_file(case):
    shard, kernels, _, checkpoint = load(case, 1, 0)
    g, t = checkpoint.geometry, whole_tensors(case)
    equal = np.testing.assert_array_equal
    equal(shard.embed, t["model.language_model.embed_tokens.weight"])
    equal(shard.norm, t["model.language_model.norm.weight"])
    equal(shard.head, t["lm_head.weight"])
    for i, (layer, block) in enumerate(zip(g.layers, shard.blocks, strict=True)):
        at = f"{PREFIX}{i}."
        attn = f"{at}self_attn."
        equal(block.attn_norm, t[f"{at}input_layernorm.weight"])
        equal(block.ffn_norm, t[f"{at}post_attention_layernorm.weight"])
        equal(block.attn_hyper.fn, t[f"{at}hc_attn_fn"])
        equal(block.ffn_hyper.base, t[f"{at}hc_ffn_base"])
        equal(block.ffn_hyper.scale, t[f"{at}hc_ffn_scale"])
        assert kernels.kinds[id(block.attn_hyper.fn)] == "f32"
        if layer.kind == "kda":
            equal(block.attn.qkv, np.concatenate([t[f"{attn}{x}_proj.weight"] for x in "qkv"]))
            width = g.kda_heads * g.kda_head_dim
            for channel, x in ((3, "q"), (width + 5, "k"), (2 * width + 7, "v")):
                equal(block.attn.conv[:, channel], t[f"{attn}{x}_conv1d.weight"][channel % width, 0])
            equal(block.attn.a_log, t[f"{attn}A_log"])
            equal(block.attn.f_b, t[f"{attn}f_b_proj.weight"])
            equal(block.attn.g_a, t[f"{attn}g_a_proj.weight"])
            equal(block.attn.o, t[f"{attn}o_proj.weight"])
            assert {kernels.kinds[id(x)] for x in (block.attn.conv, block.attn.dt_bias, block.attn.o_norm)} == {"f32"}
        else:
            kv_b, both = t[f"{attn}kv_b_proj.weight"], g.nope_dim + g.v_dim
            head = g.heads - 1  # keys of the last head, values of the first
            equal(block.attn.b_k[head], kv_b[head * both : head * both + g.nope_dim].T)
            equal(block.attn.b_v[0], kv_b[g.nope_dim : both])
            equal(block.attn.q_b, t[f"{attn}q_b_proj.weight"])
            assert (block.attn.indexer is None) == (layer.index == "shared")
            if block.attn.indexer is not None:
                equal(block.attn.indexer.k_bias, t[f"{attn}indexer.k_norm.bias"])
                equal(block.attn.indexer.gate, t[f"{attn}indexer.index_kpool_compress_gate"])
        if layer.sparse_mlp:
            last, m = g.experts - 1, g.expert_width
            equal(block.ffn.gate_up[last, :m], t[f"{at}mlp.experts.{last}.gate_proj.weight"])
            equal(block.ffn.gate_up[1, m:], t[f"{at}mlp.experts.1.up_proj.weight"])
            equal(block.ffn.down[last], t[f"{at}mlp.experts.{last}.down_proj.weight"])
            equal(block.ffn.shared.down, t[f"{at}mlp.shared_experts.down_proj.weight"])
            equal(block.ffn.bias, t[f"{at}mlp.gate.e_score_correction_bias"])
            assert kernels.kinds[id(block.ffn.router)] == "f32"
        else:
            equal(block.ffn.gate_up, np.concatenate([t[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up")]))


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (3, 0), (3, 2)])
def test_progress_ends_at_the_promised_bytes(world, rank):
    _, _, calls, checkpoint = load("tiny", world, rank)
    assert calls[-1] == (checkpoint.shard_bytes(world, rank),) * 2
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    if world == 1:
        stored = [checkpoint.tensors[name] for name in checkpoint.main]
        assert calls[-1][1] == sum(tensor.stop - tensor.start for tensor in stored)


def test_draft_tensors_are_checked_only_where_drafts_are_served():
    geometry = Geometry.from_file(ORACLE / "mtp")
    draft = f"{PREFIX}4.eh_proj.weight"
    assert draft in open_checkpoint(ORACLE / "mtp", geometry).tensors
    assert draft not in open_checkpoint(ORACLE / "mtp", geometry.without_drafts()).tensors


# ---- digest ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    """A copy of `tiny` to break."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(ORACLE / "tiny" / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    """A copy of `real_ratio` (three shards and an index) to break."""
    for file in (ORACLE / "real_ratio").glob("model*"):
        shutil.copyfile(file, tmp_path / file.name)
    shutil.copyfile(ORACLE / "real_ratio" / "config.json", tmp_path / "config.json")
    return tmp_path


def opened(model_dir):
    return open_checkpoint(model_dir, Geometry.from_file(model_dir))


def refused(model_dir):
    with pytest.raises(CheckpointError) as error:
        opened(model_dir)
    return str(error.value)


def rewrite(model_dir, change):
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors")


def test_digest_follows_weights_and_config(model):
    original = opened(model).digest
    assert original == opened(ORACLE / "tiny").digest
    data = bytearray((model / "model.safetensors").read_bytes())
    data[opened(model).tensors["lm_head.weight"].start] ^= 1
    (model / "model.safetensors").write_bytes(data)
    changed = opened(model).digest
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    assert len({original, changed, opened(model).digest}) == 3


# ---- what is wrong -----------------------------------------------------------------------------------------------


def test_float32_weights_are_read(model):
    rewrite(model, lambda tensors: tensors.update({name: array.astype(np.float32) for name, array in tensors.items()}))
    shard = load_shard(opened(model), 2, 1, HostKernels(), lambda done, total: None)
    for name, array in flatten(shard).items():
        np.testing.assert_array_equal(array, flatten(load("tiny", 2, 1)[0])[name])


def test_all_faults_are_listed_at_once(model):
    def spoil(tensors):
        del tensors["lm_head.weight"]
        del tensors[f"{PREFIX}0.self_attn.A_log"]
        tensors[f"{PREFIX}1.input_layernorm.weight"] = np.zeros(63, np.float32)
        tensors[f"{PREFIX}2.input_layernorm.weight"] = np.zeros(64, np.float16)
        tensors[f"{PREFIX}3.self_attn.q_norm.weight"] = np.zeros(4, np.float32)

    rewrite(model, spoil)
    message = refused(model)
    assert "5 problems" in message
    for line in (
        "missing: lm_head.weight [256, 64]",
        f"missing: {PREFIX}0.self_attn.A_log [4]",
        f"wrong shape: {PREFIX}1.input_layernorm.weight is [63], config.json makes it [64]",
        f"wrong dtype: {PREFIX}2.input_layernorm.weight is F16, BF16 or F32 is read",
        f"surplus: {PREFIX}3.self_attn.q_norm.weight [4] in model.safetensors",
    ):
        assert f"\n  {line}" in message


def test_a_long_list_is_cut(model):
    def drop(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    rewrite(model, drop)
    message = refused(model)
    assert "72 problems" in message
    assert message.count("missing:") == 50
    assert message.endswith("and 22 more")


def test_a_layer_that_config_does_not_have_is_surplus(model):
    def add(tensors):
        tensors[f"{PREFIX}4.hc_attn_scale"] = np.zeros(3, np.float32)

    rewrite(model, add)
    assert f"surplus: {PREFIX}4.hc_attn_scale" in refused(model)


def test_truncated_data_names_the_tensors(model):
    file = model / "model.safetensors"
    size = file.stat().st_size
    tensors = sorted(opened(model).tensors.items(), key=lambda item: item[1].stop)
    kept = tensors[-2][1].stop - 10
    file.write_bytes(file.read_bytes()[:kept])
    message = refused(model)
    assert f"truncated ({kept:,} bytes, {size:,} expected)" in message
    for name, tensor in tensors[-2:]:
        assert f"truncated: {name} ends at byte {tensor.stop:,} of model.safetensors, which has {kept:,}" in message
    assert f"truncated: {tensors[-3][0]}" not in message


@pytest.mark.parametrize("keep", [0, 5, 400])
def test_truncated_header(model, keep):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = refused(model)
    assert f"model.safetensors: truncated inside its header ({keep} bytes)" in message
    assert "missing" not in message


def test_not_a_safetensors_file(model):
    (model / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"not json")
    assert "model.safetensors: its header is not a safetensors header" in refused(model)


@pytest.mark.parametrize("by", ["dtype", "scale"])
def test_block_fp8_is_refused_by_name(model, by):
    import ml_dtypes

    def quantise(tensors):
        name = f"{PREFIX}3.self_attn.q_a_proj.weight"
        if by == "dtype":
            tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        else:
            tensors[name.replace(".weight", ".weight_scale_inv")] = np.ones((1, 1), np.float32)

    rewrite(model, quantise)
    message = refused(model)
    assert "FP8 checkpoint" in message
    assert "not supported on the NumPy backend; use the BF16 release" in message


def test_a_directory_without_weights(tmp_path):
    shutil.copyfile(ORACLE / "tiny" / "config.json", tmp_path / "config.json")
    assert "holds neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path)


def test_index_names_an_absent_file(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    message = refused(sharded)
    assert "1 problem:" in message
    assert "model-00002-of-00003.safetensors: No such file or directory" in message


def test_index_and_shards_disagree(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "model-00003-of-00003.safetensors"
    del index["weight_map"]["model.language_model.norm.weight"]
    path.write_text(json.dumps(index))
    message = refused(sharded)
    assert "places lm_head.weight in model-00003-of-00003.safetensors, which does not hold it" in message
    assert "holds lm_head.weight, which model.safetensors.index.json places in model-00003-of-00003.safetensors" in message
    assert "holds model.language_model.norm.weight, which model.safetensors.index.json places nowhere" in message


def test_index_that_is_not_an_index(sharded):
    (sharded / "model.safetensors.index.json").write_text("[]")
    assert "cannot be read as an index with a weight_map" in refused(sharded)


def test_a_file_that_shrinks_after_opening(model):
    checkpoint = opened(model)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="reading failed"):
        load_shard(checkpoint, 1, 0, HostKernels(), lambda done, total: None)
