"""PoolAdmin: what operators read. Changes nothing."""

# ruff: noqa: N802  # gRPC names its handlers

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import grpc
import grpc.aio

from latentpool.v1 import pool_admin_pb2 as pb
from latentpool.v1 import pool_admin_pb2_grpc
from services.pool_manager.books import Kind
from services.pool_manager.group import Group
from services.pool_manager.leases import Leases, Request
from services.pool_manager.plan import Plan, to_proto

_KINDS = {
    Kind.FREE: pb.PAGE_KIND_FREE,
    Kind.LEASED: pb.PAGE_KIND_LIVE,
    Kind.FENCED: pb.PAGE_KIND_FENCED,
}


class View(Protocol):
    """The parts of a pool manager that operators read."""

    @property
    def group(self) -> Group: ...
    @property
    def leases(self) -> Leases | None: ...
    @property
    def term(self) -> int: ...
    @property
    def router_name(self) -> str: ...


class Admin(pool_admin_pb2_grpc.PoolAdminServicer):
    """clock: the group's and the leases' clock, seconds."""

    def __init__(self, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._clock = clock

    async def GetPlan(
        self, request: pb.GetPlanRequest, context: grpc.aio.ServicerContext[pb.GetPlanRequest, pb.GetPlanResponse]
    ) -> pb.GetPlanResponse:
        plan = self._view.group.plan
        if plan is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._no_plan())
        assert plan is not None
        return pb.GetPlanResponse(plan=to_proto(plan))

    async def ListPages(
        self, request: pb.ListPagesRequest, context: grpc.aio.ServicerContext[pb.ListPagesRequest, pb.ListPagesResponse]
    ) -> pb.ListPagesResponse:
        leases = self._view.leases
        if leases is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._no_plan())
        assert leases is not None
        return pb.ListPagesResponse(
            runs=page_runs(leases),
            pages=leases.plan.pages,
            free=sum(leases.books.free(residue) for residue in range(leases.books.residues)),
            reserved=sum(lease.quota for lease in leases.running.values()),
            page_rows=leases.plan.page_rows,
        )

    async def ListConversations(
        self,
        request: pb.ListConversationsRequest,
        context: grpc.aio.ServicerContext[pb.ListConversationsRequest, pb.ListConversationsResponse],
    ) -> pb.ListConversationsResponse:
        leases = self._view.leases
        return pb.ListConversationsResponse(conversations=[] if leases is None else self._conversations(leases))

    async def GetRanks(
        self, request: pb.GetRanksRequest, context: grpc.aio.ServicerContext[pb.GetRanksRequest, pb.GetRanksResponse]
    ) -> pb.GetRanksResponse:
        group = self._view.group
        return pb.GetRanksResponse(
            ranks=[self._rank(group, rank) for rank in range(group.world)],
            world=group.world,
            epoch=group.epoch,
            term=self._view.term,
            group_state=group.state,
            router=self._view.router_name,
        )

    async def CheckIntegrity(
        self,
        request: pb.CheckIntegrityRequest,
        context: grpc.aio.ServicerContext[pb.CheckIntegrityRequest, pb.CheckIntegrityResponse],
    ) -> pb.CheckIntegrityResponse:
        leases = self._view.leases
        if leases is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._no_plan())
        assert leases is not None
        return pb.CheckIntegrityResponse(violations=leases.check_integrity(), pages=leases.plan.pages)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _no_plan(self) -> str:
        group = self._view.group
        return f"no plan yet: the group is {group.state} ({len(group.members)} of {group.world} workers have joined)"

    def _conversations(self, leases: Leases) -> Iterator[pb.ConversationInfo]:
        now = self._clock()
        for lease in leases.running.values():
            owner = lease.owner if leases.plan.split else None
            yield _info(lease.request, pb.CONVERSATION_STATE_RUNNING, now - lease.since, owner, len(lease.pages), lease.quota)
        for waiting in leases.waiting:
            quota = leases.quota(waiting.request)
            yield _info(waiting.request, pb.CONVERSATION_STATE_WAITING, now - waiting.since, None, 0, quota)

    def _rank(self, group: Group, rank: int) -> pb.RankInfo:
        now = self._clock()
        info = pb.RankInfo(rank=rank, state=group.state_of(rank, now))
        member = group.members.get(rank)
        if member is None:
            return info
        beat, loaded = member.heartbeat, member.loaded
        info.host, info.address = member.hello.host, member.hello.address
        info.loaded_bytes, info.total_bytes = beat.loaded_bytes, beat.total_bytes
        info.resident_bytes = beat.resident_bytes or (0 if loaded is None else loaded.resident_bytes)
        info.room_bytes = 0 if loaded is None else loaded.room_bytes
        info.heartbeat_age_seconds = now - member.seen
        info.engine_progress = beat.engine_progress
        return info


def _info(
    request: Request, state: pb.ConversationState.ValueType, age: float, owner: int | None, pages: int, quota: int
) -> pb.ConversationInfo:
    return pb.ConversationInfo(
        conversation=request.conversation,
        request_id=request.request_id,
        state=state,
        lane=request.lane,
        owner=owner,
        prompt_tokens=request.prompt_tokens,
        pages=pages,
        quota=quota,
        age_seconds=age,
    )


def page_runs(leases: Leases) -> list[pb.PageRun]:
    """Every id once: runs of ids of one residue with one kind and one holder, by residue, then id."""
    plan: Plan = leases.plan
    holders = {page: lease.request.conversation for lease in leases.running.values() for page in lease.pages}
    kinds = leases.books.kinds()
    runs: list[pb.PageRun] = []
    for residue in range(plan.residues):
        last: tuple[Kind, int] | None = None
        for page in range(residue, plan.pages, plan.residues):
            what = kinds[page], holders.get(page, 0)
            if what == last:
                runs[-1].count += 1
                continue
            last = what
            owner = residue if plan.split else None
            run = pb.PageRun(first=page, count=1, stride=plan.residues, kind=_KINDS[what[0]], owner=owner, conversation=what[1])
            runs.append(run)
    return runs
