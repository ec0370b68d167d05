"""Parking, return and the queue of classes: the rules one by one, each with the smallest pool that shows it."""

from __future__ import annotations

import pytest
from lease_model import CONTEXT, ROWS, WINDOW, small_plan

from services.pool_manager.lease import Extension, Grant, Lease, Request, Waiting
from services.pool_manager.leases import Leases

FULL = CONTEXT + 1
"""Rows that need a whole window."""


def leases_of(pages: int, *running: int, residues: int = 1, headroom: int = 0) -> Leases:
    """`pages` an owner, none of them lent; conversations 1, 2, ... that run with so many pages each (two at least: one and
    the slack)."""
    leases = Leases(small_plan(residues, True, pages), headroom, borrow=False)
    for at, count in enumerate(running):
        assert isinstance(leases.admit(Request(at + 1, at, ROWS * (count - 1))), Lease)
    return leases


def names(leases: Leases) -> list[int]:
    return [one.request.conversation for one in leases.waiting]


def test_the_youngest_makes_room_even_if_it_asked_itself() -> None:
    leases = leases_of(6, 2, 2, 2)
    assert leases.extend([(2, 3 * ROWS), (3, 3 * ROWS)]) == Extension([Grant(2, 2, []), Grant(3, 2, [])], park=[3])
    assert leases.finish(3, fence=4) == 2
    assert leases.extend([(2, 3 * ROWS)]).park == []
    leases.answered(4)
    assert leases.extend([(2, 3 * ROWS)]) == Extension([Grant(2, 2, [4])], park=[])
    assert leases.owed == {}


def test_as_many_as_it_takes_and_the_youngest_first() -> None:
    leases = leases_of(8, 2, 2, 2, 2)
    assert leases.extend([(1, FULL)]).park == [4, 3]
    assert leases.parking == {3, 4}


def test_nobody_parks_for_what_free_fenced_or_parking_pages_cover() -> None:
    leases = leases_of(8, 2, 2, 2)
    leases.finish(3, fence=9)
    assert leases.extend([(1, FULL)]) == Extension([Grant(1, 2, [6, 7])], park=[])  # the third of three is fenced
    assert leases.extend([(2, 3 * ROWS)]).park == []  # the other fenced page
    assert leases.extend([(2, 4 * ROWS)]).park == [2]  # one too many
    assert leases.extend([(1, FULL), (2, FULL)]) == Extension([Grant(1, 4, []), Grant(2, 2, [])], park=[])


def test_one_told_to_park_gets_nothing_and_is_told_once() -> None:
    leases = leases_of(6, 2, 2, 2)
    assert leases.extend([(1, 3 * ROWS)]).park == [3]
    leases.finish(2, fence=0)
    assert leases.extend([(3, 3 * ROWS)]) == Extension([Grant(3, 2, [])], park=[])


def test_one_alone_in_its_residue_never_parks() -> None:
    leases = leases_of(WINDOW, 2, 2, 2, residues=3)
    assert leases.extend([(1, 9 * FULL), (2, FULL), (3, FULL)]).park == []
    assert {len(lease.pages) for lease in leases.running.values()} == {WINDOW}
    leases = leases_of(WINDOW, 2, 2)
    leases.finish(2, fence=7)
    assert leases.extend([(1, FULL)]).park == []  # what it lacks is fenced


def test_the_old_get_what_is_free_before_the_young() -> None:
    leases = leases_of(7, 2, 2, 2)
    grants = leases.extend([(3, 3 * ROWS), (2, 3 * ROWS)]).grants
    assert grants == [Grant(3, 2, []), Grant(2, 2, [6])]


def test_pages_that_are_owed_are_not_for_those_who_wait() -> None:
    leases = leases_of(6, 2, 2, 2)
    assert leases.extend([(1, 4 * ROWS)]).park == [3]
    assert isinstance(leases.admit(Request(4, 3, ROWS)), Waiting)
    leases.finish(3, fence=1)
    leases.answered(1)
    assert list(leases.admit_waiting()) == []
    assert leases.extend([(1, 4 * ROWS)]).grants == [Grant(1, 2, [4, 5])]
    leases.finish(1, fence=1)
    assert [lease.request.conversation for lease in leases.admit_waiting()] == [4]


