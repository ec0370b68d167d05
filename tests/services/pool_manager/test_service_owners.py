"""Owners over real streams: loans, orders that come unasked, carries by hand and what operators see of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import grpc.aio
import pytest
from manager_fakes import DEADLINE, MakePlace, Place, Router, room_for
from structlog.testing import capture_logs

from latentpool.v1 import pool_admin_pb2 as admin_pb
from latentpool.v1 import pool_manager_pb2 as pb
from latentpool.v1 import rank_worker_pb2 as worker_pb

OWNED_PAGE = 512 * 2 * 6_912
"""Bytes of a page of one of two owners, and its index parts."""


async def owners(place: MakePlace, pages: int, **more: Any) -> tuple[Place, Router, Any]:
    """Two owners of so many pages each, windows of 5 pages, four lanes, no headroom."""
    settings: dict[str, Any] = {"context": 2048, "parallel": 4, "cache_bytes": 0, "headroom": 0, "split": "auto"}
    here = await place(**(settings | more))
    _, router = await here.serving(room=pages * OWNED_PAGE + room_for(0, lanes=4))
    return here, router, await here.admin()


async def extend(router: Router, *needs: tuple[int, int]) -> int:
    return await router.say(extend=pb.Extend(needs=[pb.Need(conversation=name, rows=rows) for name, rows in needs]))


async def settled(router: Router) -> None:
    """Everything sent before is carried out: an answer to a request about nothing has come."""
    key = await extend(router)
    assert (await router.get()).key == key


async def conversation(admin: Any, name: int) -> admin_pb.ConversationInfo:
    rows = (await admin.ListConversations(admin_pb.ListConversationsRequest())).conversations
    (row,) = [row for row in rows if row.conversation == name]
    return row  # type: ignore[no-any-return]


def carry(admin: Any, name: int, owner: int | None = None) -> asyncio.Task[admin_pb.CarryResponse]:
    async def call() -> admin_pb.CarryResponse:
        request = admin_pb.CarryRequest(conversation=name, owner=owner)
        return await asyncio.wait_for(admin.Carry(request), DEADLINE)  # type: ignore[no-any-return]

    return asyncio.create_task(call())


async def failure(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_owners_are_the_default_and_a_prompt_borrows(place: MakePlace) -> None:
    _, router, admin = await owners(place, pages=9)
    plan = (await admin.GetPlan(admin_pb.GetPlanRequest())).plan
    assert (plan.split, plan.pages, plan.window_pages) == (True, 18, 5)
    admitted = (await router.admit(1, lane=0, prompt=1024, most=0)).admitted
    assert (admitted.owner, list(admitted.pages), list(admitted.borrowed)) == (0, [0, 2, 4], [1, 3])
    row = await conversation(admin, 1)
    assert (row.owner, row.pages, row.borrowed, row.HasField("carried_to")) == (0, 3, 2, False)
    runs = (await admin.ListPages(admin_pb.ListPagesRequest())).runs
    assert [(run.first, run.count, run.owner) for run in runs if run.kind == admin_pb.PAGE_KIND_BORROWED] == [(1, 2, 1)]
    await router.say(released=pb.Released(conversation=1, fence_seq=3))
    await router.say(released=pb.Released(conversation=1, fence_seq=3))
    await settled(router)
    assert (await conversation(admin, 1)).borrowed == 0
    runs = (await admin.ListPages(admin_pb.ListPagesRequest())).runs
    assert [(run.first, run.count) for run in runs if run.kind == admin_pb.PAGE_KIND_FENCED] == [(1, 2)]


async def test_borrowing_can_be_switched_off(place: MakePlace) -> None:
    _, router, _ = await owners(place, pages=9, borrow=False)
    assert list((await router.admit(1, lane=0, prompt=1024, most=0)).admitted.borrowed) == []


async def test_a_repeated_release_does_not_end_the_next_loan(place: MakePlace) -> None:
    """It has the first one's key. Messages without a key are each taken for what they say."""
    _, router, admin = await owners(place, pages=9)
    await router.admit(1, lane=0, prompt=1024, most=0)
    key = await router.say(released=pb.Released(conversation=1, fence_seq=0))
    await router.finish(1)
    await router.admit(1, lane=0, prompt=1024, most=0, returning=True)
    await router.say(key=key, released=pb.Released(conversation=1, fence_seq=0))
    await settled(router)
    assert (await conversation(admin, 1)).borrowed == 2
    for _ in range(2):
        await router.say(key=0, released=pb.Released(conversation=1, fence_seq=0))
        await settled(router)
        assert (await conversation(admin, 1)).borrowed == 0
        await router.finish(1)
        await router.admit(1, lane=0, prompt=1024, most=0)


