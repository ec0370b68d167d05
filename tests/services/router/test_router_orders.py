"""The loop by itself where rows are split among owners: what the manager's orders do, and what it is told, in every state that
a conversation may be in."""

from __future__ import annotations

import pytest
from test_router_owners import BORROWED, FETCH, conversation, said

from latentpool.errors import EpochError
from latentpool.v1 import pool_manager_pb2
from latentpool.v1 import rank_worker_pb2 as pb
from services.router.compose import Composer
from services.router.conversations import Book, Conversation, Phase
from services.router.loop import RoundLoop
from services.router.workers import Workers


class Told:
    """A session that keeps what it is told."""

    def __init__(self) -> None:
        self.all: list[tuple] = []
        self.keys = 0

    def admit(self, *_rest: object, **_options: object) -> int:
        self.keys += 1
        return self.keys

    def __getattr__(self, what: str):
        return lambda *rest: self.all.append((what, *rest))


class Lab:
    """A loop with two owners and no ranks: rounds are answered by `answer`."""

    def __init__(self, lanes: int = 1) -> None:
        self.told = Told()
        self.workers = Workers([], 1.0)
        self.loop = RoundLoop(self.told, self.workers, Composer(64, 256, 128, owners=2), Book(lanes), 256, 64, 2048)
        self.drafts: list = []

    def submit(self, c: Conversation, pages: list[int], owner: int = 0, borrowed=()) -> None:
        self.loop.submit(c)
        admitted = pool_manager_pb2.Admitted(owner=owner, pages=pages, borrowed=borrowed)
        self.loop.on_answer(pool_manager_pb2.SessionResponse(key=self.told.keys, admitted=admitted))

    def order(self, recall=(), carry=()) -> None:
        carries = [pool_manager_pb2.CarryOrder(conversation=c, owner=o, pages=p) for c, o, p in carry]
        orders = pool_manager_pb2.Orders(recall=recall, carry=carries)
        self.loop.on_answer(pool_manager_pb2.SessionResponse(orders=orders))

    def extended(self, **what) -> None:
        self.loop.on_answer(pool_manager_pb2.SessionResponse(extended=pool_manager_pb2.Extended(**what)))

    async def round(self) -> list[tuple]:
        draft = self.loop.compose()
        await self.loop.send(draft)
        return said(draft)

    def deliver(self) -> None:
        """All rounds in flight are answered: without ranks they are at once."""
        for flight in self.workers._flights:
            for operation in flight.round.operations:
                assert not operation.HasField("decode")
            flight.results = [
                pb.RoundResult(seq=flight.round.seq, results=[pb.OperationResult(tokens=[9]) for _ in flight.round.operations])
            ]
        self.loop.deliver()


async def test_an_order_about_one_that_is_not_on_the_workers_yet_is_done_at_once() -> None:
    lab = Lab()
    c = conversation(7, 300, -1)
    lab.submit(c, [0, 2, 4, 6, 8, 10], borrowed=[1, 3, 5])
    lab.order(recall=[7])
    assert (c.borrowed, lab.told.all) == ([], [("released", 7, 0)])
    lab.order(carry=[(7, 1, [7, 9, 11, 13, 15, 17, 19])])
    assert (c.owner, c.pages, c.carry) == (1, [7, 9, 11, 13, 15, 17, 19], None)
    assert lab.told.all[1:] == [("carried", 7, 0)]
    assert await lab.round() == [("bind",), ("table",), ("prompt", 0, 128, FETCH)]
    bind, table, _ = lab.workers._flights[0].round.operations
    assert (bind.bind.owner, list(table.table.pages)) == (1, c.pages)
    assert (c.carried, lab.loop.counters.carries) == (0, 0)  # it had no rows


async def test_a_carry_gives_back_what_it_borrows_even_if_nobody_recalled_it() -> None:
    lab = Lab()
    c = conversation(7, 300, -1)
    lab.submit(c, [0, 2, 4, 6, 8, 10], borrowed=[1, 3, 5])
    lab.order(carry=[(7, 1, [7, 9, 11, 13, 15, 17])])
    assert lab.told.all == [("released", 7, 0), ("carried", 7, 0)]
    assert await lab.round() == [("bind",), ("table",), ("prompt", 0, 128, FETCH)]


