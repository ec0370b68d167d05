"""The model against reference data computed by an independent implementation (tests/data/oracle/README.md)."""

from __future__ import annotations

import numpy as np
import pytest
from harness import ORACLE, Ranks, Recorder, oracle

from latentpool.errors import GeometryError
from latentpool.geometry import Geometry

CASES = ["tiny", "shared_index", "long_kpool16", "real_ratio"]
TOLERANCE = 2e-4
PAGES_A, PAGES_B = range(0, 12), range(12, 24)
FETCHED = 64
"""Rows of a chunk of a split group: those before it come from the owner."""


def worlds() -> list[object]:
    quick = {("tiny", 4), ("shared_index", 3)}
    return [
        pytest.param(case, world, marks=[] if world <= 2 or (case, world) in quick else pytest.mark.full)
        for case in CASES
        for world in (1, 2, 3, 4)
    ]


def error(mine: np.ndarray, expected: dict[str, np.ndarray], key: str, prefix: str = "") -> float:
    scale = np.abs(expected.get(f"{prefix}f64.logits", expected[f"{prefix}logits"])).max()
    return float(np.abs(mine - expected[prefix + key]).max() / scale)


def begin(ranks: Ranks, lane: int, pages: range) -> None:
    """Lane 0 belongs to rank 1 of a split group, lane 1 to rank 0."""
    owner = 1 - lane if ranks.split else 0
    ranks.begin(lane, [page * ranks.world + owner for page in pages] if ranks.split else pages, owner=owner)


def check(ranks: Ranks, expected: dict[str, np.ndarray], prefix: str = "") -> None:
    """Prefill, greedy continuation and decode of one prompt."""
    ids = expected[prefix + "input_ids"].tolist()
    limit = FETCHED if ranks.split else None
    begin(ranks, 0, PAGES_A)
    logits, token = ranks.prompt(0, ids, limit)
    assert error(logits, expected, "logits", prefix) <= TOLERANCE

    greedy, rows = [token], [logits[-1]]
    for _ in range(len(expected[prefix + "greedy.ids"]) - 1):
        row, tokens = ranks.decode([0])
        rows.append(row[0])
        greedy += tokens
    assert greedy == expected[prefix + "greedy.ids"].tolist()
    assert error(np.stack(rows), expected, "greedy.logits", prefix) <= TOLERANCE

    if prefix + "decode.split" in expected:
        split = int(expected[prefix + "decode.split"][0])
        begin(ranks, 1, PAGES_B)
        part, _ = ranks.prompt(1, ids[:split], limit)
        rows = [part[-1], *(ranks.decode([1], 1, [token])[0][0] for token in ids[split:])]
        assert error(np.stack(rows), expected, "decode.logits", prefix) <= TOLERANCE


@pytest.mark.parametrize(("case", "world"), worlds())
def test_logits_and_greedy_ids(case: str, world: int) -> None:
    model, expected = oracle(case)
    ranks = Ranks(model, world)
    check(ranks, expected)
    ranks.close()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_logits_and_greedy_ids_where_each_conversation_has_an_owner(case: str, world: int) -> None:
    model, expected = oracle(case)
    assert len(expected["input_ids"]) > FETCHED or case == "tiny"
    ranks = Ranks(model, world, split=True, pages=24 * world)
    check(ranks, expected)
    ranks.close()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 63, 64, 65])
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_prompt_lengths_around_pools_and_blocks(length: int, world: int) -> None:
    model, expected = oracle("edge")
    ranks = Ranks(model, world)
    check(ranks, expected, f"len{length}.")
    ranks.close()


@pytest.mark.parametrize(("case", "world"), worlds())
def test_selections_and_experts_are_equal(case: str, world: int) -> None:
    """Every rank selects the reference's sets and chooses the reference's experts."""
    model, expected = oracle(case)
    recorders = [Recorder(None)] * world

    def record(rank: int, kernels: object) -> Recorder:
        recorders[rank] = Recorder(kernels)
        return recorders[rank]

    ranks = Ranks(model, world, kernels_of=record)
    ids = expected["input_ids"].tolist()
    ranks.begin(0, PAGES_A)
    ranks.prompt(0, ids)
    ranks.close()
    geometry = ranks.geometry
    sparse = [i for i, layer in enumerate(geometry.layers) if layer.sparse_mlp]
    for recorder in recorders:
        assert len(recorder.calls["select"]) == len(geometry.indexed_layers)
        for layer, call in zip(geometry.indexed_layers, recorder.calls["select"], strict=True):
            np.testing.assert_array_equal(call["lists"][: len(ids)], expected[f"topk.layer{layer}"])
        assert len(recorder.calls["route"]) == len(sparse)
        for layer, call in zip(sparse, recorder.calls["route"], strict=True):
            np.testing.assert_array_equal(call["experts"][: len(ids)], expected[f"router.layer{layer}.experts"])
            np.testing.assert_allclose(
                call["weights"][: len(ids)], expected[f"router.layer{layer}.weights"], rtol=1e-3, atol=1e-5
            )