async def test_one_that_waits_recalls_a_loan_and_is_admitted_when_it_is_back(place: MakePlace) -> None:
    _, router, _ = await owners(place, pages=7)
    await router.admit(1, lane=0, prompt=1536, most=0)  # 4 of rank 0, 3 of rank 1
    key = await router.say(admit=pb.Admit(conversation=2, lane=1, prompt_tokens=2048, max_tokens=0))
    waits, orders = await router.get(), await router.get()
    assert (waits.key, waits.refused.final) == (key, False)
    assert (orders.key, list(orders.orders.recall), len(orders.orders.carry)) == (0, [1], 0)
    await router.say(released=pb.Released(conversation=1, fence_seq=4))
    await settled(router)
    await router.say(answered=pb.Answered(seq=4))
    admitted = await router.get()
    assert (admitted.key, admitted.admitted.owner, list(admitted.admitted.pages)) == (key, 1, [1, 3, 5, 7, 9])
    assert router.quiet


async def test_a_dry_owner_orders_a_carry_and_the_arrival_frees_the_old_pages(place: MakePlace) -> None:
    _, router, admin = await owners(place, pages=8, borrow=False)
    for name, prompt in ((1, 1024), (2, 512), (3, 1536)):
        await router.admit(name, lane=name - 1, prompt=prompt, most=0)
    key = await extend(router, (2, 2049), (3, 1))
    orders, extended = await router.get(), await router.get()
    assert orders.key == 0
    (order,) = orders.orders.carry
    assert (order.conversation, order.owner, list(order.pages)) == (3, 0, [6, 8, 10, 12, 14])
    assert extended.key == key
    assert [(one.conversation, list(one.pages)) for one in extended.extended.grants] == [(2, [13, 15]), (3, [])]
    row = await conversation(admin, 3)
    assert (row.state, row.owner, row.carried_to, row.pages) == (admin_pb.CONVERSATION_STATE_CARRYING, 1, 0, 4)
    await router.say(carried=pb.Carried(conversation=3, fence_seq=6))
    await router.say(carried=pb.Carried(conversation=3, fence_seq=6))
    await settled(router)
    row = await conversation(admin, 3)
    assert (row.state, row.owner, row.HasField("carried_to")) == (admin_pb.CONVERSATION_STATE_RUNNING, 0, False)
    await router.say(answered=pb.Answered(seq=6))
    granted = await router.ask(extend=pb.Extend(needs=[pb.Need(conversation=2, rows=2049)]))
    assert [list(one.pages) for one in granted.extended.grants] == [[5]]


async def test_an_arrival_that_finds_its_rank_dry_parks_unasked(place: MakePlace) -> None:
    _, router, admin = await owners(place, pages=7, borrow=False)
    await router.admit(1, lane=0, prompt=512, most=0)
    await router.admit(2, lane=1, prompt=1024, most=0)
    moving = carry(admin, 2)
    (order,) = (await router.get()).orders.carry
    assert (order.conversation, order.owner) == (2, 0)
    await extend(router, (1, 2049))
    assert list((await router.get()).extended.park) == []
    await router.say(carried=pb.Carried(conversation=2, fence_seq=9))
    parks = await router.get()
    assert (parks.key, list(parks.extended.park), len(parks.extended.grants)) == (0, [2], 0)
    assert (await conversation(admin, 2)).state == admin_pb.CONVERSATION_STATE_PARKING
    assert (await moving).to_owner == 0
    await router.finish(2)


async def test_a_carry_by_hand_is_answered_when_it_has_arrived(place: MakePlace) -> None:
    _, router, admin = await owners(place, pages=9)
    await router.admit(1, lane=0, prompt=1024, most=0)
    moving = carry(admin, 1)
    orders = (await router.get()).orders
    assert (list(orders.recall), [(one.conversation, one.owner, len(one.pages)) for one in orders.carry]) == ([1], [(1, 1, 4)])
    assert await failure(carry(admin, 1)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "conversation 1 is being carried to rank 1 already",
    )
    await router.say(released=pb.Released(conversation=1, fence_seq=2))
    await settled(router)
    assert not moving.done()
    await router.say(carried=pb.Carried(conversation=1, fence_seq=5))
    arrived = await moving
    assert (arrived.from_owner, arrived.to_owner, arrived.pages) == (0, 1, 3)
    assert arrived.seconds > 0
    back = carry(admin, 1, owner=0)
    assert [one.owner for one in (await router.get()).orders.carry] == [0]
    await router.say(carried=pb.Carried(conversation=1, fence_seq=7))
    assert ((await back).from_owner, (await back).to_owner) == (1, 0)


