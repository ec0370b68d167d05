"""Digests of blocks, places where states are kept, and the loop by itself with a manager's answers about them."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from test_router_orders import Lab
from test_router_owners import FETCH, conversation

from latentpool.errors import EpochError
from latentpool.v1 import pool_manager_pb2 as pb
from services.router.compose import Composer
from services.router.conversations import Book, Phase
from services.router.keeper import Keeper
from services.router.kept import Blocks, Place, fill_places, places, scope
from services.router.progress import Reports

HISTORY, REWIND, SHARED, REPLY = pb.MARK_HISTORY, pb.MARK_REWIND, pb.MARK_SHARED, pb.MARK_REPLY
TOKENS = np.arange(1000, dtype=np.uint32) % 240

# ---- digests --------------------------------------------------------------------------------------------------------


def test_a_digest_is_of_all_tokens_up_to_its_blocks_end() -> None:
    """By its definition: blake2b over the digest before it and the block's tokens."""
    seed = Blocks.seeded("numerics", b"caller")
    blocks, last = seed.over(TOKENS, 999), seed.seed
    for i in range(999 // 64):
        tokens = b"".join(int(token).to_bytes(4, "little") for token in TOKENS[64 * i : 64 * i + 64])
        last = hashlib.blake2b(last + tokens, digest_size=16).digest()
        assert blocks.digests[16 * i : 16 * i + 16] == last
    assert (blocks.tokens, len(blocks.digests)) == (960, 15 * 16)


def test_one_token_changes_its_block_and_all_behind_it() -> None:
    seed = Blocks.seeded("n")
    other = TOKENS.copy()
    other[200] += 1
    a, b = seed.over(TOKENS, 999).digests, seed.over(other, 999).digests
    assert [a[i : i + 16] == b[i : i + 16] for i in range(0, len(a), 16)] == [True] * 3 + [False] * 12


@pytest.mark.parametrize("end", [0, 1, 63, 64, 65, 127, 128, 999])
def test_digests_go_on_from_those_of_a_beginning(end: int) -> None:
    seed = Blocks.seeded("n")
    begun = seed.over(TOKENS[:end], end)
    assert begun.tokens == end // 64 * 64
    assert begun.over(TOKENS, 1000) == seed.over(TOKENS, 1000)
    assert begun.begin(seed.over(TOKENS, 1000)) == (end >= 64)
    assert seed.over(TOKENS, 1000).begin(begun) == (end >= 960)
    assert not begun.begin(Blocks.seeded("m").over(TOKENS, 1000))


def test_seeds_differ_wherever_states_may_not_be_shared() -> None:
    parts = [("n", "f32"), ("nf", "32"), ("n", "bf16"), ("", "nf32"), (b"n",), ()]
    assert len({Blocks.seeded(*one).seed for one in parts}) == len(parts)


def test_a_scope_is_the_callers_token_whatever_its_scheme_is_called() -> None:
    assert scope("") == scope("Bearer ") == scope("  ") == b""
    assert scope("Bearer abc") == scope("bearer  abc ") == scope("abc") != b""
    assert len({scope(one) for one in ("", "Bearer a", "Bearer b", "Basic a", "Bearer a b")}) == 5
    assert b"abc" not in scope("Bearer abc")


# ---- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "rewind", "shared", "want"),
    [
        (64, 0, 0, []),  # one is left to run
        (65, 0, 0, [(64, HISTORY)]),
        (1000, 0, 0, [(960, HISTORY)]),
        (1000, 700, 0, [(704 - 64, REWIND), (960, HISTORY)]),
        (1000, 704, 0, [(704, REWIND), (960, HISTORY)]),
        (1000, 705 + 63, 0, [(768, REWIND)]),  # too near the end, and it serves more
        (1000, 960, 0, [(960, HISTORY)]),
        (1000, 1000, 0, [(960, HISTORY)]),
        (1000, 63, 0, [(960, HISTORY)]),
        (1000, 600, 320, [(320, SHARED), (576, REWIND), (960, HISTORY)]),
        (1000, 600, 384, [(384, SHARED), (960, HISTORY)]),
        (1000, 384, 384, [(384, SHARED), (960, HISTORY)]),
        (1000, 384, 832, [(384, REWIND), (832, SHARED)]),
    ],
)
def test_where_a_prompt_is_kept(tokens: int, rewind: int, shared: int, want: list[tuple[int, int]]) -> None:
    taken = places(fill_places(tokens, rewind, shared), 64, 0)
    assert [(place.at, place.mark) for place in taken] == want