def test_internals_of_tiny() -> None:
    """Hidden streams, hyper-connections, sub-layer outputs and every cache, at W = 1."""
    model, expected = oracle("tiny")
    recorder = Recorder(None)

    def record(_rank: int, kernels: object) -> Recorder:
        recorder.__init__(kernels)  # type: ignore[misc]
        return recorder

    ranks = Ranks(model, kernels_of=record)
    ids = expected["input_ids"].tolist()
    rows = len(ids)
    ranks.begin(0, PAGES_A)
    ranks.prompt(0, ids)
    geometry, arena = ranks.geometry, ranks.arenas[0]

    def close(mine: np.ndarray, key: str) -> None:
        reference = expected[key]
        np.testing.assert_allclose(mine, reference, rtol=0, atol=TOLERANCE * np.abs(reference).max(), err_msg=key)

    pre, post = recorder.calls["hyper_pre"], recorder.calls["hyper_post"]
    assert len(pre) == len(post) == 2 * len(geometry.layers)
    for i in range(len(geometry.layers)):
        close(pre[2 * i]["X"][:rows], f"hidden.{i}")
        for half, name in enumerate(("attn_hc", "ffn_hc")):
            close(pre[2 * i + half]["x"][:rows], f"layer{i}.{name}.collapsed")
            close(pre[2 * i + half]["post"][:rows], f"layer{i}.{name}.post")
            close(pre[2 * i + half]["comb"][:rows], f"layer{i}.{name}.comb")
        close(post[2 * i]["y"][:rows], f"layer{i}.attn_out")
        close(post[2 * i + 1]["y"][:rows], f"layer{i}.mlp_out")
    close(post[-1]["out"][:rows], f"hidden.{len(geometry.layers)}")
    close(recorder.calls["rms_norm"][-1]["out"][:rows], "final_norm")

    for place, layer in enumerate(geometry.kda_layers):
        close(arena.states[place, 0], f"cache.layer{layer}.kda_state")
        last = [p % geometry.conv_rows for p in range(rows - 3, rows)]
        close(arena.conv[place, 0][last].T, f"cache.layer{layer}.conv_last3")
    pages = arena.latent_tables[0, [p // ranks.page_rows for p in range(rows)]]
    close(arena.latent[pages, 0, np.arange(rows) % ranks.page_rows], "cache.layer3.latent")
    pools = np.arange(rows // geometry.pool)
    per_page = ranks.page_rows // geometry.pool
    close(arena.index[arena.index_tables[0, pools // per_page], 0, pools % per_page], "cache.layer3.pooled_key")
    ranks.close()


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_bf16_is_as_good_as_the_reference_in_bf16(world: int) -> None:
    """The acceptance stated with the reference data: a rounding may move a selection, so rows are compared one by one."""
    model, expected = oracle("real_ratio")
    recorder = Recorder(None)

    def record(rank: int, kernels: object) -> object:
        if rank:
            return kernels
        recorder.__init__(kernels)  # type: ignore[misc]
        return recorder

    ranks = Ranks(model, world, dtype="bf16", kernels_of=record)
    ids = expected["input_ids"].tolist()
    ranks.begin(0, PAGES_A)
    prefill, _ = ranks.prompt(0, ids)
    split = int(expected["decode.split"][0])
    ranks.begin(1, PAGES_B)
    part, _ = ranks.prompt(1, ids[:split])
    decode = np.concatenate([part, *(ranks.decode([1], 1, [token])[0] for token in ids[split:])])
    ranks.close()

    exact = expected["f64.logits"]
    for mine in (prefill, decode):
        rows = np.sqrt(((mine - exact) ** 2).mean(axis=1)) / np.abs(exact).max()
        assert np.median(rows) <= 0.006
        assert (rows <= 0.012).mean() >= 0.90
        assert (mine.argmax(axis=1) == exact.argmax(axis=1)).mean() >= 0.95
    lists = recorder.calls["select"][0]["lists"][: len(ids)]
    assert (lists == expected["topk.layer1"]).all(axis=1).mean() >= 0.90


@pytest.mark.parametrize("case", ["tiny", "shared_index", "long_kpool16", "mtp"])
def test_more_ranks_than_heads_are_refused_by_name(case: str) -> None:
    geometry = Geometry.from_file(ORACLE / case)
    with pytest.raises(GeometryError, match=f"{geometry.heads + 1} ranks is more than num_attention_heads = {geometry.heads}"):
        geometry.check_world(geometry.heads + 1)
