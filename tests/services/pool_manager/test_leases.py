"""Texts and corner cases of leases and books that no sequence of good calls shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lease_model import CONTEXT, ROWS, WINDOW, small_plan

from services.pool_manager.books import Books, Kind
from services.pool_manager.lease import Lease, Refusal, Request, Waiting
from services.pool_manager.leases import Leases


def test_longer_than_the_context_is_refused_with_numbers() -> None:
    leases = Leases(small_plan(1, True, 9), headroom=100)
    assert leases.admit(Request(1, 0, CONTEXT, 1)) == Refusal(
        f"context too long: a prompt of {CONTEXT} tokens and max_tokens 1 make {CONTEXT + 1} tokens, and the group serves "
        f"conversations of up to {CONTEXT}: shorten it, or serve with a larger --context"
    )
    refused = leases.admit(Request(1, 0, CONTEXT + 7))
    assert isinstance(refused, Refusal)
    assert refused.reason.startswith(f"context too long: a prompt of {CONTEXT + 7} tokens make")
    assert isinstance(leases.admit(Request(1, 0, CONTEXT)), Lease)  # unstated: until the limit, which leaves one token


def test_larger_than_one_ranks_pool_is_refused_with_numbers() -> None:
    plan = replace(small_plan(2, True, 3), context=10 * CONTEXT, window_pages=10 * WINDOW)
    leases = Leases(plan, headroom=0)
    assert leases.admit(Request(1, 0, 100, 2 * ROWS)) == Refusal(
        f"larger than the pool: a prompt of 100 tokens and max_tokens {2 * ROWS} need 5 pages of {ROWS} rows, and one rank "
        "has 3: shorten it, or serve with more room"
    )
    assert isinstance(leases.admit(Request(1, 0, 2 * ROWS)), Lease)


def test_a_final_refusal_does_not_join_or_block_the_queue() -> None:
    leases = Leases(small_plan(1, True, WINDOW), headroom=0)
    assert isinstance(leases.admit(Request(1, 0, CONTEXT)), Lease)
    assert isinstance(leases.admit(Request(2, 1, 1)), Waiting)
    assert isinstance(leases.admit(Request(3, 2, CONTEXT + 1)), Refusal)
    assert [one.request.conversation for one in leases.waiting] == [2]


def test_owners_are_the_ranks_with_most_free_pages_and_ties_go_to_the_lowest() -> None:
    leases = Leases(small_plan(3, True, 9), headroom=0, borrow=False)
    owners = []
    for name, prompt in enumerate((200, 100, 100, 1)):
        lease = leases.admit(Request(name, name, prompt))
        assert isinstance(lease, Lease)
        assert {page % 3 for page in lease.pages} == {lease.owner}
        owners.append(lease.owner)
    assert owners == [0, 1, 2, 1]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Request(2, 4, 1), "lane 4: the plan has lanes 0 to 3"),
        (Request(1, 1, 1), "conversation 1 is admitted already"),
        (Request(2, 0, 1), "lane 0 belongs to conversation 1"),
        (Request(2, 1, 0), "an empty prompt"),
    ],
)
def test_a_routers_mistakes(request_: Request, text: str) -> None:
    leases = Leases(small_plan(1, True, 9), headroom=0)
    leases.admit(Request(1, 0, 1))
    with pytest.raises(ValueError, match=text):
        leases.admit(request_)


def test_books_refuse_what_was_not_asked_first() -> None:
    books = Books(4, 2)
    with pytest.raises(ValueError, match="3 ids asked of residue 1, which has 2 free"):
        books.take(1, 3)
    with pytest.raises(ValueError, match="id 0 is given back, but nobody holds it"):
        books.give_back([0], 0)
    with pytest.raises(ValueError, match="5 ids do not divide over 2 residues"):
        Books(5, 2)
    books = Books(4, 1)
    books.take_run(1, 2)
    assert not books.can_take_run(0, 2)
    with pytest.raises(ValueError, match=r"ids 0\.\.1 are not all free"):
        books.take_run(0, 2)


def test_integrity_names_what_is_wrong() -> None:
    books = Books(6, 2)
    ids = books.take(1, 2)
    assert books.check_integrity([ids]) == []
    assert books.check_integrity([]) == [f"id {page} counts 1 holders, and 0 leases have it" for page in (1, 3)]
    assert "ids [77] are not of this arena of 6 pages" in books.check_integrity([ids, [77]])
    books.give_back(ids, fence=4)
    assert books.kinds() == [Kind.FREE, Kind.FENCED, Kind.FREE, Kind.FENCED, Kind.FREE, Kind.FREE]
    books._free[1].put([1])
    assert books.check_integrity([]) == ["id 1 is in 2 free or fenced sets with 0 holders"]
    books._free[1].take(1)
    books._free[0]._count += 1
    books._fenced_of[1] -= 1
    assert books.check_integrity([]) == [
        "residue 0 counts 4 free ids, and 3 are",
        "residue 1 counts 1 ids that wait for an answer, and 2 do",
    ]
