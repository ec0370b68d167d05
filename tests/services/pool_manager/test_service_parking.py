"""Parking, classes and the idle proof over real streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from manager_fakes import MakePlace, Router, room_for
from structlog.testing import capture_logs

from latentpool.v1 import pool_admin_pb2 as admin_pb
from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager.leases import Leases


async def crowd(place: MakePlace, pages: int) -> tuple[Any, Router]:
    """Four lanes, windows of 3 pages, no headroom, so many pages."""
    here = await place(context=1024, parallel=4, cache_bytes=0, headroom=0)
    _, router = await here.serving(room=room_for(pages, lanes=4))
    return await here.admin(), router


async def extend(router: Router, *needs: tuple[int, int], key: int | None = None) -> pb.SessionResponse:
    return await router.ask(key=key, extend=pb.Extend(needs=[pb.Need(conversation=name, rows=rows) for name, rows in needs]))


async def states(admin: Any) -> list[tuple[int, int]]:
    rows = (await admin.ListConversations(admin_pb.ListConversationsRequest())).conversations
    return [(row.conversation, row.state) for row in rows]


async def test_the_youngest_parks_and_returns_before_those_of_its_class(place: MakePlace) -> None:
    admin, router = await crowd(place, pages=6)
    for name in (1, 2, 3):
        assert (await router.admit(name, lane=name - 1, prompt=512)).admitted.quota == 2
    told = await extend(router, (1, 513 + 512), (2, 512))
    assert [(grant.conversation, grant.first_slot, list(grant.pages)) for grant in told.extended.grants] == [
        (1, 2, []),
        (2, 2, []),
    ]
    assert list(told.extended.park) == [3]
    assert await extend(router, (1, 1025), (2, 512), key=told.key) == told  # a repeat does not park another
    assert (await router.finish(3, fence=8)).finished.pages == 2
    waits = await router.admit(4, lane=3, prompt=1)
    assert (waits.refused.final, waits.refused.ahead) == (False, 0)
    back = await router.admit(3, lane=2, prompt=600, most=100, returning=True)
    assert (back.refused.final, back.refused.ahead) == (False, 0)
    assert "3 are needed, 0 are free, 0 wait before it" in back.refused.reason
    running, waiting = admin_pb.CONVERSATION_STATE_RUNNING, admin_pb.CONVERSATION_STATE_WAITING
    assert await states(admin) == [(1, running), (2, running), (3, waiting), (4, waiting)]
    await router.say(answered=pb.Answered(seq=7))
    assert list((await extend(router, (1, 1025))).extended.grants[0].pages) == []
    await router.say(answered=pb.Answered(seq=8))
    granted = (await extend(router, (1, 1025))).extended
    assert (list(granted.grants[0].pages), list(granted.park)) == ([4], [])
    await router.finish(1)
    again = await router.get()
    assert (again.key, list(again.admitted.pages)) == (back.key, [0, 1, 4])
    assert router.quiet
    await router.finish(2)
    assert (await router.get()).key == waits.key


async def test_foreground_waits_before_background(place: MakePlace) -> None:
    admin, router = await crowd(place, pages=6)
    await router.admit(1, lane=0, prompt=1024)
    await router.admit(2, lane=1, prompt=1024)
    late = await router.admit(3, lane=2, prompt=1, background=True)
    first = await router.admit(4, lane=3, prompt=1024)
    assert (late.refused.ahead, first.refused.ahead) == (0, 0)
    assert [name for name, _ in await states(admin)] == [1, 2, 4, 3]
    await router.finish(2)
    assert (await router.get()).key == first.key
    assert router.quiet


async def test_a_need_withdrawn_lets_a_waiter_in(place: MakePlace) -> None:
    _, router = await crowd(place, pages=6)
    for name in (1, 2):
        await router.admit(name, lane=name - 1, prompt=512)
    await router.admit(3, lane=2, prompt=512, background=True)
    assert list((await extend(router, (1, 1024 + 1))).extended.park) == [3]
    await router.finish(3)
    waits = await router.admit(4, lane=3, prompt=512)
    assert not waits.refused.final
    await extend(router, (1, 1))
    assert (await router.get()).key == waits.key


async def test_the_books_are_proven_once_after_a_busy_time(place: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = []

    def check(leases: Leases) -> list[str]:
        proofs.append(leases.idle)
        return ["id 7 is lost"]

    here = await place(dead_after=0.4)  # a tick each 0.1 s
    workers, router = await here.serving()

    async def ticks() -> None:
        for _ in range(4):
            await asyncio.sleep(0.1)
            for worker in workers:
                await worker.say(heartbeat=pb.Heartbeat())

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(Leases, "check_integrity", check)
        await ticks()
        await router.admit(1, 0, prompt=10)
        await router.finish(1, fence=5)
        await ticks()
        assert proofs == []
        await router.say(answered=pb.Answered(seq=5))
        await ticks()
    assert proofs == [True]
    assert [entry["violation"] for entry in logs if entry["event"] == "books are not whole"] == ["id 7 is lost"]