async def test_carries_by_hand_that_are_refused(place: MakePlace) -> None:
    here, router, admin = await owners(place, pages=6)
    await router.admit(1, lane=0, prompt=1024, most=0)
    await router.say(released=pb.Released(conversation=1, fence_seq=0))
    await router.admit(2, lane=1, prompt=1024, most=0)
    code, text = await failure(carry(admin, 3))
    assert (code, text.startswith("no conversation 3")) == (grpc.StatusCode.NOT_FOUND, True)
    assert await failure(carry(admin, 1, owner=2)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "rank 2: this group has ranks 0 to 1",
    )
    code, text = await failure(carry(admin, 1, owner=1))
    assert (code, text.startswith("rank 1 lacks pages: conversation 1 has 3 and needs 4 there")) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        True,
    )
    await router.leave()
    assert await router.get() is None
    code, text = await failure(carry(admin, 1))
    assert (code, text) == (
        grpc.StatusCode.UNAVAILABLE,
        "no router serves this group: nothing runs that could be carried",
    )
    assert here.manager.session is None


async def test_nothing_is_carried_in_a_group_that_is_not_split(place: MakePlace) -> None:
    here = await place()
    await here.serving()
    code, text = await failure(carry(await here.admin(), 1))
    assert (code, text) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "this group is not split: every rank keeps every row, so there is nothing to carry",
    )


async def test_a_carry_by_hand_whose_conversation_ends(place: MakePlace) -> None:
    _, router, admin = await owners(place, pages=9)
    await router.admit(1, lane=0, prompt=1024, most=0)
    moving = carry(admin, 1)
    await router.get()
    assert (await router.finish(1, fence=3)).finished.pages == 3 + 2 + 4
    assert await failure(moving) == (grpc.StatusCode.ABORTED, "conversation 1 ended before it arrived on rank 1")
    await router.say(carried=pb.Carried(conversation=1, fence_seq=4))  # its last slice was under way
    await settled(router)


async def test_a_carry_by_hand_whose_router_goes(place: MakePlace) -> None:
    _, router, admin = await owners(place, pages=9)
    await router.admit(1, lane=0, prompt=1024, most=0)
    moving = carry(admin, 1)
    await router.get()
    router.vanish()
    assert await failure(moving) == (grpc.StatusCode.UNAVAILABLE, "the router went while conversation 1 was carried")


async def test_a_carry_whose_caller_leaves_goes_on(place: MakePlace) -> None:
    _, router, admin = await owners(place, pages=9, borrow=False)
    await router.admit(1, lane=0, prompt=1024, most=0)
    moving = carry(admin, 1)
    await router.get()
    moving.cancel()
    await asyncio.wait([moving])
    await router.say(carried=pb.Carried(conversation=1, fence_seq=4))
    await settled(router)
    assert (await conversation(admin, 1)).owner == 1


async def test_ranks_show_what_they_sent(place: MakePlace) -> None:
    here = await place()
    workers = await here.ready()
    admin = await here.admin()
    sent = worker_pb.LinkBytes(sums=1, queries=2, outputs=3, rows=4, carries=5, samples=6)
    await workers[1].say(heartbeat=pb.Heartbeat(engine_progress=9, sent=sent))
    while True:
        ranks = (await admin.GetRanks(admin_pb.GetRanksRequest())).ranks
        if ranks[1].engine_progress == 9:
            break
    assert ranks[1].sent == sent
    assert ranks[0].sent == worker_pb.LinkBytes()


async def test_rows_stay_on_every_rank_where_owners_do_not_fit_and_the_log_says_why(place: MakePlace) -> None:
    here = await place(context=2048, cache_bytes=0, split="auto")
    with capture_logs() as logs:
        workers = await here.ready(room=5 * OWNED_PAGE - 1)
    (planned,) = [entry for entry in logs if entry["event"] == "planned"]
    assert planned["split"] is False
    assert planned["note"].startswith("rows are kept on every rank, because with owners --context 2048 needs ")
    plan = (await (await here.admin()).GetPlan(admin_pb.GetPlanRequest())).plan
    assert (plan.split, plan.note) == (False, planned["note"])
    assert workers
