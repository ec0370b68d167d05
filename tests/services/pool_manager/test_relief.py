"""Loans, recalls and carries: the rules one by one, each with the smallest pool that shows it."""

from __future__ import annotations

import pytest
from lease_model import CONTEXT, ROWS, WINDOW, small_plan

from latentpool.v1 import pool_admin_pb2 as pb
from services.pool_manager.lease import Extension, Grant, Lease, Move, Orders, Request, Waiting
from services.pool_manager.leases import Leases
from services.pool_manager.pictures import page_runs
from services.pool_manager.relief import CarryError, carry_by_hand

FULL = CONTEXT + 1


def admitted(leases: Leases, name: int, prompt: int, most: int = 0) -> Lease:
    lease = leases.admit(Request(name, name - 1, prompt, most))
    assert isinstance(lease, Lease)
    return lease


def owners(count: int, pages: int, borrow: bool = False) -> Leases:
    return Leases(small_plan(count, True, pages, lanes=8), headroom=0, borrow=borrow)


# ---- loans -------------------------------------------------------------------------------------------------------


def test_a_prompt_borrows_slot_by_slot_what_every_other_rank_can_give() -> None:
    leases = owners(3, 9, borrow=True)
    first = admitted(leases, 1, prompt=3 * ROWS)
    assert (first.owner, first.pages) == (0, [0, 3, 6, 9])
    assert first.borrowed == [1, 2, 4, 5, 7, 8]
    second = admitted(leases, 2, prompt=3 * ROWS - 1)  # rank 1 has 6 left, as has rank 2; rank 0 has 5
    assert (second.owner, second.pages) == (1, [10, 13, 16, 19])
    assert second.borrowed == [12, 11, 15, 14, 18, 17]
    third = admitted(leases, 3, prompt=2 * ROWS)  # rank 1 has 2 left: rank 2 has 3 and owns it
    assert (third.owner, third.borrowed) == (2, [21, 22, 24, 25])


def test_a_loan_covers_fewer_slots_where_one_rank_has_no_more() -> None:
    leases = owners(3, WINDOW, borrow=True)
    admitted(leases, 1, prompt=2 * ROWS)  # 3 of rank 0, 2 of each other
    leases.released(1, 0)
    second = admitted(leases, 2, prompt=4 * ROWS)
    assert (second.owner, second.borrowed) == (1, [9, 2, 12, 5])  # rank 0 has 2 left


def test_nothing_is_lent_while_somebody_waits_or_where_it_is_switched_off() -> None:
    leases = owners(2, WINDOW, borrow=True)
    admitted(leases, 1, prompt=CONTEXT)
    leases.released(1, 0)
    assert isinstance(leases.admit(Request(2, 1, CONTEXT, 0, background=True)), Lease)
    leases.released(2, 0)
    assert isinstance(leases.admit(Request(3, 2, CONTEXT, 0, background=True)), Waiting)
    leases.finish(1, 0)
    leases.finish(2, 0)
    assert admitted(leases, 4, prompt=ROWS).borrowed == []  # foreground, while 3 waits
    assert admitted(owners(2, WINDOW), 1, prompt=CONTEXT).borrowed == []
    assert admitted(Leases(small_plan(1, True, 9), 0), 1, prompt=CONTEXT).borrowed == []


def test_what_is_owed_is_not_lent() -> None:
    leases = owners(2, WINDOW + 1, borrow=True)
    admitted(leases, 1, prompt=2 * ROWS)
    leases.released(1, 0)
    admitted(leases, 2, prompt=ROWS)
    leases.released(2, 0)
    leases.finish(2, fence=7)
    assert leases.extend([(1, FULL)]).grants == [Grant(1, 3, [6, 8])]
    leases.owed[1] = 1  # as if a page were missing still
    assert admitted(leases, 3, prompt=2 * ROWS).borrowed == []