@pytest.mark.parametrize(("keep_from", "last", "want"), [(64, 0, [320, 960]), (321, 0, [960]), (64, 64, [320, 960]),
    (64, 128, [960]), (64, 704, [960]), (64, 768, []), (4096, 0, []), (64, 960, [])])  # fmt: skip
def test_nothing_is_kept_that_is_short_or_near_to_what_is_kept(keep_from: int, last: int, want: list[int]) -> None:
    assert [place.at for place in places(fill_places(1000, 320, 0), keep_from, last)] == want


# ---- the loop by itself ---------------------------------------------------------------------------------------------


class KeepingLab(Lab):
    """Two owners, states from 64 tokens on."""

    def __init__(self, page_rows: int = 64) -> None:
        super().__init__()
        self.loop._composer = Composer(page_rows, 256, 128, owners=2)
        self.loop._page_rows = page_rows
        self.loop._keeper = Keeper(self.told, self.workers, page_rows, 64)
        self.told.ask_keep = self.ask_keep

    def ask_keep(self, conversation: int, place: Place) -> int:
        self.told.all.append(("ask_keep", conversation, place.at, place.mark))
        self.told.keys += 1
        return self.told.keys

    def come(self, tokens: int, pages: list[int], at: int = 0, rewind: int = 0, **admitted):
        c = conversation(7, tokens, -1)
        c.keeping.blocks, c.keeping.rewind = Blocks.seeded("n").over(c.tokens, tokens - 1), rewind
        self.loop.submit(c)
        resume = pb.Resumable(state=5, at=at, mark=HISTORY) if at else None
        answer = pb.Admitted(owner=0, pages=pages, resume=resume, **admitted)
        self.loop.on_answer(pb.SessionResponse(key=self.told.keys, admitted=answer))
        return c

    def answer(self, key: int = 0, **what) -> None:
        self.loop.on_answer(pb.SessionResponse(key=key or self.told.keys, keep_answer=pb.KeepAnswer(**what)))


async def test_a_fill_stops_where_it_is_kept_until_it_is_answered() -> None:
    lab = KeepingLab()
    c = lab.come(500, list(range(0, 20, 2)), rewind=200)
    assert await lab.round() == [("bind",), ("table",), ("prompt", 0, 128, FETCH)]
    assert await lab.round() == [("prompt", 128, 64, FETCH)]
    assert lab.told.all == [("ask_keep", 7, 192, REWIND)]
    lab.deliver()
    assert await lab.round() == []
    lab.answer(state=9, pages=[20, 21])
    assert await lab.round() == [("keep",), ("prompt", 192, 128, FETCH)]
    keep = lab.workers._flights[-1].round.operations[0].keep
    assert (keep.lane, keep.state, keep.at, list(keep.pages)) == (0, 9, 192, [20, 21])
    assert ("kept", 9) in lab.told.all
    assert c.keeping.at == 192
    lab.deliver()
    assert await lab.round() == [("prompt", 320, 128, FETCH)]
    assert lab.told.all[-1] == ("ask_keep", 7, 448, HISTORY)
    lab.answer(reason="no page is free")
    assert await lab.round() == [("prompt", 448, 52, FETCH)]
    assert lab.loop.counters.keeps == 1


async def test_a_resume_follows_the_tables_of_its_lane_and_runs_on_at_once() -> None:
    lab = KeepingLab()
    c = lab.come(500, list(range(0, 20, 2)), at=256)
    assert await lab.round() == [("bind",), ("table",), ("resume",), ("prompt", 256, 128, FETCH)]
    assert lab.told.all == [("resumed", 7, 1)]
    lab.deliver()
    assert (c.answered, c.keeping.cached, c.keeping.cached_from) == (384, 256, HISTORY)
    assert [event.tokens_done for event in c.mailbox._events] == [384]


@pytest.mark.parametrize(("page_rows", "at", "pages"), [(64, 512, list(range(0, 16, 2))), (512, 512, [0]), (512, 320, [0])])
async def test_one_that_will_be_carried_adds_no_row_before_it_is(page_rows: int, at: int, pages: list[int]) -> None:
    lab = KeepingLab(page_rows)
    c = lab.come(1000, pages, at=at)
    assert await lab.round() == [("bind",), ("table",), ("resume",)]
    lab.deliver()
    lab.loop.extend()
    assert await lab.round() == []
    assert [one[0] for one in lab.told.all if one[0] != "answered"] == ["resumed"]  # and no page was asked for
    lab.order(carry=[(7, 1, list(range(1, 41, 2)))])
    carried = await lab.round()
    assert {one[0] for one in carried} == {"carry"}
    while c.carry is not None:
        lab.deliver()
        await lab.round()
    assert (c.owner, c.sent >= at, ("carried", 7, 2) in lab.told.all) == (1, True, True)


