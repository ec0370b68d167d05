"""The exactness contract at the level of rounds (design section 3): equal bits, not tolerance.

`long_kpool16` is the model: its prompts drop tokens in selection from 80 on, so sparse rows are everywhere.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from harness import Ranks, oracle

from services.rank_worker import frames

MODEL, EXPECTED = oracle("long_kpool16")
PROMPT = EXPECTED["input_ids"].tolist()[:330]
STEPS = 40
WORLDS = [1, 2, pytest.param(3, marks=pytest.mark.full)]


def alone(ranks: Ranks, prompt: list[int], lane: int = 0, pages: object = range(8), limit: int | None = None) -> np.ndarray:
    """Logits of a prompt's rows and of STEPS greedy decode rows, [n + STEPS, V]."""
    ranks.begin(lane, list(pages))  # type: ignore[call-overload]
    logits, _ = ranks.prompt(lane, prompt, limit)
    return np.concatenate([logits, *(ranks.decode([lane])[0] for _ in range(STEPS))])


@cache
def reference(world: int, dtype: str = "f32", kv_dtype: str = "f32") -> np.ndarray:
    ranks = Ranks(MODEL, world, dtype=dtype, kv_dtype=kv_dtype)
    logits = alone(ranks, PROMPT)
    ranks.close()
    return logits


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("limit", [64, 128, 2048])
def test_chunk_limits_change_nothing(world: int, limit: int) -> None:
    ranks = Ranks(MODEL, world)
    np.testing.assert_array_equal(alone(ranks, PROMPT, limit=limit), reference(world))
    ranks.close()


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("f32", "f32"), ("f32", "bf16"), ("bf16", "bf16"), ("bf16", "f32")])
@pytest.mark.parametrize("world", [1, 2])
def test_windows_equal_pages(world: int, dtype: str, kv_dtype: str) -> None:
    """A window is a contiguous run of ids; scattered ids in any order and other page sizes give the same bits."""
    scattered = Ranks(MODEL, world, dtype=dtype, kv_dtype=kv_dtype)
    np.testing.assert_array_equal(
        alone(scattered, PROMPT, pages=[17, 3, 22, 9, 0, 14, 5, 20]), reference(world, dtype, kv_dtype)
    )
    scattered.close()
    large = Ranks(MODEL, world, dtype=dtype, kv_dtype=kv_dtype, page_rows=256, pages=6)
    np.testing.assert_array_equal(alone(large, PROMPT, pages=[4, 1, 3]), reference(world, dtype, kv_dtype))
    large.close()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_window_of_r_rows_equals_r_windows_of_one(world: int, width: int) -> None:
    forced = EXPECTED["input_ids"].tolist()[330 : 330 + 12 * 3]
    one, many = Ranks(MODEL, world), Ranks(MODEL, world)
    rows, tokens = [], []
    for ranks, step in ((one, 1), (many, width)):
        ranks.begin(0, range(8))
        ranks.prompt(0, PROMPT)
        parts, drawn = [], []
        for first in range(0, len(forced), step):
            logits, sampled = ranks.decode([0], len(forced[first : first + step]), forced[first : first + step])
            parts.append(logits)
            drawn += sampled
        rows.append(np.concatenate(parts))
        tokens.append(drawn)
        ranks.close()
    np.testing.assert_array_equal(rows[0], rows[1])
    assert tokens[0] == tokens[1]
    for mine, theirs in zip(one.arenas, many.arenas, strict=True):
        np.testing.assert_array_equal(mine.latent, theirs.latent)
        np.testing.assert_array_equal(mine.index, theirs.index)


@pytest.mark.parametrize("world", WORLDS)
def test_alone_equals_in_company(world: int) -> None:
    """Five conversations of other lengths, filled between decode steps and decoded in one operation, in changing order."""
    company = Ranks(MODEL, world, lanes=6, pages=60)
    lengths = {1: 1, 2: 63, 3: 64, 4: 100, 5: 257}
    for lane, length in lengths.items():
        company.begin(lane, range(8 + 8 * lane, 16 + 8 * lane), temperature=0.7, seed=lane)
        company.prompt(lane, PROMPT[7 : 7 + length])
    company.begin(0, range(8))
    logits, _ = company.prompt(0, PROMPT, 128)
    rows = [logits]
    for step in range(STEPS):
        lanes = [(step + shift) % 6 for shift in range(6)][: 2 + step % 5]
        lanes = lanes if 0 in lanes else [0, *lanes]
        both, _ = company.decode(lanes)
        rows.append(both[lanes.index(0) : lanes.index(0) + 1])
    np.testing.assert_array_equal(np.concatenate(rows), reference(world))
    company.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
def test_poison_outside_the_mapped_pages_never_reaches_a_result(world: int, kv_dtype: str) -> None:
    """Free pages, the discard page, stale states and rings hold NaN; the null page stays zero."""
    ranks = Ranks(MODEL, world, kv_dtype=kv_dtype, lanes=3)
    for arena in ranks.arenas:
        for plane in (arena.latent, arena.index):
            plane[:-2] = np.nan
            plane[-1] = np.nan
        arena.states[:] = np.nan
        arena.conv[:] = np.nan
        arena.rings[:] = np.nan
    np.testing.assert_array_equal(alone(ranks, PROMPT, lane=1), reference(world, "f32", kv_dtype))
    ranks.agree(frames.Free(1))
    for arena in ranks.arenas:
        assert (arena.index_tables == arena.index_null).all()
        assert (arena.latent_tables == arena.latent_null).all()
        arena.latent[:-2] = np.nan
        arena.index[:-2] = np.nan
    np.testing.assert_array_equal(alone(ranks, PROMPT, lane=1, pages=range(8, 16)), reference(world, "f32", kv_dtype))
    for arena in ranks.arenas:
        assert not arena.latent[arena.latent_null].any()
        assert not arena.index[arena.index_null].any()
    ranks.close()


def test_draws_depend_on_seed_and_position_alone() -> None:
    """The same seed draws the same tokens in another lane, order and company; another seed draws others."""
    ranks = Ranks(MODEL, lanes=3, pages=30)
    for lane, (seed, top_k) in enumerate([(11, 0), (11, 0), (12, 0)]):
        ranks.begin(lane, range(10 * lane, 10 * lane + 8), temperature=1.5, top_k=top_k, seed=seed)
        ranks.prompt(lane, PROMPT[:70])
    drawn: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step in range(24):
        lanes = [[0, 1, 2], [2, 1, 0], [1, 0, 2]][step % 3]
        for lane, token in zip(lanes, ranks.decode(lanes)[1], strict=True):
            drawn[lane].append(token)
    ranks.close()
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_top_k_of_one_is_greedy(world: int) -> None:
    """With one candidate kept, every draw is the largest logit, whichever rank holds it."""
    ranks = Ranks(MODEL, world)
    ranks.begin(0, range(8), temperature=5.0, top_k=1, seed=3)
    logits, token = ranks.prompt(0, PROMPT[:70])
    assert token == int(logits[-1].argmax())
    for _ in range(16):
        logits, tokens = ranks.decode([0])
        assert tokens == [int(logits[0].argmax())]
    ranks.close()
