"""Rounds of groups whose rows are split among owners: modes of chunks, borrowed pages, carries; digests of rows."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from latentpool.errors import DigestMismatchError
from latentpool.sampling import Sampling
from latentpool.v1 import rank_worker_pb2 as pb
from services.router import digests
from services.router.compose import Composer
from services.router.conversations import Book, Carry, Conversation, Phase, Times
from services.router.delivery import Mailbox, Tokens
from services.router.pace import MOST_CARRIED_ROWS, Pace

LOCAL, BORROWED, FETCH = pb.PROMPT_MODE_LOCAL, pb.PROMPT_MODE_BORROWED, pb.PROMPT_MODE_FETCH


def conversation(id_: int, tokens: int, lane: int) -> Conversation:
    return Conversation(
        id=id_, request_id="", tokens=np.arange(tokens, dtype=np.uint32), sampling=Sampling(), seed=1, stops=frozenset(),
        limit=tokens + 100, mailbox=Mailbox(asyncio.Event()), times=Times(0.0), lane=lane,
    )  # fmt: skip


def seated(book: Book, id_: int, tokens: int, lane: int, owner: int = 0, borrowed: range = range(0)) -> Conversation:
    c = book.seated[lane] = conversation(id_, tokens, lane)
    c.admit(owner, list(range(1000)), 0.0, borrowed)
    return c


def said(draft) -> list[tuple]:
    """The operations: chunks as (start, rows, mode), slices as (first slot, pages, last)."""
    out: list[tuple] = []
    for operation in draft.operations:
        kind = operation.WhichOneof("operation")
        op = getattr(operation, kind)
        if kind == "prompt":
            out.append((kind, op.start, len(op.tokens), op.mode))
        elif kind == "carry":
            out.append((kind, op.first_slot, len(op.pages), op.last))
        else:
            out.append((kind,))
    return out


# ---- modes of chunks ----------------------------------------------------------------------------------------------


def test_a_group_that_is_not_split_computes_on_its_own_rows() -> None:
    book, composer = Book(1), Composer(64, 256, 256)
    seated(book, 1, 100, 0)
    draft = composer.compose(book, [])
    assert said(draft) == [("bind",), ("table",), ("prompt", 0, 100, LOCAL)]
    assert draft.operations[0].bind.owner == 0


def test_chunks_borrow_up_to_the_end_of_the_borrowed_slots_and_fetch_from_there_on() -> None:
    book, composer = Book(1), Composer(64, 256, 128, owners=3)
    c = seated(book, 1, 500, 0, owner=2, borrowed=range(2000, 2006))  # 3 slots
    drafts = [composer.compose(book, []) for _ in range(4)]
    assert [said(draft) for draft in drafts] == [
        [("bind",), ("table",), ("borrow",), ("prompt", 0, 128, BORROWED)],
        [("prompt", 128, 64, BORROWED), ("release",)],
        [("prompt", 192, 128, FETCH)],
        [("prompt", 320, 128, FETCH)],
    ]
    assert drafts[0].operations[0].bind.owner == 2
    borrow = drafts[0].operations[2].borrow
    assert (borrow.first_slot, list(borrow.pages)) == (0, [2000, 2001, 2002, 2003, 2004, 2005])
    assert [draft.released for draft in drafts] == [[], [c], [], []]


def test_a_fill_that_ends_within_the_borrowed_slots_releases_with_its_last_chunk() -> None:
    book, composer = Book(1), Composer(64, 256, 128, owners=2)
    seated(book, 1, 140, 0, borrowed=range(1, 9))
    assert said(composer.compose(book, []))[-1] == ("prompt", 0, 128, BORROWED)
    assert said(composer.compose(book, [])) == [("prompt", 128, 12, BORROWED), ("release",)]
    assert said(composer.compose(book, [])) == [("decode",)]


def test_recalled_pages_go_before_the_next_chunk_which_fetches_even_while_the_client_does_not_read() -> None:
    book, composer = Book(1), Composer(64, 256, 128, owners=2)
    c = seated(book, 1, 400, 0, borrowed=range(1, 9))
    composer.compose(book, [])
    c.recalled = True
    while not c.mailbox.full:
        c.mailbox.put(Tokens(0, [1], 1))
    draft = composer.compose(book, [])
    assert said(draft) == [("release",)]
    assert (draft.released, c.borrowed, c.recalled) == ([c], [], False)
    assert said(composer.compose(book, [])) == []
    asyncio.run(c.mailbox.get())
    assert said(composer.compose(book, [])) == [("prompt", 128, 128, FETCH)]


# ---- carries ------------------------------------------------------------------------------------------------------


def test_a_carry_takes_all_pages_at_once_where_nobody_decodes_and_stops_what_it_carries() -> None:
    book, composer = Book(2), Composer(64, 256, 128, owners=2)
    moves, fills = seated(book, 1, 400, 0, borrowed=range(1, 9)), seated(book, 2, 400, 1)
    composer.compose(book, [])
    moves.recalled, moves.carry = True, Carry(1, list(range(5000, 5007)))
    assert said(composer.compose(book, [])) == [("release",), ("carry", 0, 7, True), ("prompt", 0, 128, FETCH)]
    assert said(composer.compose(book, [])) == [("prompt", 128, 128, FETCH)]  # all is sent, and not answered
    moves.arrive()
    assert (moves.owner, moves.pages, moves.tabled) == (1, list(range(5000, 5007)), 7)
    chunk = composer.compose(book, []).operations[0].prompt
    assert (chunk.lane, chunk.start, fills.sent) == (0, 128, 256)


def test_one_that_decodes_stands_still_while_it_is_carried() -> None:
    book, composer = Book(2), Composer(64, 256, 128, owners=2)
    moves, stays = seated(book, 1, 300, 0), seated(book, 2, 64, 1)
    while stays.sent < 64:
        composer.compose(book, [])
    composer.pace.learn(0, True, 0.05)
    composer.pace.learn(0, False, 0.099, carried=128)  # 0.78 ms a row: 128 rows in the 100 ms that decoding leaves
    moves.carry = Carry(1, list(range(5000, 5007)))
    drafts = [composer.compose(book, []) for _ in range(4)]
    assert [said(draft) for draft in drafts] == [
        [("carry", 0, 2, False), ("decode",)],
        [("carry", 2, 2, False), ("decode",)],
        [("carry", 4, 3, True), ("decode",)],  # one page has rows
        [("decode",)],
    ]
    assert [draft.carried_rows for draft in drafts] == [128, 128, 44, 0]
    assert all(list(draft.operations[-1].decode.lanes) == [1] for draft in drafts)
    pages = [page for draft in drafts for operation in draft.operations for page in operation.carry.pages]
    assert pages == list(range(5000, 5007))
    assert stays.sent == 68
    moves.arrive()
    assert list(composer.compose(book, []).operations[-1].decode.lanes) == [0, 1]


def test_a_carry_goes_on_by_a_page_however_slow_it_is_and_several_share_a_round() -> None:
    book, composer = Book(3), Composer(64, 256, 128, owners=2)
    first, second, third = (seated(book, i, tokens, i) for i, tokens in enumerate((128, 64, 64)))
    while third.sent < 64:
        composer.compose(book, [])
    composer.pace.learn(0, False, 64.0, carried=64)
    first.carry, second.carry = Carry(1, [5000, 5001]), Carry(1, [6000])
    kinds = [[one for one in said(composer.compose(book, [])) if one[0] == "carry"] for _ in range(4)]
    assert kinds == [[("carry", 0, 1, False)], [("carry", 1, 1, True)], [("carry", 0, 1, True)], []]


def test_a_carry_in_slices_is_bounded_where_nobody_decodes() -> None:
    book, composer = Book(1), Composer(64, 256, 128, owners=2)
    most = MOST_CARRIED_ROWS // 64
    c = seated(book, 1, MOST_CARRIED_ROWS + 100, 0)
    while c.phase is Phase.FILLING:
        composer.compose(book, [])
    c.carry = Carry(1, list(range(5000, 5000 + most + 3)))
    assert said(composer.compose(book, [])) == [("carry", 0, most, False)]
    assert said(composer.compose(book, [])) == [("carry", most, 3, True)]


def test_pages_without_rows_cost_nothing() -> None:
    book, composer = Book(2), Composer(64, 256, 128, owners=2)
    empty, full = seated(book, 1, 600, 0), seated(book, 2, 64, 1)
    full.sent = 64
    composer.pace.chunk_rows = 0  # nobody computes
    composer.compose(book, [])
    composer.pace.learn(0, False, 64.0, carried=64)
    empty.carry, full.carry = Carry(1, list(range(5000, 5010))), Carry(1, [6000, 6001])
    draft = composer.compose(book, [])
    assert said(draft) == [("carry", 0, 10, True), ("carry", 0, 2, True)]
    assert draft.carried_rows == 64


def test_carried_rows_and_prompt_rows_share_the_gap() -> None:
    pace = Pace(2048)
    assert pace.carried_rows(others_decode=True) == 2048  # nothing is known yet
    pace.learn(0, True, 0.05)
    pace.learn(32, False, 2.048)  # 1 ms a row
    pace.learn(0, True, 0.15, carried=1024)  # 100 ms beside decoding
    assert pace.carried_rows(others_decode=True) == 1024
    assert pace.carried_rows(others_decode=False) == MOST_CARRIED_ROWS
    pace.learn(0, True, 0.07, carried=1024)
    assert 1024 < pace.carried_rows(others_decode=True) < 1200  # faster: little by little
    pace = Pace(2048)
    pace.learn(32, False, 2.048)
    pace.learn(0, False, 0.05, carried=1024)
    assert pace.rows(others_decode=True, carried=0) == 128
    assert pace.rows(others_decode=True, carried=1024) == 64  # 100 ms are left
    pace.learn(1, False, 0.064 + 0.05, carried=1024)  # as both are known to cost
    assert pace.carried_rows(others_decode=True) == pytest.approx(3072, abs=1)
    assert pace.rows(others_decode=True) == 128


# ---- digests of rows ------------------------------------------------------------------------------------------------


def results(rows: list[int], computed: list[int] | None = None) -> list[pb.RoundResult]:
    computed = computed or [5] * len(rows)
    return [
        pb.RoundResult(seq=7, results=[pb.OperationResult(digest=d, rows_digest=r)])
        for d, r in zip(computed, rows, strict=True)
    ]


def test_digests_of_rows_are_equal_among_the_ranks_that_give_one() -> None:
    round_ = pb.Round(seq=7, operations=[pb.Operation(carry=pb.Carry())])
    for rows in ([0, 0, 0], [8, 0, 8], [0, 2**64 - 1, 0]):
        digests.compare(round_, results(rows))
    for rows, words in (
        ([8, 0, 9], "rank 2 holds other rows than rank 0"),
        ([8, 7, 8, 0], "rank 1 holds other rows than ranks 0, 2"),
        ([8, 7, 6, 8], "ranks 1, 2 hold other rows than ranks 0, 3"),
    ):
        with pytest.raises(DigestMismatchError) as raised:
            digests.compare(round_, results(rows))
        assert str(raised.value) == f"round 7, operation 1 (carry): {words}"
    with pytest.raises(DigestMismatchError, match="rank 1 computed other bits than rank 0"):
        digests.compare(round_, results([0, 0], [5, 6]))