async def test_an_order_to_carry_before_it_is_bound_lets_it_resume_first() -> None:
    lab = KeepingLab()
    lab.come(1000, list(range(0, 16, 2)), at=512)
    lab.order(carry=[(7, 1, list(range(1, 41, 2)))])
    first = await lab.round()
    assert first[:3] == [("bind",), ("table",), ("resume",)]
    assert [one[0] for one in first[3:]] == ["carry"]
    bind, table = (getattr(lab.workers._flights[0].round.operations[i], kind) for i, kind in enumerate(("bind", "table")))
    assert (bind.owner, list(table.pages)) == (0, list(range(0, 16, 2)))


async def test_nothing_is_carried_while_a_question_is_open_and_it_is_kept_first() -> None:
    lab = KeepingLab()
    lab.come(500, list(range(0, 20, 2)), rewind=128)
    await lab.round()
    lab.deliver()
    lab.order(carry=[(7, 1, list(range(1, 41, 2)))])
    assert await lab.round() == []
    lab.answer(state=9, pages=[20, 21])
    kinds = [one[0] for one in await lab.round()]
    assert kinds == ["keep", "carry"]


@pytest.mark.parametrize(
    ("tokens", "at", "pages", "more"),
    [
        (500, 100, 10, {}),
        (500, 512, 10, {}),
        (512, 512, 10, {}),
        (500, 256, 3, {}),
        (500, 256, 10, {"borrowed": [1]}),
    ],
)
async def test_a_resume_that_makes_no_sense_ends_the_epoch(tokens: int, at: int, pages: int, more: dict) -> None:
    lab = KeepingLab()
    with pytest.raises(EpochError, match=f"the pool manager resumes conversation 7 of {tokens} prompt tokens at {at}"):
        lab.come(tokens, list(range(0, 2 * pages, 2)), at=at, **more)


async def test_states_are_forgotten_in_the_next_round_and_once() -> None:
    lab = KeepingLab()
    lab.loop.on_answer(pb.SessionResponse(orders=pb.Orders(forget=[3, 4])))
    lab.loop.on_answer(pb.SessionResponse(orders=pb.Orders(forget=[8])))
    assert await lab.round() == [("forget",)]
    assert list(lab.workers._flights[0].round.operations[0].forget.states) == [3, 4, 8]
    assert lab.told.all == [("forgotten", [3, 4, 8], 1)]
    assert await lab.round() == []
    assert lab.loop.counters.forgets == 3


# ---- reports --------------------------------------------------------------------------------------------------------


def test_progress_is_told_when_it_changed_and_not_too_often() -> None:
    reports, a, b = Reports(), conversation(1, 300, 0), conversation(2, 300, 1)
    for c in (a, b):
        c.phase = Phase.FILLING
    a.sent = 64
    assert [(p.conversation, p.rows, p.decoding) for p in reports.due([a, b], 10.0)] == [(1, 64, False), (2, 0, False)]
    a.sent = 128
    assert reports.due([a, b], 10.4) == []
    assert [(p.conversation, p.rows) for p in reports.due([a, b], 10.5)] == [(1, 128)]
    assert reports.due([a, b], 11.5) == []
    b.phase = Phase.DECODING
    assert [(p.conversation, p.rows, p.decoding) for p in reports.due([a, b], 11.6)] == [(2, 0, True)]
    a.phase = Phase.PARKED
    assert reports.due([a, b], 13.0) == []


def test_idle_conversations_are_no_part_of_the_queue() -> None:
    book = Book(1)
    idle = conversation(1, 300, -1)
    idle.idle = True
    book.idle.append(idle)
    assert (len(book.queue), book.short, book.quiet, book.may_idle) == (0, -1, True, True)
    assert book.seat() is idle
    assert (book.taken, book.short, book.lane_free, book.running(Phase.WAITING)) == (0, 0, False, [])
    first, second = conversation(2, 10, -1), conversation(3, 10, -1)
    book.enqueue(first)
    book.enqueue(second)
    assert (book.short, book.quiet) == (2, False)
    book.leave(idle)
    assert (book.short, book.coming) == (1, 1)
    book.rest_over(0)
    assert (book.coming, book.seat()) == (0, first)
