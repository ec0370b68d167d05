"""What a split group refuses of a round, and planted faults that only hashes of rows can show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Ranks
from test_split import PAGE, PROMPT, lend, made, pages_of

from latentpool.errors import EpochError
from services.rank_worker import frames
from services.rank_worker.split.fetch import FetchedRows
from services.rank_worker.split.owner import OwnerRows

# ---- what must be refused --------------------------------------------------------------------------------------------


def refused(ranks: Ranks, words: str, *operations: frames.Operation) -> None:
    with pytest.raises(EpochError, match=words):
        ranks.run(*operations)
    ranks.close()


def filled(owner: int = 1, borrowed: int = 0, world: int = 2) -> Ranks:
    ranks = made(world)
    ranks.begin(0, pages_of(ranks, owner, 0), owner=owner)
    if borrowed:
        lend(ranks, 0, owner, 20, borrowed)
    return ranks


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ([frames.Prompt(0, 0, PROMPT[:64], False)], "mode 1 in a split group"),
        ([frames.Prompt(0, 0, PROMPT[:192], False, mode=frames.BORROWED)], "up to row 192, with borrowed pages up to row 128"),
        ([frames.Prompt(0, 0, PROMPT[:64], False, mode=frames.FETCH)], "while it borrows"),
        ([frames.Prompt(0, 0, PROMPT[:9], True, mode=frames.BORROWED), frames.Decode([0], 1, [])], "decodes while it borrows"),
        ([frames.Release(0), frames.Release(0)], "borrows nothing"),
        ([frames.Borrow(0, 3, [60])], "not the next to borrow for"),
        ([frames.Borrow(0, 2, [61])], "page 61 belongs to rank 1, not to rank 0"),
        ([frames.Table(0, 8, [18])], "page 18 belongs to rank 0, not to rank 1"),
        ([frames.Carry(0, 0, 0, [60], False)], "while it borrows"),
        ([frames.Release(0), frames.Carry(0, 1, 0, [61], False)], "keeps its rows already"),
        ([frames.Release(0), frames.Carry(0, 0, 1, [60], False)], "a slice from slot 1 to rank 0, after 0 slots"),
        ([frames.Release(0), frames.Carry(0, 0, 0, [61], False)], "page 61 belongs to rank 1, not to rank 0"),
        (
            [
                frames.Prompt(0, 0, PROMPT[:128], False, mode=frames.BORROWED),
                frames.Release(0),
                frames.Carry(0, 0, 0, [60], True),
            ],
            "its carry ends at row 64 of 128",
        ),
        ([frames.Release(0), frames.Carry(0, 0, 0, [60], False), frames.Decode([0], 1, [])], "is being carried to rank 0"),
        ([frames.Bind(1, 7, 0.0, 0, 0, owner=2)], "its owner is rank 2, and owners are ranks 0 to 1"),
    ],
)
def test_a_round_that_does_not_fit_ends_the_epoch(operations: list[frames.Operation], words: str) -> None:
    refused(filled(borrowed=2), words, *operations)


def test_a_replicated_group_has_no_owners() -> None:
    ranks = made(2, split=False)
    ranks.begin(0, range(8))
    refused(ranks, "mode 3 in a group that is not split", frames.Prompt(0, 0, PROMPT[:64], False, mode=frames.FETCH))
    ranks = made(2, split=False)
    ranks.begin(0, range(8))
    refused(ranks, "nothing is carried", frames.Carry(0, 1, 0, [9], True))


# ---- planted faults: each is shown at run time, by name ---------------------------------------------------------------


def different(results: list[frames.RoundResult], operation: int) -> bool:
    """Whether the router would see that ranks hold other rows than one another."""
    return len({result.results[operation].rows_digest for result in results} - {0}) > 1


def test_fault_a_wrong_owner_for_one_page() -> None:
    """One rank takes a page of the lane for another's: its owner has no page to write to, and says so."""
    ranks = filled()
    ranks.arenas[1].latent_tables[0, 2] = ranks.arenas[1].latent_discard
    refused(ranks, "row 128 has no page on its owner, rank 1", frames.Prompt(0, 0, PROMPT[:192], False, mode=frames.FETCH))


def test_fault_a_stale_row_in_a_borrowed_copy() -> None:
    """The digests of what is computed stay equal, since sums are shared: the hashes of rows tell."""
    ranks = filled(borrowed=6)
    ranks.agree(frames.Prompt(0, 0, PROMPT[:256], False, mode=frames.BORROWED))
    arena = ranks.arenas[0]
    arena.latent[arena.latent_tables[0, 3], 0, 17] += 1
    results = ranks.run(frames.Prompt(0, 256, PROMPT[256:], True, mode=frames.BORROWED))
    assert different(results, 0)
    assert len({result.results[0].digest for result in results}) == 1
    ranks.close()


def test_fault_a_renumbering_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    renumber = FetchedRows._renumber

    def off(self: FetchedRows, lists: Any, union: Any) -> Any:
        right = renumber(self, lists, union)
        return np.where(right > self._staging.first, right - 1, right) if self._link.rank == 0 else right

    ranks = filled()
    ranks.agree(frames.Prompt(0, 0, PROMPT[:256], False, mode=frames.FETCH))
    monkeypatch.setattr(FetchedRows, "_renumber", off)
    assert different(ranks.run(frames.Prompt(0, 256, PROMPT[256:], True, mode=frames.FETCH)), 0)
    ranks.close()


def test_fault_a_carry_that_misses_its_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = filled()
    ranks.prompt(0, PROMPT)
    imported = ranks.kernels[0].import_rows

    def dropped(rows: Any, view: Any, pages: Any, offsets: Any) -> None:
        some = pages != pages[-1]
        imported(rows[some], view, pages[some], offsets[some])

    monkeypatch.setattr(ranks.kernels[0], "import_rows", dropped)
    results = ranks.run(frames.Carry(0, 0, 0, pages_of(ranks, 0, 20), True))
    assert different(results, 0)
    ranks.close()


def test_fault_queries_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of this file sees it: an owner that attends for the wrong row gives other logits."""
    take = OwnerRows._take_queries

    def shifted(self: OwnerRows, q: Any, routes: Any) -> None:
        take(self, q, routes)
        if self._link.rank == 1:
            self._q[: len(routes.mine)] = np.roll(self._q[: len(routes.mine)], 1, axis=0)

    split, whole = made(2), made(2, split=False)
    for lane in range(2):
        split.begin(lane, pages_of(split, 1, 8 * lane), owner=1)
        whole.begin(lane, range(8 * lane, 8 * lane + 8))
        for ranks in (split, whole):
            ranks.prompt(lane, PROMPT[lane : 100 + lane])
    np.testing.assert_array_equal(split.decode([0, 1])[0], whole.decode([0, 1])[0])
    monkeypatch.setattr(OwnerRows, "_take_queries", shifted)
    assert not np.array_equal(split.decode([0, 1])[0], whole.decode([0, 1])[0])
    split.close()
    whole.close()


@pytest.mark.parametrize("row", [0, 64, 329])
def test_the_hash_of_a_carry_changes_with_every_row(row: int) -> None:
    hashes = []
    for fault in (0, 1):
        ranks = filled()
        ranks.prompt(0, PROMPT)
        arena = ranks.arenas[1]
        arena.latent[arena.latent_tables[0, row // PAGE], -1, row % PAGE, 0] += fault
        results = ranks.agree(frames.Carry(0, 0, 0, pages_of(ranks, 0, 20), True))
        hashes.append(results[0].results[0].rows_digest)
        ranks.close()
    assert hashes[0] != hashes[1]
