"""Kept states over real streams: what a router says and hears of them, and what operators see and do."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from kept_fakes import digests
from manager_fakes import DEADLINE, MakePlace, Place, Router, room_for
from test_service_owners import OWNED_PAGE, failure, settled

from latentpool.v1 import pool_admin_pb2 as admin_pb
from latentpool.v1 import pool_manager_pb2 as pb

FIXED = 12
"""Pages of each of two ranks for what is fixed in a state of the real geometry."""


async def keepers(place: MakePlace, pages: int = 40, **more: Any) -> tuple[Place, Router, Any]:
    """Two owners of so many pages each of 512 rows, windows of 9 pages, four lanes, no headroom; a block is worth keeping."""
    settings: dict[str, Any] = {
        "context": 4096,
        "parallel": 4,
        "headroom": 0,
        "split": "auto",
        "keep_from": 64,
        "borrow": False,
    }
    here = await place(**(settings | more))
    _, router = await here.serving(room=pages * OWNED_PAGE + room_for(0, lanes=4))
    return here, router, await here.admin()


async def admit(router: Router, name: int, story: str, **more: Any) -> pb.Admitted:
    """Its prompt is a token longer than its blocks of 64."""
    request = pb.Admit(
        conversation=name, lane=name % 4, prompt_tokens=64 * len(story) + 1, max_tokens=0, request_id=f"q{name}",
        blocks=digests(story), **more,
    )  # fmt: skip
    return (await router.ask(admit=request)).admitted


async def keep(router: Router, name: int, blocks: int, mark: Any = pb.MARK_HISTORY) -> pb.KeepAnswer:
    answer = (await router.ask(ask_keep=pb.AskKeep(conversation=name, at=64 * blocks, mark=mark))).keep_answer
    if answer.state:
        await router.say(kept=pb.Kept(state=answer.state))
    return answer


async def rows(admin: Any) -> list[admin_pb.KeptInfo]:
    return list((await admin.ListKept(admin_pb.ListKeptRequest())).kept)


async def test_a_prompt_is_kept_and_the_next_one_goes_on_from_it(place: MakePlace) -> None:
    here, router, admin = await keepers(place)
    assert here.manager.leases is not None
    first = await admit(router, 1, "abcdefghij")
    assert (first.HasField("resume"), first.shared_prefix, list(first.pages)) == (False, 0, [0, 2, 4])
    answer = await keep(router, 1, 10)
    assert len(answer.pages) == 2 * FIXED
    assert [page % 2 for page in answer.pages] == [0] * FIXED + [1] * FIXED
    await router.finish(1)
    second = await admit(router, 2, "abcdefghijkl")
    assert second.resume == pb.Resumable(state=answer.state, at=640, mark=pb.MARK_HISTORY)
    assert (second.owner, second.pages[0], len(second.pages), second.quota) == (0, 0, 3, 3)
    (row,) = await rows(admin)
    assert (row.state, row.at, row.mark, row.owner, row.pinned, row.hits, row.extended) == (1, 640, 1, 0, True, 1, False)
    assert (row.row_pages, row.fixed_pages, row.request_id) == (2, FIXED, "q1")
    assert row.bytes == (1 + FIXED) * OWNED_PAGE  # on its owner, and the first page is shared
    await router.say(resumed=pb.Resumed(conversation=2, fence_seq=3))
    await router.say(answered=pb.Answered(seq=3))
    await settled(router)
    listed = await admin.ListKept(admin_pb.ListKeptRequest())
    pool = here.manager.leases.plan.pages // 2 * OWNED_PAGE  # smaller than the budget
    assert (listed.kept[0].pinned, listed.bytes, listed.budget_bytes) == (False, (2 + FIXED) * OWNED_PAGE, pool)
    assert listed.keep_from == 64
    counts = listed.counts
    assert (counts.hits, counts.hit_tokens, counts.misses_unknown, counts.kept) == (1, 640, 1, 1)


async def test_what_is_not_kept_is_answered_with_a_reason(place: MakePlace) -> None:
    _, router, admin = await keepers(place, keep_from=128)
    await admit(router, 1, "abc")
    assert (await keep(router, 1, 1)).reason == "64 tokens are fewer than --keep-from 128"
    again = await router.ask(key=router.key, ask_keep=pb.AskKeep(conversation=1, at=64))  # a repeat has the first answer
    assert again.keep_answer.reason == "64 tokens are fewer than --keep-from 128"
    listed = await admin.ListKept(admin_pb.ListKeptRequest())
    assert (len(listed.kept), listed.counts.refused, listed.nothing_kept) == (0, 1, "")
    assert listed.last_refusal == "64 tokens are fewer than --keep-from 128"


@pytest.mark.parametrize(
    ("settings", "keep_from", "why"),
    [
        ({}, 4096, ""),
        ({"cache_bytes": 0}, 0, "it was started with --cache 0"),
        ({"kv_pages": "off", "split": "off"}, 0, "its lanes are windows (--kv-pages off, or auto on one rank)"),
        ({"cache_bytes": 1 << 20}, 0, "a state takes 135.00 MiB a rank at least, 20 pages, and --cache is 1.00 MiB"),
    ],
)
async def test_router_and_operator_are_told_from_where_on_states_are_kept_or_why_none_is(
    place: MakePlace, settings: dict[str, Any], keep_from: int, why: str
) -> None:
    here = await place(context=4096, **({"split": "auto"} | settings))
    admin = await here.admin()
    asked = await admin.ListKept(admin_pb.ListKeptRequest())
    assert asked.nothing_kept == "no plan yet: the group is joining (0 of 2 workers have joined)"
    await here.ready()
    router = await here.router()
    await router.open()
    assert (await router.get()).granted.keep_from == keep_from
    told = (await admin.ListKept(admin_pb.ListKeptRequest())).nothing_kept
    assert told.startswith(why)
    assert bool(told) == bool(why)


async def test_a_state_that_is_dropped_before_its_keep_comes_back(place: MakePlace) -> None:
    here, router, _ = await keepers(place)
    await admit(router, 1, "abcd")
    answer = (await router.ask(ask_keep=pb.AskKeep(conversation=1, at=256, mark=pb.MARK_REWIND))).keep_answer
    await router.finish(1, fence=2)
    await router.say(forgotten=pb.Forgotten(states=[answer.state], fence_seq=0))
    await router.say(answered=pb.Answered(seq=2))
    await settled(router)
    assert here.manager.leases is not None
    assert here.manager.leases.idle
    assert here.manager.leases.kept.states == {}


async def test_a_keep_that_waits_is_answered_once_its_victims_are_gone(place: MakePlace) -> None:
    """Twenty-four pages a rank: two states do not fit."""
    _, router, _ = await keepers(place, pages=24, cache_bytes=1 << 30)
    await admit(router, 1, "abcd")
    old = await keep(router, 1, 4)
    await router.finish(1)
    await admit(router, 2, "wxyz")
    key = await router.say(ask_keep=pb.AskKeep(conversation=2, at=256, mark=pb.MARK_HISTORY))
    orders = await router.get()
    assert (orders.key, list(orders.orders.forget)) == (0, [old.state])
    assert router.quiet
    await router.say(forgotten=pb.Forgotten(states=[old.state], fence_seq=4))
    await router.say(answered=pb.Answered(seq=4))
    answer = await router.get()
    assert (answer.key, answer.keep_answer.state) == (key, 2)


async def test_a_state_is_carried_where_its_owner_has_no_room(place: MakePlace) -> None:
    _, router, admin = await keepers(place, pages=24, carry_from=64, cache_bytes=1 << 30, context=8192)
    await admit(router, 1, "a" * 32)  # five pages of rank 0
    answer = await keep(router, 1, 32)
    await router.finish(1)
    await router.admit(2, lane=2, prompt=3000, most=0)  # rank 1 has most: seven pages
    await router.admit(3, lane=3, prompt=3000, most=0)  # rank 0: seven of eight
    await router.finish(2)
    admitted = await admit(router, 4, "a" * 40)
    assert (admitted.owner, list(admitted.pages), admitted.quota) == (0, [0, 2, 4, 6], 7)
    assert admitted.resume.state == answer.state
    orders = (await router.get()).orders
    assert [(one.conversation, one.owner, len(one.pages)) for one in orders.carry] == [(4, 1, 7)]
    await router.say(resumed=pb.Resumed(conversation=4, fence_seq=0))
    await router.say(carried=pb.Carried(conversation=4, fence_seq=0))
    await settled(router)
    (row,) = [
        row for row in (await admin.ListConversations(admin_pb.ListConversationsRequest())).conversations if row.lane == 0
    ]
    assert (row.conversation, row.owner, row.cached_tokens, row.pages) == (4, 1, 2048, 7)


async def test_operators_evict_and_hear_when_it_is_done(place: MakePlace) -> None:
    _, router, admin = await keepers(place, pages=60)
    for name in (1, 2):
        await admit(router, name, f"{name}abc")
        await keep(router, name, 4)
    await router.finish(2)
    await settled(router)
    call = asyncio.create_task(asyncio.wait_for(admin.Evict(admin_pb.EvictRequest()), DEADLINE))
    assert list((await router.get()).orders.forget) == [1, 2]
    await router.say(forgotten=pb.Forgotten(states=[1], fence_seq=9))
    await settled(router)
    assert not call.done()
    await router.say(forgotten=pb.Forgotten(states=[2], fence_seq=9))
    assert list((await call).evicted) == [1, 2]
    assert (await admin.ListKept(admin_pb.ListKeptRequest())).counts.evicted_by_hand == 2
    assert list((await admin.Evict(admin_pb.EvictRequest())).evicted) == []
    assert await failure(admin.Evict(admin_pb.EvictRequest(states=[1]))) == (
        grpc.StatusCode.NOT_FOUND,
        "no kept state 1: `latentpool kept` lists those that are",
    )


async def test_evictions_that_cannot_be(place: MakePlace) -> None:
    here, router, admin = await keepers(place, pages=60)
    await admit(router, 1, "abcd")
    await keep(router, 1, 4)
    await admit(router, 2, "abcde")
    await settled(router)
    code, text = await failure(admin.Evict(admin_pb.EvictRequest(states=[1])))
    assert (code, text) == (grpc.StatusCode.FAILED_PRECONDITION, "state 1 is being resumed: try again in a moment")
    await router.finish(2)
    await settled(router)
    call = asyncio.create_task(asyncio.wait_for(admin.Evict(admin_pb.EvictRequest(states=[1])), DEADLINE))
    await router.get()
    router.vanish()
    code, text = await failure(call)
    assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the router went, and everything that was kept with it")
    code, _ = await failure(admin.Evict(admin_pb.EvictRequest()))
    assert code == grpc.StatusCode.UNAVAILABLE
    assert here.manager.session is None


async def test_conversations_fill_then_decode_as_reported(place: MakePlace) -> None:
    _, router, admin = await keepers(place)
    await admit(router, 9, "abc")
    await keep(router, 9, 3)
    await router.finish(9)
    await admit(router, 1, "abcd", idle=True)

    async def row() -> admin_pb.ConversationInfo:
        await settled(router)
        (info,) = (await admin.ListConversations(admin_pb.ListConversationsRequest())).conversations
        return info  # type: ignore[no-any-return]

    assert ((await row()).state, (await row()).idle) == (admin_pb.CONVERSATION_STATE_RUNNING, True)
    for decoding, state in ((False, admin_pb.CONVERSATION_STATE_FILLING), (True, admin_pb.CONVERSATION_STATE_DECODING)):
        progress = [pb.Progress(conversation=1, rows=192, decoding=decoding), pb.Progress(conversation=77)]
        await router.say(key=0, report=pb.Report(progress=progress))
        assert ((await row()).state, (await row()).rows) == (state, 192)


async def test_pages_show_who_shares_them(place: MakePlace) -> None:
    _, router, admin = await keepers(place)
    await admit(router, 1, "a" * 12)
    await keep(router, 1, 12)
    await router.finish(1)
    await admit(router, 2, "a" * 14)
    await settled(router)
    listed = await admin.ListPages(admin_pb.ListPagesRequest())
    runs = [(run.first, run.count, run.kind, run.conversation, run.state, run.holders) for run in listed.runs if run.holders]
    live, kept = admin_pb.PAGE_KIND_LIVE, admin_pb.PAGE_KIND_KEPT
    assert runs == [
        (0, 1, live, 2, 1, 2),
        (2, 1, kept, 0, 1, 1),
        (4, 1, live, 2, 0, 1),
        (6, FIXED, kept, 0, 1, 1),
        (30, 1, live, 2, 0, 1),
        (1, FIXED, kept, 0, 1, 1),
    ]
    assert sum(run.count for run in listed.runs) == listed.pages


async def test_watching_gives_everything_again_and_again_until_the_group_stops(place: MakePlace) -> None:
    here, router, admin = await keepers(place)
    await admit(router, 1, "abcd")
    await keep(router, 1, 4)
    await settled(router)
    watch = admin.Watch(admin_pb.WatchRequest(interval_seconds=0.2))
    for _ in range(2):
        seen = await asyncio.wait_for(watch.read(), DEADLINE)
        assert (len(seen.kept.kept), len(seen.conversations.conversations), len(seen.ranks.ranks)) == (1, 1, 2)
        assert seen.pages.pages == seen.pages.free + sum(run.count for run in seen.pages.runs if run.holders)
    await here.manager.stop()
    while (seen := await asyncio.wait_for(watch.read(), DEADLINE)) is not grpc.aio.EOF:
        assert seen.ranks.world == 2
    with pytest.raises(grpc.aio.AioRpcError):
        await admin.GetRanks(admin_pb.GetRanksRequest())


async def test_watching_before_there_is_a_plan_and_too_often(place: MakePlace) -> None:
    here = await place()
    admin = await here.admin()
    seen = await asyncio.wait_for(admin.Watch(admin_pb.WatchRequest()).read(), DEADLINE)
    assert (seen.HasField("pages"), seen.ranks.group_state) == (False, "joining")
    code, text = await failure(admin.Watch(admin_pb.WatchRequest(interval_seconds=0.1)).read())
    assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "interval_seconds 0.1: at least 0.2 is needed")
