"""A group's good days over real streams: join, load, plan, lay out, ready, a term, leases, an orderly stop."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from manager_fakes import CONFIG, GIB, MakePlace, identity, room_for

from latentpool.v1 import pool_admin_pb2 as admin_pb
from latentpool.v1 import pool_manager_pb2 as pb


async def test_workers_join_in_any_order_and_get_one_plan(place: MakePlace) -> None:
    here = await place(parallel=2)
    workers = await here.join(1, 0, room=16 * GIB)
    plans = [(await worker.get()).lay_out for worker in workers]
    assert plans[0] == plans[1]
    assert plans[0].plan.paged
    assert not plans[0].plan.split
    assert plans[0].plan.window_pages == 257
    assert plans[0].plan.stream_pages == 2 * 257
    assert list(plans[0].link_addresses) == [b"link", b"link"]
    assert plans[0].epoch == 1


async def test_the_plan_is_the_smallest_rooms_and_counts_drafts_only_if_served(place: MakePlace) -> None:
    here = await place(context=512, cache_bytes=0)
    workers = await here.join(0, who=identity(drafts=False)) + await here.join(1, room=GIB, who=identity(drafts=False))
    plan = (await workers[0].get()).lay_out.plan
    assert [ledger.room_bytes for ledger in plan.ledgers] == [16 * GIB, GIB]
    assert plan.ledgers[0].page_bytes == 512 * (11 * 1024 + 11 * 64)
    assert plan.pages == GIB // plan.ledgers[0].page_bytes


async def test_windows_charge_the_first_lanes_slack_to_the_reported_room(place: MakePlace) -> None:
    here = await place(context=1000, parallel=2, kv_pages="off", cache_bytes=0)
    worker, _ = await here.join(0, 1, room=GIB)
    plan = (await worker.get()).lay_out.plan
    assert not plan.paged
    assert (plan.window_pages, plan.stream_pages, plan.pages) == (3, 6, 6)
    assert plan.ledgers[0].room_bytes == GIB - (3 * 512 - 1000) * 13_056


async def test_the_term_is_granted_once_all_are_ready_and_workers_hear_it_first(place: MakePlace) -> None:
    here = await place()
    router = await here.router()
    await router.open(name="host:1")
    workers = await here.join(0, 1)
    layouts = [await worker.get() for worker in workers]
    await workers[0].say(ready=pb.Ready())
    assert (await (await here.admin()).GetRanks(admin_pb.GetRanksRequest())).group_state == "laying out"
    assert router.quiet
    await workers[1].say(ready=pb.Ready())
    granted = (await router.get()).granted
    terms = [(await worker.get()).term for worker in workers]
    assert router.proof(granted)
    assert (granted.term, granted.epoch) == (1, 1)
    assert {term.term for term in terms} == {1}
    assert {term.key for term in terms} == {granted.round_key}
    assert granted.plan == layouts[0].lay_out.plan
    assert list(granted.worker_addresses) == ["127.0.0.1:9000", "127.0.0.1:9001"]
    assert granted.identity == identity()
    assert granted.identity.config_json == CONFIG


async def test_a_conversation_leases_extends_and_gives_back(place: MakePlace) -> None:
    here = await place(parallel=2)
    _, router = await here.serving()
    admitted = (await router.admit(7, lane=1, prompt=1000, most=24)).admitted
    assert (admitted.owner, admitted.quota, list(admitted.pages)) == (0, 3, [0, 1, 2])
    needs = [pb.Need(conversation=7, rows=512 * 4 + 1), pb.Need(conversation=9, rows=1)]
    grants = (await router.ask(extend=pb.Extend(needs=needs))).extended.grants
    assert [(grant.conversation, grant.first_slot, list(grant.pages)) for grant in grants] == [(7, 3, [3, 4]), (9, 0, [])]
    assert (await router.finish(7, fence=5)).finished.pages == 5
    assert list((await router.admit(8, lane=0, prompt=1, most=1)).admitted.pages) == [5, 6]
    await router.say(answered=pb.Answered(seq=5))
    assert list((await router.admit(9, lane=1, prompt=1, most=1)).admitted.pages) == [0, 1]


async def test_windows_give_a_lane_its_contiguous_run(place: MakePlace) -> None:
    here = await place(context=1024, parallel=2, kv_pages="off")
    _, router = await here.serving(room=2 * GIB)
    admitted = (await router.admit(1, lane=1, prompt=10)).admitted
    assert (list(admitted.pages), admitted.quota) == ([3, 4, 5], 3)
    await router.finish(1, fence=3)
    waiting = (await router.admit(2, lane=1, prompt=10)).refused
    assert (waiting.final, waiting.ahead) == (False, 0)
    await router.say(answered=pb.Answered(seq=3))
    assert list((await router.get()).admitted.pages) == [3, 4, 5]


async def test_a_waiter_is_answered_again_with_its_key_and_may_leave(place: MakePlace) -> None:
    here = await place(context=1024, parallel=4, cache_bytes=0)
    _, router = await here.serving(room=room_for(6, lanes=4))
    assert len((await router.admit(1, 0, prompt=1024)).admitted.pages) == 3
    assert len((await router.admit(2, 1, prompt=1024)).admitted.pages) == 3
    first = await router.admit(3, 2, prompt=1024)
    second = await router.admit(4, 3, prompt=1)
    assert (first.refused.final, first.refused.ahead) == (False, 0)
    assert (second.refused.final, second.refused.ahead) == (False, 1)
    assert "3 are needed" in first.refused.reason
    assert (await router.finish(3)).finished.pages == 0  # a cancelled waiter leaves, and does not hold up the next
    await router.finish(1)
    again = await router.get()
    assert again.key == second.key
    assert list(again.admitted.pages) == [0, 1, 2]


async def test_a_repeated_key_gets_the_first_answer(place: MakePlace) -> None:
    here = await place()
    _, router = await here.serving()
    first = await router.admit(1, 0, prompt=10)
    repeat = await router.ask(key=first.key, admit=pb.Admit(conversation=1, lane=0, prompt_tokens=10))
    assert repeat == first
    gone = await router.finish(1)
    assert await router.ask(key=gone.key, finish=pb.Finish(conversation=1)) == gone
    assert gone.finished.pages == len(first.admitted.pages)


async def test_requests_that_are_refused_at_once(place: MakePlace) -> None:
    here = await place(context=4096)
    _, router = await here.serving()
    long = (await router.admit(1, 0, prompt=4000, most=97)).refused
    assert long.final
    assert long.reason.startswith("context too long: a prompt of 4000 tokens and max_tokens 97 make 4097 tokens")
    assert (await router.admit(1, 0, prompt=4000, most=96)).HasField("admitted")
    twice = (await router.admit(1, 0, prompt=1)).refused
    assert (twice.final, twice.reason) == (True, "conversation 1 is admitted already")
    assert "lane 0 belongs to conversation 1" in (await router.admit(2, 0, prompt=1)).refused.reason
    assert "lanes 0 to 0" in (await router.admit(2, 1, prompt=1)).refused.reason


async def test_a_router_that_leaves_frees_its_session_and_leases(place: MakePlace) -> None:
    here = await place()
    workers, router = await here.serving()
    admin = await here.admin()
    await router.admit(1, 0, prompt=10_000)
    pages = await admin.ListPages(admin_pb.ListPagesRequest())
    assert pages.free == pages.pages - 25
    await router.leave()
    assert await router.get() is None
    pages = await admin.ListPages(admin_pb.ListPagesRequest())
    assert pages.free == pages.pages
    next_router = await here.router()
    await next_router.open(name="r2")
    granted = (await next_router.get()).granted
    assert granted.term == 2
    assert [(await worker.get()).term.term for worker in workers] == [2, 2]
    assert (await next_router.admit(1, 0, prompt=10)).admitted.pages[0] == 0


async def test_an_operators_stop_is_orderly_for_everyone(place: MakePlace) -> None:
    here = await place()
    workers, router = await here.serving()
    ended = here.manager.ended()
    await here.manager.stop()
    for worker in workers:
        stop = (await worker.get()).stop
        assert (stop.orderly, stop.reason) == (True, "stopped by its operator")
        assert await worker.get() is None
    gone = (await router.get()).epoch_ended
    assert (gone.orderly, gone.reason) == (True, "stopped by its operator")
    assert await router.get() is None
    assert await ended is None
    await here.manager.stop()


async def test_admin_reads(place: MakePlace) -> None:
    here = await place(parallel=2, context=1024, cache_bytes=0)
    admin = await here.admin()
    workers, router = await here.serving(room=room_for(6, lanes=2))
    await router.admit(5, 1, prompt=1024)
    await router.admit(6, 0, prompt=100, most=1)
    await router.finish(6, fence=9)
    await router.admit(7, 0, prompt=1024)
    plan = (await admin.GetPlan(admin_pb.GetPlanRequest())).plan
    pages = await admin.ListPages(admin_pb.ListPagesRequest())
    assert plan.pages == pages.pages == 6
    runs = [(run.first, run.count, run.kind, run.conversation, run.HasField("owner")) for run in pages.runs]
    assert runs == [
        (0, 3, admin_pb.PAGE_KIND_LIVE, 5, False),
        (3, 2, admin_pb.PAGE_KIND_FENCED, 0, False),
        (5, 1, admin_pb.PAGE_KIND_FREE, 0, False),
    ]
    assert (pages.free, pages.reserved, pages.page_rows) == (1, 3, 512)
    rows = (await admin.ListConversations(admin_pb.ListConversationsRequest())).conversations
    seen = [(row.conversation, row.request_id, row.state, row.lane, row.prompt_tokens, row.pages, row.quota) for row in rows]
    assert seen == [
        (5, "q5", admin_pb.CONVERSATION_STATE_RUNNING, 1, 1024, 3, 3),
        (7, "q7", admin_pb.CONVERSATION_STATE_WAITING, 0, 1024, 0, 3),
    ]
    beat = pb.Heartbeat(engine_progress=3, loaded_bytes=4, total_bytes=5, resident_bytes=6)
    await workers[1].say(heartbeat=beat)
    while True:
        ranks = await admin.GetRanks(admin_pb.GetRanksRequest())
        if ranks.ranks[1].engine_progress == 3:
            break
    assert (ranks.world, ranks.epoch, ranks.term, ranks.group_state, ranks.router) == (2, 1, 1, "ready", "r1")
    one = ranks.ranks[1]
    assert (one.rank, one.state, one.host, one.address) == (1, "ready", "host1", "127.0.0.1:9001")
    assert (one.loaded_bytes, one.total_bytes, one.resident_bytes) == (4, 5, 6)
    assert one.room_bytes == room_for(6, lanes=2)
    whole = await admin.CheckIntegrity(admin_pb.CheckIntegrityRequest())
    assert (list(whole.violations), whole.pages) == ([], 6)


async def test_ranks_before_they_join_and_while_they_load(place: MakePlace) -> None:
    here = await place(world=3)
    who = identity(world=3)
    admin = await here.admin()
    loading = await here.worker()
    await loading.hello(2, who)
    await here.join(0, who=who)
    while True:
        ranks = await admin.GetRanks(admin_pb.GetRanksRequest())
        if ranks.ranks[0].room_bytes:
            break
    assert [one.state for one in ranks.ranks] == ["loaded", "absent", "loading"]
    assert (ranks.group_state, ranks.router) == ("joining", "")
    pages = admin.ListPages(admin_pb.ListPagesRequest())
    with pytest.raises(Exception, match=r"no plan yet: the group is joining \(2 of 3 workers have joined\)"):
        await pages


async def test_health_and_reflection(place: MakePlace) -> None:
    here = await place()
    channel = await here.channel()
    health = health_pb2_grpc.HealthStub(channel)

    async def status(service: str) -> int:
        return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status  # type: ignore[no-any-return]

    assert await status("") == health_pb2.HealthCheckResponse.NOT_SERVING
    await here.serving()
    for service in ("", "latentpool.v1.PoolManager", "latentpool.v1.PoolAdmin"):
        assert await status(service) == health_pb2.HealthCheckResponse.SERVING
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {"latentpool.v1.PoolManager", "latentpool.v1.PoolAdmin", "grpc.health.v1.Health"} <= names
    call.cancel()