async def test_releases_and_carries_are_told_with_their_round_and_only_when_they_are_answered() -> None:
    lab = Lab()
    c = conversation(7, 300, -1)
    lab.submit(c, [0, 2, 4, 6, 8], borrowed=[1, 3, 5])
    assert await lab.round() == [("bind",), ("table",), ("borrow",), ("prompt", 0, 128, BORROWED)]
    lab.order(recall=[7], carry=[(7, 1, [7, 9, 11, 13, 15])])
    lab.order(recall=[7])
    assert lab.told.all == []
    assert await lab.round() == [("release",), ("carry", 0, 5, True)]
    assert lab.told.all == [("released", 7, 2)]
    lab.deliver()
    assert (c.owner, c.pages, c.tabled, c.carry) == (1, [7, 9, 11, 13, 15], 5, None)
    assert [one for one in lab.told.all if one[0] != "answered"] == [("released", 7, 2), ("carried", 7, 2)]
    assert lab.told.all.index(("carried", 7, 2)) > 0
    assert await lab.round() == [("prompt", 128, 128, FETCH)]
    counters = lab.loop.counters
    assert (counters.recalls, counters.carries, counters.carried_pages, c.carried) == (1, 1, 5, 1)
    assert (counters.borrowed_chunks, counters.fetched_chunks, c.borrowed_tokens, c.fetched_tokens) == (1, 0, 128, 0)


async def test_it_has_arrived_with_the_last_slice_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.pace.MOST_CARRIED_ROWS", 64)
    lab = Lab()
    c = conversation(7, 300, -1)
    lab.submit(c, [0, 2, 4, 6, 8])
    await lab.round()
    lab.order(carry=[(7, 1, [7, 9, 11, 13, 15])])
    assert await lab.round() == [("carry", 0, 1, False)]
    lab.deliver()
    assert (c.owner, c.pages, c.carried) == (0, [0, 2, 4, 6, 8], 0)
    assert await lab.round() == [("carry", 1, 4, True)]  # 128 rows are on two pages
    assert await lab.round() == []
    lab.deliver()
    assert [one for one in lab.told.all if one[0] != "answered"] == [("carried", 7, 3)]
    assert (c.owner, c.pages, c.carried, lab.loop.counters.carried_pages) == (1, [7, 9, 11, 13, 15], 1, 5)


async def test_pages_that_the_workers_do_not_know_when_a_carry_begins_are_left_behind() -> None:
    lab = Lab()
    c = conversation(7, 300, -1)
    lab.submit(c, [0, 2, 4, 6, 8])
    await lab.round()
    c.asked_rows = 400
    lab.extended(grants=[pool_manager_pb2.Grant(conversation=7, first_slot=5, pages=[10])])
    lab.order(carry=[(7, 1, [7, 9, 11, 13, 15, 17])])
    assert await lab.round() == [("carry", 0, 6, True)]
    lab.deliver()
    assert (c.tabled, len(c.pages)) == (6, 6)
    assert await lab.round() == [("prompt", 128, 128, FETCH)]


async def test_nothing_is_asked_for_while_it_is_carried_and_at_once_afterwards() -> None:
    lab = Lab()
    c = conversation(7, 300, -1)
    lab.submit(c, [0, 2, 4, 6, 8])
    await lab.round()
    lab.loop.extend()  # 355 rows are more than 5 pages
    assert [what for what, *_ in lab.told.all] == ["extend"]
    lab.order(carry=[(7, 1, [7, 9, 11, 13, 15])])
    lab.extended(grants=[pool_manager_pb2.Grant(conversation=7, first_slot=5)])
    assert c.dry_until > 0
    c.dry_until = 0.0
    lab.loop.extend()
    assert [what for what, *_ in lab.told.all] == ["extend"]
    await lab.round()
    c.dry_until = 1e9
    lab.deliver()
    lab.loop.extend()
    assert [what for what, *_ in lab.told.all if what != "answered"] == ["extend", "carried", "extend"]


