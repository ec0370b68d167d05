"""Sparse attention and selection through pages: values, what must never be read, and order."""

from __future__ import annotations

import kernel_reference as ref
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import compute, normal, paged

from kernels.api import Kernels, Path
from kernels.rows import Array, RowView

PATHS = pytest.mark.parametrize("path", list(Path))
LENGTH = 1280


def run(
    kernels: Kernels, path: Path, q: Array, view: RowView, lanes: Array, positions: Array, lists: Array, counts: Array
) -> Array:
    out = np.full(q.shape, np.nan, np.float32)
    kernels.attend(path, q, view, lanes, positions, lists, counts, 0.3, out)
    return out


def block(rng: np.random.Generator, first: int, longest: int, real: int = 64) -> tuple[Array, Array, Array]:
    """Positions, lists and counts of 64 rows from `first` on: dense while `longest` covers them, then random lists."""
    positions = np.arange(first, first + 64, dtype=np.int32)
    counts = np.minimum(positions + 1, longest).astype(np.int32)
    counts[real:] = 0
    lists = np.full((64, longest), -1, np.int32)
    for t in range(real):
        lists[t, : counts[t]] = np.sort(rng.permutation(positions[t] + 1)[: counts[t]])
    return positions, lists, counts


def lane_rows(view: RowView, lane: int, ids: Array) -> Array:
    return view.values[view.tables[lane][ids // view.rows], ids % view.rows].astype(np.float64)


def poisoned(view: RowView, lane: int, used: Array) -> RowView:
    """The same view with NaN in every row but the used ones of the lane and the null page."""
    values = view.values.copy()
    values[...] = np.nan
    values[view.null_page] = 0
    where = view.tables[lane][used // view.rows], used % view.rows
    values[where] = view.values[where]
    return RowView(values, None, view.tables)


@PATHS
@given(first=st.sampled_from([0, 64, 448, 512, 1024]), longest=st.sampled_from([40, 67, 515, 1088]),
       real=st.sampled_from([64, 64, 17, 1]), heads=st.integers(1, 4), seed=st.integers(0, 999))  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_attention(kernels: Kernels, path: Path, first: int, longest: int, real: int, heads: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    view = paged(kernels, rng, 2, LENGTH, 64, 24)
    q = compute(kernels, normal(rng, 64, heads, 24))
    q[real:] = np.nan  # padding rows hold anything
    positions, lists, counts = block(rng, first, longest, real)
    out = run(kernels, path, q, view, np.ones(64, np.int32), positions, lists, counts)
    assert not out[real:].any()
    for t in range(real):
        exact = ref.attend(q[t].astype(np.float64), lane_rows(view, 1, lists[t, : counts[t]]), 0.3)
        allowed = 2e-5 + (2.0**-8 * np.abs(exact) if kernels.dtype == "bf16" else 0)
        assert np.all(np.abs(out[t] - exact) <= allowed)


@PATHS
@pytest.mark.parametrize(("first", "longest", "real"), [(0, 67, 30), (64, 67, 64), (512, 67, 64), (512, 1088, 5)])
def test_rows_nobody_listed_are_never_read(kernels: Kernels, path: Path, first: int, longest: int, real: int) -> None:
    rng = np.random.default_rng(1)
    view = paged(kernels, rng, 2, LENGTH, 64, 16)
    q = compute(kernels, normal(rng, 64, 2, 16))
    positions, lists, counts = block(rng, first, longest, real)
    used = np.unique(lists[lists >= 0])
    lanes = np.ones(64, np.int32)
    clean = run(kernels, path, q, view, lanes, positions, lists, counts)
    assert np.isfinite(clean).all()
    dirty = run(kernels, path, q, poisoned(view, 1, used), lanes, positions, lists, counts)
    assert clean.tobytes() == dirty.tobytes()


@PATHS
def test_the_same_rows_elsewhere_give_the_same_bits(kernels: Kernels, path: Path) -> None:
    """Rows fetched to a staging buffer and lists renumbered in the same order: attention cannot tell."""
    rng = np.random.default_rng(2)
    view = paged(kernels, rng, 1, LENGTH, 64, 16)
    q = compute(kernels, normal(rng, 64, 2, 16))
    positions, lists, counts = block(rng, 512, 550)
    used = np.unique(lists[lists >= 0])
    staging = kernels.cache((3, len(used), 16), kernels.dtype)
    staging[0] = view.values[view.tables[0][used // 64], used % 64]
    renumbered = np.where(lists >= 0, np.searchsorted(used, lists), -1).astype(np.int32)
    fetched = RowView(staging, None, np.array([[0]], np.int32))
    lanes = np.zeros(64, np.int32)
    ours = run(kernels, path, q, view, lanes, positions, lists, counts)
    theirs = run(kernels, path, q, fetched, lanes, positions, renumbered, counts)
    assert ours.tobytes() == theirs.tobytes()


@PATHS
@pytest.mark.parametrize("first", [0, 512])
def test_heads_of_several_ranks_side_by_side_get_what_each_rank_alone_gets(kernels: Kernels, path: Path, first: int) -> None:
    """As an owner attends for all ranks: a product's bits may depend on how many heads it holds, a rank's must not."""
    rng = np.random.default_rng(4)
    view = paged(kernels, rng, 1, LENGTH, 64, 40)
    tiles = [3, 2, 2]
    q = compute(kernels, normal(rng, 64, sum(tiles), 40))
    positions, lists, counts = block(rng, first, 550)
    lanes = np.zeros(64, np.int32)
    together = np.full(q.shape, np.nan, np.float32)
    kernels.attend(path, q, view, lanes, positions, lists, counts, 0.3, together, tiles)
    start = 0
    for heads in tiles:
        mine = np.ascontiguousarray(q[:, start : start + heads])
        alone = run(kernels, path, mine, view, lanes, positions, lists, counts)
        assert together[:, start : start + heads].tobytes() == alone.tobytes()
        start += heads


def test_some_sparse_rows_of_a_block_get_what_the_whole_block_gives_them(kernels: Kernels) -> None:
    """As where a staging buffer holds the rows that a part of a block selects."""
    rng = np.random.default_rng(5)
    view = paged(kernels, rng, 1, LENGTH, 64, 16)
    q = compute(kernels, normal(rng, 64, 2, 16))
    positions, lists, counts = block(rng, 1024, 550)
    lanes = np.zeros(64, np.int32)
    whole = run(kernels, Path.PROMPT, q, view, lanes, positions, lists, counts)
    for part in (slice(0, 32), slice(32, 33), slice(33, 64)):
        some = run(kernels, Path.PROMPT, q[part], view, lanes[part], positions[part], lists[part], counts[part])
        assert some.tobytes() == whole[part].tobytes()


def test_scores_far_apart_do_not_overflow(kernels: Kernels) -> None:
    view = paged(kernels, np.random.default_rng(3), 1, LENGTH, 64, 8)
    view.values[...] = 0
    view.values[view.tables[0][1100 // 64], 1100 % 64] = 100
    q = np.full((1, 1, 8), 100, np.float32)
    lists = np.arange(1200, dtype=np.int32)[None]
    at = np.array([0], np.int32), np.array([1199], np.int32)
    with np.errstate(all="raise", under="ignore"):
        out = run(kernels, Path.DECODE, q, view, *at, lists, np.array([1200], np.int32))
    assert np.all(out == 100)
    q[...] = -100
    out = run(kernels, Path.DECODE, q, view, *at, lists, np.array([1200], np.int32))
    assert not out.any()


def select(
    kernels: Kernels, path: Path, q: Array, weights: Array, view: RowView, positions: Array, pool: int, kept: int
) -> tuple[Array, Array]:
    lists, counts = np.full((len(q), kept * pool + pool - 1), 77, np.int32), np.full(len(q), 77, np.int32)
    kernels.select(path, q, weights, view, np.zeros(len(q), np.int32), positions, pool, kept, lists, counts)
    return lists, counts


@PATHS
@pytest.mark.parametrize(("pool", "kept"), [(4, 4), (16, 4), (1, 7), (4, 90)])
def test_selection(kernels: Kernels, path: Path, pool: int, kept: int) -> None:
    rng = np.random.default_rng(4)
    view = paged(kernels, rng, 1, LENGTH // pool, 32, 16)
    keys = lane_rows(view, 0, np.arange(LENGTH // pool))
    dense = kept * pool + pool - 1
    for first in {0, dense // 64 * 64, 640}:
        q, weights = compute(kernels, normal(rng, 64, 3, 16)), normal(rng, 64, 3)
        positions = np.arange(first, first + 64, dtype=np.int32)
        positions[60:] = -1
        lists, counts = select(kernels, path, q, weights, view, positions, pool, kept)
        assert not counts[60:].any()
        assert np.all(lists[60:] == -1)
        for t in range(60):
            row = (q[t].astype(np.float64), weights[t].astype(np.float64), keys)
            exact, scores = ref.select(*row, int(positions[t]), pool, kept)
            assert counts[t] == len(exact)
            assert np.all(lists[t, counts[t] :] == -1)
            got = lists[t, : counts[t]].tolist()
            if got != exact:  # only where the scores of the pools exchanged are equal but for float32 noise
                swapped = {i // pool for i in set(got) ^ set(exact)}
                assert np.ptp(scores[list(swapped)]) < 1e-5


@PATHS
def test_incomplete_pools_and_other_lanes_are_never_scored(kernels: Kernels, path: Path) -> None:
    rng = np.random.default_rng(5)
    view = paged(kernels, rng, 2, 256, 32, 16)
    positions = np.arange(640, 704, dtype=np.int32)
    q, weights = compute(kernels, normal(rng, 64, 3, 16)), normal(rng, 64, 3)
    clean = select(kernels, path, q, weights, view, positions, 4, 8)
    dirty = select(kernels, path, q, weights, poisoned(view, 0, np.arange(704 // 4)), positions, 4, 8)
    assert clean[0].tobytes() == dirty[0].tobytes()
    for t in range(64):  # a pool that completes later is not there yet
        sight = poisoned(view, 0, np.arange((positions[t] + 1) // 4))
        alone = select(kernels, Path.DECODE, q[t : t + 1], weights[t : t + 1], sight, positions[t : t + 1], 4, 8)
        assert alone[1][0] == clean[1][t]
        assert alone[0].max() <= positions[t]


@PATHS
def test_equal_scores_go_to_the_lower_pool(kernels: Kernels, path: Path) -> None:
    """With every relu inactive all scores are 0, and a pool at 0 beats one that a negative weight pulls down."""
    view = paged(kernels, np.random.default_rng(6), 1, 256, 32, 4)
    view.values[: view.null_page] = -1
    q, weights = np.ones((64, 1, 4), np.float32), -np.ones((64, 1), np.float32)
    positions = np.arange(768, 832, dtype=np.int32)
    lists, _ = select(kernels, path, q, weights, view, positions, 4, 4)
    assert np.all(lists[:, :16] == np.arange(16))
    view.values[view.tables[0][0], 1] = 1  # pool 1 scores below all others
    view.values[view.tables[0][0], 2] = 0
    lists, _ = select(kernels, path, q, weights, view, positions, 4, 4)
    assert np.all(lists[:, :16] == np.r_[0:4, 8:20])


def test_a_nan_score_is_the_worst_and_no_crash(kernels: Kernels) -> None:
    view = paged(kernels, np.random.default_rng(7), 1, 256, 32, 4)
    q, weights = np.full((1, 1, 4), np.nan, np.float32), np.ones((1, 1), np.float32)
    lists, counts = select(kernels, Path.DECODE, q, weights, view, np.array([800], np.int32), 4, 4)
    assert lists[0, : counts[0]].tolist() == [*range(16), 800]