def test_loans_end_once_and_a_stray_release_does_nothing() -> None:
    leases = owners(2, 9, borrow=True)
    admitted(leases, 1, prompt=2 * ROWS)
    assert leases.books.free(1) == 7
    assert (leases.released(1, fence=4), leases.released(1, fence=4), leases.released(9, 4)) == (2, 0, 0)
    assert leases.books.fenced(1) == 2
    leases.answered(4)
    assert leases.books.free(1) == 9
    leases.finish(1, fence=4)
    assert leases.released(1, fence=5) == 0


def test_one_that_would_fit_with_what_is_lent_recalls_the_youngest_borrower() -> None:
    leases = owners(2, WINDOW + 4, borrow=True)
    admitted(leases, 1, prompt=2 * ROWS)  # owner 0: 3 pages, borrows 2 of rank 1
    admitted(leases, 2, prompt=3 * ROWS)  # owner 1: 4 pages, borrows 3 of rank 0
    assert [leases.books.free(rank) for rank in (0, 1)] == [3, 3]
    assert isinstance(leases.admit(Request(3, 2, CONTEXT, 0)), Waiting)  # needs a window: 5
    assert leases.take_orders() == Orders(recall=[2])
    assert isinstance(leases.admit(Request(4, 3, CONTEXT, 0)), Waiting)  # one at a time
    assert list(leases.admit_waiting()) == []
    assert leases.take_orders() == Orders()
    leases.released(2, fence=3)
    assert list(leases.admit_waiting()) == []
    leases.answered(3)
    assert [lease.request.conversation for lease in leases.admit_waiting()] == [3]
    assert leases.take_orders() == Orders(recall=[1])  # 3 free and 2 lent: for 4


def test_nobody_recalls_what_would_not_help() -> None:
    leases = owners(2, WINDOW, borrow=True)
    admitted(leases, 1, prompt=ROWS)  # 2 pages, and 1 of rank 1
    admitted(leases, 2, prompt=2 * ROWS)  # 3 pages of rank 1 or 0, and 2 of the other
    assert isinstance(leases.admit(Request(3, 2, CONTEXT, 0)), Waiting)
    assert leases.take_orders() == Orders()


# ---- an owner that runs dry ------------------------------------------------------------------------------------------


def test_a_dry_owner_recalls_first_and_grants_when_the_loan_is_back() -> None:
    leases = owners(2, WINDOW + 1, borrow=True)
    admitted(leases, 1, prompt=ROWS)
    leases.released(1, 0)
    admitted(leases, 2, prompt=4 * ROWS)  # borrows all 4 that rank 0 has left
    assert leases.extend([(1, 3 * ROWS)]) == Extension([Grant(1, 2, [])], park=[])
    assert leases.take_orders() == Orders(recall=[2])
    assert leases.extend([(1, 3 * ROWS)]) == Extension([Grant(1, 2, [])], park=[])
    assert leases.take_orders() == Orders()
    leases.released(2, fence=2)
    leases.answered(2)
    assert leases.extend([(1, 3 * ROWS)]).grants == [Grant(1, 2, [4])]


def crowd(pages: int, *prompts: int) -> Leases:
    """Conversations 1, 2, ... on two owners of so many pages each."""
    leases = owners(2, pages)
    for at, prompt in enumerate(prompts):
        admitted(leases, at + 1, prompt)
    return leases


def test_the_youngest_moves_where_there_is_room_and_the_others_go_on() -> None:
    leases = crowd(7, 2 * ROWS, ROWS, 2 * ROWS)
    assert [lease.owner for lease in leases.running.values()] == [0, 1, 1]
    assert leases.extend([(2, FULL)]) == Extension([Grant(2, 2, [11, 13])], park=[])
    assert leases.take_orders() == Orders(carry=[Move(3, 0, [6, 8, 10, 12])])
    assert leases.extend([(3, FULL), (2, FULL)]).grants == [Grant(3, 3, []), Grant(2, 4, [])]  # 3 is on its way
    assert leases.take_orders() == Orders()
    assert leases.carried(3, fence=5) == Move(3, 0, [6, 8, 10, 12])
    assert leases.carried(3, fence=5) is None
    assert leases.extend([(2, FULL)]).grants == [Grant(2, 4, [])]
    leases.answered(5)
    assert leases.extend([(2, FULL), (3, 4 * ROWS)]).grants == [Grant(2, 4, [5]), Grant(3, 4, [])]
    assert (leases.running[3].owner, leases.running[3].pages) == (0, [6, 8, 10, 12])


