"""PoolAdmin: what operators read, and the one thing they may do: carry a conversation."""

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
from services.pool_manager.lease import Lease, Waiting
from services.pool_manager.leases import Leases
from services.pool_manager.plan import Plan, to_proto
from services.pool_manager.relief import CarryError
from services.pool_manager.session import Session

_KINDS = {
    Kind.FREE: pb.PAGE_KIND_FREE,
    Kind.LEASED: pb.PAGE_KIND_LIVE,
    Kind.FENCED: pb.PAGE_KIND_FENCED,
}
_CANNOT_CARRY = {
    "conversation": grpc.StatusCode.NOT_FOUND,
    "rank": grpc.StatusCode.INVALID_ARGUMENT,
    "state": grpc.StatusCode.FAILED_PRECONDITION,
}


class View(Protocol):
    """The parts of a pool manager that operators see."""

    @property
    def group(self) -> Group: ...
    @property
    def leases(self) -> Leases | None: ...
    @property
    def session(self) -> Session | None: ...
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

    async def Carry(
        self, request: pb.CarryRequest, context: grpc.aio.ServicerContext[pb.CarryRequest, pb.CarryResponse]
    ) -> pb.CarryResponse:
        """Answers once the conversation has arrived; UNAVAILABLE without a router, ABORTED where it ended before."""
        session, began = self._view.session, self._clock()
        if session is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no router serves this group: nothing runs that could be carried")
        assert session is not None
        name = request.conversation
        try:
            move, arrival = session.carry(name, request.owner if request.HasField("owner") else None)
        except CarryError as error:
            await context.abort(_CANNOT_CARRY[error.what], str(error))
            raise
        lease = session.leases.running[name]
        old, pages = lease.owner, len(lease.pages)
        if not await arrival:
            why = f"conversation {name} ended before it arrived on rank {move.owner}"
            if session is not self._view.session:
                await context.abort(grpc.StatusCode.UNAVAILABLE, f"the router went while conversation {name} was carried")
            await context.abort(grpc.StatusCode.ABORTED, why)
        return pb.CarryResponse(from_owner=old, to_owner=move.owner, pages=pages, seconds=self._clock() - began)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _no_plan(self) -> str:
        group = self._view.group
        return f"no plan yet: the group is {group.state} ({len(group.members)} of {group.world} workers have joined)"

    def _conversations(self, leases: Leases) -> Iterator[pb.ConversationInfo]:
        now = self._clock()
        for name, lease in leases.running.items():
            info = _info(lease, now, lease.quota)
            info.pages, info.borrowed = len(lease.pages), len(lease.borrowed)
            info.state = pb.CONVERSATION_STATE_PARKING if name in leases.parking else pb.CONVERSATION_STATE_RUNNING
            if leases.plan.split:
                info.owner = lease.owner
            if lease.move is not None:
                info.state, info.carried_to = pb.CONVERSATION_STATE_CARRYING, lease.move.owner
            yield info
        for waiting in leases.waiting:
            info = _info(waiting, now, leases.quota(waiting.request))
            info.state = pb.CONVERSATION_STATE_WAITING
            yield info

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
        info.sent.CopyFrom(beat.sent)
        return info


def _info(one: Lease | Waiting, now: float, quota: int) -> pb.ConversationInfo:
    return pb.ConversationInfo(
        conversation=one.request.conversation,
        request_id=one.request.request_id,
        lane=one.request.lane,
        prompt_tokens=one.request.prompt_tokens,
        quota=quota,
        age_seconds=now - one.since,
    )


def page_runs(leases: Leases) -> list[pb.PageRun]:
    """Every id once: runs of ids of one residue with one kind and one holder, by residue, then id. Pages of a carry under way
    are live on both sides; the holder of a borrowed page is the borrower."""
    plan: Plan = leases.plan
    places = [(_KINDS[kind], 0) for kind in leases.books.kinds()]
    for conversation, lease in leases.running.items():
        for page in lease.ids():
            places[page] = pb.PAGE_KIND_LIVE, conversation
        for page in lease.borrowed:
            places[page] = pb.PAGE_KIND_BORROWED, conversation
    runs: list[pb.PageRun] = []
    for residue in range(plan.residues):
        last: tuple[int, int] | None = None
        for page in range(residue, plan.pages, plan.residues):
            kind, conversation = places[page]
            if last == places[page]:
                runs[-1].count += 1
                continue
            last = places[page]
            owner = residue if plan.split else None
            run = pb.PageRun(first=page, count=1, stride=plan.residues, kind=kind, owner=owner, conversation=conversation)
            runs.append(run)
    return runs