def test_a_need_that_shrinks_is_owed_no_more() -> None:
    leases = leases_of(6, 2, 2, 2)
    leases.extend([(1, 4 * ROWS)])
    assert leases.owed == {1: 2}
    leases.extend([(1, 2 * ROWS)])
    assert leases.owed == {}


def test_a_parked_one_returns_with_all_its_tokens_and_headroom() -> None:
    leases = leases_of(8, 4, headroom=ROWS)
    back = Request(2, 1, 2 * ROWS, 3 * ROWS // 2, returning=True)  # two pages of tokens, one of headroom, the slack
    assert leases.quota(back) == 4
    leases.extend([(1, FULL)])
    assert isinstance(leases.admit(back), Waiting)
    leases.finish(1, fence=0)
    (lease,) = leases.admit_waiting()
    assert len(lease.pages) == 4
    assert leases.quota(Request(2, 1, 2 * ROWS, 7, returning=True)) == 4
    assert leases.quota(Request(2, 1, 2 * ROWS, 0, returning=True)) == 3
    assert leases.quota(Request(2, 1, CONTEXT, None, returning=True)) == WINDOW


def test_the_queue_is_by_class_then_those_that_return_by_age_then_arrival() -> None:
    plan = small_plan(1, True, WINDOW, lanes=9)
    leases = Leases(plan, headroom=0)
    assert isinstance(leases.admit(Request(1, 0, CONTEXT)), Lease)
    waiters = [
        (9, True, False),
        (8, False, False),
        (5, True, True),
        (10, False, False),
        (4, False, True),
        (3, True, True),
        (2, False, True),
    ]
    for lane, (name, background, returning) in enumerate(waiters, start=1):
        assert isinstance(leases.admit(Request(name, lane, ROWS, 0, "", background, returning)), Waiting)
    assert names(leases) == [2, 4, 8, 10, 3, 5, 9]
    assert leases.check_integrity() == []
    leases.waiting.reverse()
    assert leases.check_integrity() == ["the queue is out of order: [9, 5, 3, 10, 8, 4, 2]"]


def test_foreground_passes_waiting_background_but_nobody_passes_its_class() -> None:
    leases = leases_of(6, 4)
    assert isinstance(leases.admit(Request(2, 1, 2 * ROWS, 0, background=True)), Waiting)
    assert leases.admit(Request(3, 2, ROWS, 0, background=True)) == Waiting(
        Request(3, 2, ROWS, 0, background=True), 1, leases.waiting[1].reason, leases.waiting[1].since
    )
    leases.finish(3, fence=0)
    assert isinstance(leases.admit(Request(4, 2, ROWS, 0)), Lease)
    assert names(leases) == [2]


def test_background_does_not_pass_waiting_foreground() -> None:
    leases = leases_of(6, 4)
    assert isinstance(leases.admit(Request(2, 1, 2 * ROWS, 0)), Waiting)
    assert isinstance(leases.admit(Request(3, 2, ROWS, 0, background=True)), Waiting)
    assert names(leases) == [2, 3]


def test_integrity_names_parking_and_owed_strangers() -> None:
    leases = leases_of(9, 2)
    leases.parking.add(7)
    leases.owed[8] = 1
    assert leases.check_integrity() == [
        "conversation 7 parks, but does not run",
        "conversation 8 is owed pages, but does not run",
    ]
    leases = leases_of(5, 2, 2)
    leases.owed[1] = 3
    assert leases.check_integrity() == ["rank 0 owes 2 pages more than come free, and nobody parks"]
    leases.parking, leases.owed = set(), {1: WINDOW}
    (violation,) = leases.check_integrity()
    assert violation == f"conversation 1 has 2 pages and is owed {WINDOW}: its quota is 2, a window {WINDOW}"


@pytest.mark.parametrize("late", [1, 2, 3])
def test_a_fence_holds_however_many_rounds_are_in_flight(late: int) -> None:
    """The round that frees the lane is `late` ahead of the last answered one; another conversation's fence is between."""
    leases = leases_of(6, 2, 2, 2)
    leases.finish(3, fence=10 + late)
    leases.finish(2, fence=10 + late - 1)
    for seq in range(10, 10 + late):
        leases.answered(seq)
        assert leases.books.free(0) == (2 if seq == 10 + late - 1 else 0)
    leases.answered(10 + late)
    assert leases.books.free(0) == 4