@pytest.mark.parametrize("how", ["ended", "parked", "waits again", "unknown"])
async def test_orders_about_those_that_are_not_meant_do_nothing(how: str) -> None:
    lab = Lab()
    c = conversation(7, 300, -1)
    lab.submit(c, [0, 2, 4, 6, 8], borrowed=[1, 3])
    await lab.round()
    if how == "ended":
        lab.loop.leave(c)
    elif how != "unknown":
        lab.extended(park=[7])
    if how == "waits again":
        assert await lab.round() == [("free",)]
        lab.deliver()
        assert c.phase is Phase.WAITING
        lab.loop.admit()
    before = list(lab.told.all)
    name = 8 if how == "unknown" else 7
    lab.order(recall=[name], carry=[(name, 1, [9, 11, 13, 15, 17])])
    assert (c.carry, c.recalled, lab.told.all) == (None, False, before)
    assert lab.loop.counters.recalls == 0


@pytest.mark.parametrize("how", ["ends", "parks"])
async def test_one_that_leaves_in_the_middle_of_its_carry_is_not_there(how: str) -> None:
    lab = Lab()
    c = conversation(7, 300, -1)
    lab.submit(c, [0, 2, 4, 6, 8])
    await lab.round()
    lab.order(carry=[(7, 1, [7, 9, 11, 13, 15])])
    assert await lab.round() == [("carry", 0, 5, True)]
    if how == "ends":
        lab.loop.leave(c)
    else:
        lab.extended(park=[7])
    lab.deliver()
    assert (c.owner, c.pages, c.carried) == (0, [0, 2, 4, 6, 8], 0)
    assert await lab.round() == [("free",)]
    lab.deliver()
    assert [one for one in lab.told.all if one[0] != "answered"] == [("finish", 7, 3)]
    assert (lab.loop.counters.carries, lab.loop.counters.carried_pages) == (0, 5)
    if how == "parks":
        assert (c.phase, c.carry, c.pages, c.borrowed) == (Phase.WAITING, None, [], [])
        assert (c.borrowed_tokens, c.fetched_tokens) == (0, 128)  # counts are kept


async def test_one_that_parks_after_a_recall_releases_nothing_and_borrows_anew_when_it_is_back() -> None:
    lab = Lab()
    c = conversation(7, 300, -1)
    lab.submit(c, [0, 2, 4, 6, 8], borrowed=[1, 3, 5])
    await lab.round()
    lab.order(recall=[7])
    lab.extended(park=[7])
    assert await lab.round() == [("free",)]
    lab.deliver()
    assert [one for one in lab.told.all if one[0] != "answered"] == [("finish", 7, 2)]
    lab.loop.admit()
    admitted = pool_manager_pb2.Admitted(owner=1, pages=[1, 3, 5, 7, 9], borrowed=[0, 2])
    lab.loop.on_answer(pool_manager_pb2.SessionResponse(key=lab.told.keys, admitted=admitted))
    assert await lab.round() == [("bind",), ("table",), ("borrow",), ("prompt", 0, 128, BORROWED), ("release",)]
    lab.deliver()
    assert (c.borrowed_tokens, c.owner) == (256, 1)  # the first chunk of before counts too


async def test_answers_that_make_no_sense_end_the_epoch_in_words() -> None:
    lab = Lab()
    c = conversation(7, 300, -1)
    lab.submit(c, [0, 2, 4, 6, 8])
    await lab.round()
    with pytest.raises(EpochError, match="carries conversation 7 with 5 pages to 4 pages of rank 1"):
        lab.order(carry=[(7, 1, [1, 3, 5, 7])])
    lab.order(carry=[(7, 1, [1, 3, 5, 7, 9])])
    with pytest.raises(EpochError, match="to 5 pages of rank 0 while it is carried to rank 1"):
        lab.order(carry=[(7, 0, [10, 12, 14, 16, 18])])
    with pytest.raises(EpochError, match="granted pages to conversation 7 while it is carried"):
        lab.extended(grants=[pool_manager_pb2.Grant(conversation=7, first_slot=5, pages=[10])])
    lab = Lab()
    lab.loop._composer.owners = 3
    with pytest.raises(EpochError, match="lent 3 pages where 2 owners lend one a slot"):
        lab.submit(conversation(7, 300, -1), [0, 3, 6, 9, 12], borrowed=[1, 2, 4])
    lab = Lab()
    lab.loop._composer.owners = 1
    with pytest.raises(EpochError, match="lent 2 pages where 0 owners lend"):
        lab.submit(conversation(7, 300, -1), [0, 3, 6, 9, 12], borrowed=[1, 2])
