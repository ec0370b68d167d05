"""PoolAdmin: what operators read, and what they may do: carry a conversation, evict kept states."""

# ruff: noqa: N802  # gRPC names its handlers

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc
import grpc.aio

from latentpool.errors import LatentPoolError
from latentpool.v1 import pool_admin_pb2 as pb
from latentpool.v1 import pool_admin_pb2_grpc
from services.pool_manager import pictures
from services.pool_manager.group import Group
from services.pool_manager.keeping import EvictError
from services.pool_manager.leases import Leases
from services.pool_manager.plan import to_proto
from services.pool_manager.relief import CarryError
from services.pool_manager.session import Session

_CANNOT_CARRY = {
    "conversation": grpc.StatusCode.NOT_FOUND,
    "rank": grpc.StatusCode.INVALID_ARGUMENT,
    "state": grpc.StatusCode.FAILED_PRECONDITION,
}
_CANNOT_EVICT = {"unknown": grpc.StatusCode.NOT_FOUND, "used": grpc.StatusCode.FAILED_PRECONDITION}
_INTERVAL = 1.0
_SHORTEST = 0.2


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
    async def ended(self) -> LatentPoolError | None: ...


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
        return pictures.pages(leases)

    async def ListConversations(
        self,
        request: pb.ListConversationsRequest,
        context: grpc.aio.ServicerContext[pb.ListConversationsRequest, pb.ListConversationsResponse],
    ) -> pb.ListConversationsResponse:
        return self._conversations()

    async def GetRanks(
        self, request: pb.GetRanksRequest, context: grpc.aio.ServicerContext[pb.GetRanksRequest, pb.GetRanksResponse]
    ) -> pb.GetRanksResponse:
        return self._ranks()

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

    async def ListKept(
        self, request: pb.ListKeptRequest, context: grpc.aio.ServicerContext[pb.ListKeptRequest, pb.ListKeptResponse]
    ) -> pb.ListKeptResponse:
        return self._kept()

    async def Evict(
        self, request: pb.EvictRequest, context: grpc.aio.ServicerContext[pb.EvictRequest, pb.EvictResponse]
    ) -> pb.EvictResponse:
        """Answers once the workers have forgotten them; UNAVAILABLE without a router, or where it went before."""
        session = self._view.session
        if session is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no router serves this group: nothing is kept")
        assert session is not None
        try:
            names, gone = session.evict(request.states)
        except EvictError as error:
            await context.abort(_CANNOT_EVICT[error.what], str(error))
            raise
        if not await gone:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the router went, and everything that was kept with it")
        return pb.EvictResponse(evicted=names)

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchResponse]
    ) -> AsyncIterator[pb.WatchResponse]:
        """Everything at once, again after each interval, until the caller goes or the group has ended."""
        interval = request.interval_seconds if request.HasField("interval_seconds") else _INTERVAL
        if not interval >= _SHORTEST:
            text = f"interval_seconds {interval:g}: at least {_SHORTEST:g} is needed"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        end = asyncio.create_task(self._view.ended())
        try:
            while True:
                yield self._everything()
                if end.done():
                    return
                await asyncio.wait({end}, timeout=interval)
        finally:
            end.cancel()

    # ---- inside ------------------------------------------------------------------------------------------------

    def _no_plan(self) -> str:
        group = self._view.group
        return f"no plan yet: the group is {group.state} ({len(group.members)} of {group.world} workers have joined)"

    def _everything(self) -> pb.WatchResponse:
        leases = self._view.leases
        return pb.WatchResponse(
            pages=None if leases is None else pictures.pages(leases),
            conversations=self._conversations(),
            kept=self._kept(),
            ranks=self._ranks(),
        )

    def _conversations(self) -> pb.ListConversationsResponse:
        leases = self._view.leases
        rows = [] if leases is None else pictures.conversations(leases, self._clock())
        return pb.ListConversationsResponse(conversations=rows)

    def _kept(self) -> pb.ListKeptResponse:
        leases = self._view.leases
        return pb.ListKeptResponse(nothing_kept=self._no_plan()) if leases is None else pictures.kept(leases, self._clock())

    def _ranks(self) -> pb.GetRanksResponse:
        group = self._view.group
        return pb.GetRanksResponse(
            ranks=[self._rank(group, rank) for rank in range(group.world)],
            world=group.world,
            epoch=group.epoch,
            term=self._view.term,
            group_state=group.state,
            router=self._view.router_name,
        )

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
