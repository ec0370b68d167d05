"""E3 of the exactness contract at the level of rounds: a conversation that goes on from a kept state gets the bits that it
would get if all of its prompt were computed; and states that are not what was kept are refused.

`long_kpool16` is the model: rows from 79 on drop tokens in selection; pages of 256 rows, so that a state may end in four places
of a page.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from harness import Ranks, oracle

from kernels.numpy import NumpyKernels
from latentpool.errors import EpochError
from services.rank_worker import frames

MODEL, EXPECTED = oracle("long_kpool16")
IDS = (EXPECTED["input_ids"].tolist() * 2)[:700]
PAGE = 256
STEPS = 6
FULL = pytest.mark.full
GROUPS = [(1, False), (2, False), (2, True), pytest.param(3, False, marks=FULL), (3, True)]


def made(world: int, split: bool, kv_dtype: str = "f32", dtype: str = "f32", **settings: Any) -> Ranks:
    pages = 48 * (world if split else 1)
    settings = {"context": 768, "page_rows": PAGE, "pages": pages, "lanes": 3} | settings
    return Ranks(MODEL, world, dtype=dtype, kv_dtype=kv_dtype, split=split, **settings)


def ids(ranks: Ranks, owner: int, first: int, count: int) -> list[int]:
    """Local pages first.. of an owner; of everybody where nothing is split."""
    return [(first + i) * ranks.world + owner if ranks.split else first + i for i in range(count)]


def fixed_pages(ranks: Ranks, first: int) -> list[int]:
    """Pages for a state's fixed part: as many of every residue as it needs."""
    geometry, arena = ranks.geometry, ranks.arenas[0]
    page = arena.latent[0].nbytes
    count = -(-max(geometry.kept_bytes(ranks.world, rank, ranks.kernels[0].dtype) for rank in range(ranks.world)) // page)
    owners = range(ranks.world if ranks.split else 1)
    return [page for owner in owners for page in ids(ranks, owner, first, count)]


def chunk(ranks: Ranks, lane: int, start: int, end: int, last: bool) -> np.ndarray:
    mode = frames.FETCH if ranks.split else frames.LOCAL
    return ranks.logits(ranks.agree(frames.Prompt(lane, start, IDS[start:end], last, 2, mode=mode)), 0)


def fill(ranks: Ranks, lane: int, owner: int, first: int, end: int, keep_at: int, state: int = 7, store: int = 30) -> None:
    """A conversation that fills up to `end`, keeps at `keep_at` on its way, and decodes two tokens."""
    ranks.begin(lane, ids(ranks, owner, first, 3), owner=owner)
    chunk(ranks, lane, 0, keep_at, False)
    ranks.agree(frames.Keep(lane, state, keep_at, fixed_pages(ranks, store)))
    chunk(ranks, lane, keep_at, end, True)
    for _ in range(2):
        ranks.decode([lane])


def resume(ranks: Ranks, lane: int, owner: int, at: int, state: int = 7, kept_first: int = 0, first: int = 10) -> None:
    """A new conversation with the state's full pages and pages of its own."""
    full = at // PAGE
    pages = ids(ranks, owner, kept_first, full) + ids(ranks, owner, first, 3 - full)
    ranks.agree(
        frames.Bind(lane, 50 + lane, 0.0, 0, 0, owner=owner), frames.Table(lane, 0, pages), frames.Resume(lane, state, at)
    )


def rest(ranks: Ranks, lane: int, at: int, end: int) -> np.ndarray:
    """Logits of the prompt from `at` on and of greedy decode rows."""
    return np.concatenate([chunk(ranks, lane, at, end, True), *(ranks.decode([lane])[0] for _ in range(STEPS))])


@cache
def fresh(world: int, end: int, kv_dtype: str = "f32", dtype: str = "f32") -> np.ndarray:
    """Logits of all prompt rows and decode rows of a conversation computed in one go, where nothing is split."""
    ranks = made(world, False, kv_dtype, dtype)
    ranks.begin(0, range(3))
    rows = np.concatenate([chunk(ranks, 0, 0, end, True), *(ranks.decode([0])[0] for _ in range(STEPS))])
    ranks.close()
    return rows


def poison_between(ranks: Ranks, free: list[int]) -> None:
    """What the first conversation left behind and nobody holds; and every lane's fixed part."""
    for arena in ranks.arenas:
        for page in free:
            arena.index[page] = np.nan
            if not ranks.split or page % ranks.world == arena.rank:
                arena.latent[page // arena.residues] = np.nan
        arena.states[:] = np.nan
        arena.conv[:] = np.nan
        arena.rings[:] = np.nan


@pytest.mark.parametrize(("at", "end"), [(64, 81), (128, 194), (192, 256), (256, 257), (320, 449), (448, 527), (512, 575)])
@pytest.mark.parametrize(("world", "split"), GROUPS)
def test_resumed_equals_fresh(world: int, split: bool, at: int, end: int) -> None:
    """At every place of a page, before and after the first sparse rows; prompts that end at every remainder of a pool that
    matters; the conversation that was kept has gone on, ended, and left its other pages to be overwritten."""
    owner = world - 1 if split else 0
    ranks = made(world, split)
    fill(ranks, 0, owner, 0, min(end + 40, 640), at)
    ranks.agree(frames.Free(0))
    used = -(-at // PAGE)
    poison_between(ranks, ids(ranks, owner, used, 3 - used))
    resume(ranks, 1, owner, at)
    np.testing.assert_array_equal(rest(ranks, 1, at, end), fresh(world, end)[at:])
    ranks.close()


@pytest.mark.parametrize("tail", range(16))
def test_prompts_end_at_every_remainder_of_a_pool(tail: int) -> None:
    ranks = made(2, True)
    fill(ranks, 0, 1, 0, 400, 320)
    resume(ranks, 1, 1, 320)
    end = 321 + tail
    np.testing.assert_array_equal(rest(ranks, 1, 320, end), fresh(2, end)[320:])
    ranks.close()


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("f32", "bf16"), ("bf16", "bf16"), ("bf16", "f32")])
@pytest.mark.parametrize(("world", "split"), [(1, False), (2, True)])
def test_the_other_dtypes(world: int, split: bool, dtype: str, kv_dtype: str) -> None:
    ranks = made(world, split, kv_dtype, dtype)
    fill(ranks, 0, 0, 0, 500, 320)
    ranks.agree(frames.Free(0))
    resume(ranks, 2, 0, 320)
    np.testing.assert_array_equal(rest(ranks, 2, 320, 450), fresh(world, 450, kv_dtype, dtype)[320:])
    ranks.close()


def test_many_go_on_from_one_state_at_once_and_none_disturbs_another() -> None:
    """The conversation that was kept is still decoding, two others resume its state, run side by side, and resume again."""
    ranks = made(2, True)
    fill(ranks, 0, 1, 0, 400, 320)
    resume(ranks, 1, 1, 320, first=10)
    resume(ranks, 2, 1, 320, first=13)
    rows = {lane: [chunk(ranks, lane, 320, 450, True)] for lane in (1, 2)}
    for _ in range(STEPS):
        logits, _ = ranks.decode([2, 0, 1])
        rows[2].append(logits[:1])
        rows[1].append(logits[2:])
    for lane in (1, 2):
        np.testing.assert_array_equal(np.concatenate(rows[lane]), fresh(2, 450)[320:])
    ranks.agree(frames.Free(1))
    resume(ranks, 1, 1, 320, first=10)
    np.testing.assert_array_equal(rest(ranks, 1, 320, 450), fresh(2, 450)[320:])
    ranks.close()


@pytest.mark.parametrize("at", [256, 320])
@pytest.mark.parametrize("world", [2, 3])
def test_a_resumed_state_is_carried_before_it_runs(world: int, at: int) -> None:
    """Its owner has no room: the lane has the state's pages alone until they are on another rank; the state stays usable."""
    ranks = made(world, True)
    fill(ranks, 0, 1, 0, 400, at)
    ranks.agree(frames.Free(0))
    for turn, target in enumerate(rank for rank in range(world) if rank != 1):
        kept = ids(ranks, 1, 0, -(-at // PAGE))
        bind = frames.Bind(turn, 50 + turn, 0.0, 0, 0, owner=1)
        ranks.agree(bind, frames.Table(turn, 0, kept), frames.Resume(turn, 7, at))
        results = ranks.agree(frames.Carry(turn, target, 0, ids(ranks, target, 10 + 3 * turn, 3), True))
        assert sum(result.sent.carries for result in results) == at * ranks.geometry.latent_bytes("f32")
        np.testing.assert_array_equal(rest(ranks, turn, at, 450), fresh(world, 450)[at:])
    resume(ranks, 2, 1, at, first=20)
    np.testing.assert_array_equal(rest(ranks, 2, at, 450), fresh(world, 450)[at:])
    ranks.close()


def test_a_state_extends_another() -> None:
    """A resumed conversation keeps again, further on: both states serve."""
    ranks = made(2, True)
    fill(ranks, 0, 0, 0, 300, 192)
    ranks.agree(frames.Free(0))
    resume(ranks, 1, 0, 192)
    chunk(ranks, 1, 192, 448, False)
    ranks.agree(frames.Keep(1, 8, 448, fixed_pages(ranks, 38)))
    chunk(ranks, 1, 448, 470, True)
    ranks.agree(frames.Free(1))
    ranks.agree(frames.Bind(0, 60, 0.0, 0, 0), frames.Table(0, 0, [*ids(ranks, 0, 10, 1), *ids(ranks, 0, 20, 2)]))
    ranks.agree(frames.Resume(0, 8, 448))
    np.testing.assert_array_equal(rest(ranks, 0, 448, 500), fresh(2, 500)[448:])
    resume(ranks, 2, 0, 192, first=24)
    np.testing.assert_array_equal(rest(ranks, 2, 192, 500), fresh(2, 500)[192:])
    ranks.agree(frames.Forget([7, 8]))
    ranks.close()


# ---- what must be refused, and planted faults ----------------------------------------------------------------------


def kept_at(at: int = 320, world: int = 2) -> Ranks:
    ranks = made(world, True)
    fill(ranks, 0, 1, 0, 400, at)
    ranks.agree(frames.Free(0))
    return ranks


def refused(ranks: Ranks, words: str, *operations: frames.Operation) -> None:
    with pytest.raises(EpochError, match=words):
        ranks.run(*operations)
    ranks.close()


BIND = frames.Bind(1, 51, 0.0, 0, 0, owner=1)
MAPPED = frames.Table(1, 0, [1, 21, 23])


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ([BIND, MAPPED, frames.Resume(1, 8, 320)], "kept state 8 does not exist"),
        ([BIND, MAPPED, frames.Resume(1, 7, 256)], "kept state 7 has 320 tokens, not 256"),
        ([BIND, frames.Table(1, 0, [21, 23]), frames.Resume(1, 7, 320)], "other pages than the 1 full ones"),
        ([BIND, frames.Table(1, 0, [1]), frames.Resume(1, 7, 320)], "slot 1 is not mapped"),
        ([frames.Bind(1, 51, 0.0, 0, 0), frames.Table(1, 0, [20, 22]), frames.Resume(1, 7, 320)], "kept state 7 is rank 1's"),
        ([BIND, MAPPED, frames.Resume(1, 7, 320), frames.Resume(1, 7, 320)], "the lane|lane 1 is at 320"),
        ([frames.Forget([7]), BIND, MAPPED, frames.Resume(1, 7, 320)], "kept state 7 does not exist"),
        ([frames.Forget([7, 7])], "kept state 7 does not exist"),
        ([BIND, MAPPED, frames.Keep(1, 9, 64, [60, 61])], "kept at 64 where the lane is at 0"),
        ([BIND, MAPPED, frames.Resume(1, 7, 320), frames.Keep(1, 7, 320, [60, 61])], "kept state 7 exists already"),
        ([BIND, MAPPED, frames.Resume(1, 7, 320), frames.Keep(1, 9, 320, [60])], "1 pages for 2 residues"),
        (
            [BIND, MAPPED, frames.Resume(1, 7, 320), frames.Keep(1, 9, 320, [61, 60])],
            "page 61 belongs to rank 1, not to rank 0",
        ),
    ],
)
def test_a_round_that_does_not_fit_ends_the_epoch(operations: list[frames.Operation], words: str) -> None:
    refused(kept_at(), words, *operations)


def test_nothing_is_kept_of_a_reply() -> None:
    ranks = made(2, True)
    ranks.begin(0, ids(ranks, 1, 0, 3), owner=1)
    chunk(ranks, 0, 0, 60, True)
    ranks.decode([0], 4, IDS[:4])
    refused(ranks, "on the decode path", frames.Keep(0, 7, 64, fixed_pages(ranks, 30)))


def test_too_few_pages_for_the_fixed_part() -> None:
    ranks = made(1, False, "bf16", page_rows=64, context=256)
    ranks.begin(0, range(4))
    chunk(ranks, 0, 0, 64, False)
    refused(ranks, "1 pages a rank are too few", frames.Keep(0, 7, 64, fixed_pages(ranks, 30)[:1]))


def resumed(ranks: Ranks) -> tuple[frames.Operation, ...]:
    return BIND, MAPPED, frames.Resume(1, 7, 320)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bit_of_the_fixed_part_that_flipped_is_found(rank: int) -> None:
    ranks = kept_at()
    inventory, arena = ranks.rounds[rank].inventory, ranks.arenas[rank]
    arena.latent[inventory.states[7].store[0]].view(np.uint8).reshape(-1)[17] ^= 1
    refused(ranks, "kept state 7 of 320 tokens is not what was kept", *resumed(ranks))


def test_fault_a_state_without_its_convolution_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved without them, while the checksum covers what the lane had. (A state without index rings is whole: it ends where no
    pool is open, and `poison_between` fills the rings with NaN.)"""
    ranks = made(2, True)
    ranks.begin(0, ids(ranks, 1, 0, 3), owner=1)
    chunk(ranks, 0, 0, 320, False)
    save, layers = NumpyKernels.save_bytes, len(ranks.arenas[0].states)

    def without(self: NumpyKernels, parts: Any, plane: Any, pages: Any) -> None:
        save(self, [*parts[:layers], *(np.zeros_like(part) for part in parts[layers:])], plane, pages)

    monkeypatch.setattr(NumpyKernels, "save_bytes", without)
    ranks.agree(frames.Keep(0, 7, 320, fixed_pages(ranks, 30)))
    refused(ranks, "is not what was kept", *resumed(ranks))


def test_fault_a_checksum_that_skips_the_kda_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a damaged state passes, and the comparison of this file sees it."""
    import services.rank_worker.kept as kept

    ranks = kept_at()
    layers, checksum = len(ranks.arenas[0].states), kept._checksum
    monkeypatch.setattr(kept, "_checksum", lambda parts: checksum(parts[layers:]))
    for rounds in ranks.rounds:
        states = rounds.inventory.states
        parts = [part for part, _ in rounds.inventory._fixed(0, 0, 320)]
        rounds.arena.kernels.load_bytes(rounds.arena.latent, states[7].store, parts)
        states[7] = replace(states[7], checksum=kept._checksum(parts))
    ranks.arenas[0].latent[ranks.rounds[0].inventory.states[7].store[0], 0, 0, 0] += 1  # in the first KDA state
    ranks.agree(*resumed(ranks))
    assert not np.array_equal(rest(ranks, 1, 320, 450), fresh(2, 450)[320:])
    ranks.close()


def test_fault_a_state_of_another_kv_dtype_or_numerics() -> None:
    ranks = kept_at()
    for rounds in ranks.rounds:
        states = rounds.inventory.states
        states[7] = replace(states[7], key="0123456789abcdef f32 bf16")
    refused(ranks, "was computed with 0123456789abcdef f32 bf16", *resumed(ranks))


def test_fault_a_page_freed_too_early() -> None:
    """Another conversation writes to a page of the state: under audit the rows' hash tells."""
    ranks = kept_at()
    ranks.begin(0, ids(ranks, 1, 0, 1), owner=1)
    chunk(ranks, 0, 0, 64, False)
    ranks.agree(frames.Free(0))
    ranks.arenas[1].latent[0, 0, 5] += 1  # other tokens would have left other rows
    refused(ranks, "is not what was kept", *resumed(ranks))


def test_another_term_knows_no_lane_and_no_state() -> None:
    """A router that takes over begins with empty lanes, and gives states its own numbers."""
    ranks = kept_at()
    ranks.begin(0, ids(ranks, 0, 0, 2))
    round_ = frames.Round(2, 1, 1, [frames.Bind(0, 9, 0.0, 0, 0, owner=1), frames.Table(0, 0, ids(ranks, 1, 20, 2))])
    list(ranks.pool.map(lambda rounds: rounds.execute(round_), ranks.rounds))
    assert all(rounds.inventory.states == {} for rounds in ranks.rounds)
    ranks.close()