def test_one_that_is_owed_pages_finds_them_where_it_goes() -> None:
    leases = crowd(8, 3 * ROWS, ROWS, 2 * ROWS, ROWS)
    assert [lease.owner for lease in leases.running.values()] == [0, 1, 1, 0]
    leases.finish(1, fence=0)
    assert leases.extend([(2, FULL)]).park == []
    assert leases.take_orders() == Orders()
    assert leases.extend([(3, FULL)]) == Extension([Grant(3, 3, [])], park=[])
    assert leases.take_orders() == Orders(carry=[Move(3, 0, [0, 2, 4, 6, 12])])
    assert leases.owed == {}


def test_it_goes_to_the_roomiest_rank_the_lowest_of_equals() -> None:
    leases = owners(4, 9)
    admitted(leases, 1, prompt=ROWS)
    assert carry_by_hand(leases, 1, None).owner == 1
    leases.carried(1, fence=5)  # its old pages are not free yet
    assert carry_by_hand(leases, 1, None).owner == 2
    leases.carried(1, fence=5)
    leases.answered(5)
    assert carry_by_hand(leases, 1, None).owner == 0


def test_one_on_its_way_gets_nothing_though_pages_are_free() -> None:
    leases = crowd(9, 2 * ROWS, ROWS)
    carry_by_hand(leases, 2, 0)
    assert leases.books.free(1) > 0
    assert leases.extend([(2, FULL)]) == Extension([Grant(2, 2, [])], park=[])
    assert leases.owed == {}


def test_without_room_for_the_slack_it_parks() -> None:
    leases = crowd(6, 2 * ROWS, ROWS, 2 * ROWS)
    assert leases.extend([(2, 4 * ROWS)]) == Extension([Grant(2, 2, [11])], park=[3])
    assert leases.take_orders() == Orders()


def test_a_carry_recalls_what_is_borrowed_and_counts_as_coming() -> None:
    leases = owners(2, 8, borrow=True)
    admitted(leases, 1, prompt=2 * ROWS)
    move = carry_by_hand(leases, 1, None)
    assert leases.take_orders() == Orders(recall=[1], carry=[move])
    assert (leases.coming(0), leases.coming(1)) == (3, 2)
    leases.carried(1, fence=3)  # an arrival ends the loan, whether or not its release came before
    assert leases.released(1, fence=9) == 0
    assert (leases.books.fenced(0), leases.books.fenced(1)) == (3, 2)
    assert leases.check_integrity() == []


def test_an_end_on_the_way_gives_back_all_three() -> None:
    leases = owners(2, 9, borrow=True)
    admitted(leases, 1, prompt=2 * ROWS)
    carry_by_hand(leases, 1, 1)
    assert leases.finish(1, fence=2) == 3 + 2 + 4
    leases.answered(2)
    assert [leases.books.free(rank) for rank in (0, 1)] == [9, 9]
    assert leases.carried(1, fence=3) is None


def test_a_rank_that_ran_dry_during_a_carry_is_relieved_by_the_arrival() -> None:
    leases = crowd(7, ROWS, 2 * ROWS)
    carry_by_hand(leases, 2, 0)
    assert leases.extend([(1, FULL)]) == Extension([Grant(1, 2, [12])], park=[])  # nobody else stays here
    leases.take_orders()
    leases.carried(2, fence=4)
    assert leases.take_orders() == Orders(park=[2])
    assert leases.check_integrity() == []
    leases = crowd(7, ROWS, 2 * ROWS)
    carry_by_hand(leases, 2, 0)
    leases.extend([(1, FULL)])
    leases.take_orders()
    leases.carried(2, fence=0)  # its old pages are free at once: it goes back, a page longer
    assert leases.take_orders() == Orders(carry=[Move(2, 1, [1, 3, 5, 7, 9])])


# ---- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conversation", "owner", "what", "text"),
    [
        (9, None, "conversation", "no conversation 9: `latentpool conversations` lists those that run"),
        (1, 2, "rank", "rank 2: this group has ranks 0 to 1"),
        (1, 0, "state", "conversation 1 is on rank 0 already"),
        (1, 1, "state", "rank 1 lacks pages: conversation 1 has 3 and needs 4 there with room to go on, and 2 are free"),
        (2, 0, "state", "conversation 2 is being parked: it gives back its 2 pages"),
        (3, 0, "state", "conversation 3 is being carried to rank 0 already"),
        (4, None, "state", "conversation 4 waits for pages: it has no rows to carry yet"),
    ],
)
def test_carries_by_hand_that_are_refused(conversation: int, owner: int | None, what: str, text: str) -> None:
    leases = crowd(7, 2 * ROWS, ROWS, 2 * ROWS)
    carry_by_hand(leases, 3, 0)
    assert isinstance(leases.admit(Request(4, 3, CONTEXT, 0)), Waiting)
    leases.parking.add(2)
    before = leases.take_orders(), [leases.books.free(rank) for rank in (0, 1)]
    with pytest.raises(CarryError) as refused:
        carry_by_hand(leases, conversation, owner)
    assert refused.value.what == what
    assert str(refused.value).startswith(text)
    assert len(before[0].carry) == 1
    assert (leases.take_orders(), [leases.books.free(rank) for rank in (0, 1)]) == (Orders(), before[1])
    leases.parking.clear()


def test_nothing_is_carried_where_nothing_is_split() -> None:
    leases = Leases(small_plan(1, True, 9), headroom=0)
    leases.admit(Request(1, 0, 1))
    with pytest.raises(CarryError, match="this group is not split: every rank keeps every row") as refused:
        carry_by_hand(leases, 1, None)
    assert refused.value.what == "state"


# ---- proof and picture -------------------------------------------------------------------------------------------------


def test_integrity_names_loans_and_moves_that_are_wrong() -> None:
    leases = owners(2, 9, borrow=True)
    lease = admitted(leases, 1, prompt=2 * ROWS)
    carry_by_hand(leases, 1, 1)
    assert leases.check_integrity() == []
    borrowed, move = lease.borrowed, lease.move
    assert move is not None
    lease.borrowed = [borrowed[0], 16]
    (text,) = [one for one in leases.check_integrity() if one.startswith("conversation")]
    assert text == "conversation 1 borrows pages that are not slots of all ranks but 0: [1, 16]"
    lease.borrowed = [borrowed[0], lease.pages[0]]
    assert "id 0 is leased 2 times" in leases.check_integrity()
    lease.borrowed, lease.move = borrowed, Move(1, 1, [*move.pages[:-1], 16])
    assert "conversation 1 moves from rank 0 to pages that rank 1 does not own" in leases.check_integrity()
    lease.move = Move(1, 1, move.pages[:2])
    assert f"conversation 1 moves 3 pages to 2: a window has {WINDOW}" in leases.check_integrity()
    lease.move = move
    leases.parking.add(1)
    assert leases.check_integrity() == ["conversation 1 parks, but does not run"]


def test_the_picture_shows_the_borrower_and_both_sides_of_a_carry() -> None:
    leases = owners(2, 9, borrow=True)
    admitted(leases, 1, prompt=2 * ROWS)
    carry_by_hand(leases, 1, 1)
    assert [(run.first, run.count, run.stride, run.kind, run.owner, run.conversation) for run in page_runs(leases)] == [
        (0, 3, 2, pb.PAGE_KIND_LIVE, 0, 1),
        (6, 6, 2, pb.PAGE_KIND_FREE, 0, 0),
        (1, 2, 2, pb.PAGE_KIND_BORROWED, 1, 1),
        (5, 4, 2, pb.PAGE_KIND_LIVE, 1, 1),
        (13, 3, 2, pb.PAGE_KIND_FREE, 1, 0),
    ]
