"""The workers of a group, from joining to ready to the end of the epoch. Knows no gRPC: streams are outlets.

A group lives for one epoch: join, load, room, plan, lay out, ready. Anything that ends one worker ends it (design section 7:
hard evidence at once, silence after a while).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from latentpool.errors import EpochError, HandshakeError, LatentPoolError, LinkError, SetupError
from latentpool.geometry import Geometry
from latentpool.units import format_bytes
from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager.agreement import check_identity, check_rank, geometry_of
from services.pool_manager.plan import Plan, to_proto

log = structlog.get_logger()

SUSPECTED_AFTER = 3.0
"""Seconds of silence after which a worker is shown as suspected."""


class Outlet(Protocol):
    """The sending side of a worker's stream; both return at once."""

    def send(self, message: pb.JoinResponse, /) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Member:
    """A worker that joined. `seen` is when it last said anything."""

    rank: int
    hello: pb.Hello
    outlet: Outlet
    seen: float
    loaded: pb.Loaded | None = None
    ready: bool = False
    heartbeat: pb.Heartbeat = field(default_factory=pb.Heartbeat)


@dataclass(slots=True)
class Group:
    """Membership of one epoch. make_plan gets the geometry, the first worker's identity and every rank's reported room, and
    raises SetupError to refuse; on_ready and on_end are each called at most once."""

    world: int
    epoch: int
    started: float
    make_plan: Callable[[Geometry, pb.Identity, list[int]], Plan]
    on_ready: Callable[[], None]
    on_end: Callable[[LatentPoolError | None, str], None]
    join_timeout: float
    dead_after: float
    members: dict[int, Member] = field(default_factory=dict)
    plan: Plan | None = None
    first: Member | None = None
    ended: str | None = None
    ticked: float = field(init=False)
    """When it last looked at who is silent."""
    broken_links: dict[int, LinkError] = field(default_factory=dict)
    """What ranks said of their links to others, in that order; the others may know better until the next look but one."""
    broken_at: float = 0.0

    def __post_init__(self) -> None:
        self.ticked = self.started

    # ---- asking ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.ended is None and len(self.members) == self.world and all(one.ready for one in self.members.values())

    @property
    def state(self) -> str:
        """What operators read."""
        if self.ended is not None:
            return self.ended
        if len(self.members) < self.world:
            return "joining"
        if self.plan is None:
            return "planning"
        return "ready" if self.ready else "laying out"

    @property
    def identity(self) -> pb.Identity:
        """What all members agreed on. Only once one has joined."""
        assert self.first is not None
        return self.first.hello.identity

    def ranks(self) -> list[Member]:
        """Members in rank order."""
        return [self.members[rank] for rank in sorted(self.members)]

    # ---- what workers say ----------------------------------------------------------------------------------------

    def join(self, hello: pb.Hello, outlet: Outlet, now: float) -> Member:
        """Takes a worker in. Raises HandshakeError if it does not fit."""
        rank, identity = hello.rank, hello.identity
        check_rank(rank, identity, self.world)
        other = self.members.get(rank)
        if other is not None:
            raise HandshakeError(
                f"rank {rank} has joined already, from {other.hello.host} ({other.hello.address}): "
                f"give the worker on {hello.host} ({hello.address}) another --rank"
            )
        if self.first is not None:
            check_identity(rank, identity, self.first.rank, self.identity)
        else:
            geometry_of(identity)
        member = self.members[rank] = Member(rank, hello, outlet, now)
        self.first = self.first or member
        log.info("worker joined", rank=rank, host=hello.host, address=hello.address, joined=len(self.members))
        return member

    def loaded(self, member: Member, message: pb.Loaded) -> None:
        """A worker has read its shard; the last one brings the plan."""
        member.loaded = message
        log.info("worker loaded", rank=member.rank, room_bytes=message.room_bytes, resident_bytes=message.resident_bytes)
        loads = [one.loaded for one in self.ranks() if one.loaded is not None]
        if len(loads) < self.world or self.plan is not None:
            return
        try:
            geometry = geometry_of(self.identity)
            self.plan = self.make_plan(geometry, self.identity, [self._room(one) for one in self.ranks()])
        except SetupError as error:
            self.end(error)
            return
        links = [load.link_address for load in loads]
        self.broadcast(pb.JoinResponse(lay_out=pb.LayOut(plan=to_proto(self.plan), link_addresses=links, epoch=self.epoch)))

    def _room(self, member: Member) -> int:
        """Bytes. Ranks of one host that each assumed half of its memory share that half. Raises SetupError if nothing is
        left."""
        loaded = member.loaded
        assert loaded is not None
        assumed = loaded.assumed_memory_bytes
        sharers = [
            one.rank
            for one in self.ranks()
            if one.hello.host == member.hello.host and one.loaded is not None and one.loaded.assumed_memory_bytes
        ]
        if not assumed or len(sharers) == 1:
            return loaded.room_bytes
        room = loaded.room_bytes - assumed + assumed // len(sharers)
        if room <= 0:
            raise SetupError(
                f"ranks {', '.join(map(str, sharers))} share {format_bytes(assumed)} of {member.hello.host}, half of what "
                f"it has available, and nothing of rank {member.rank}'s part is left after loading: state --memory on each"
            )
        return room

    def laid_out(self, member: Member) -> None:
        """A worker's arena and links are ready; the last one makes the group ready."""
        if self.plan is None:
            self.end(EpochError(f"rank {member.rank} says it is ready before there is a plan"))
        if self.ended is not None or member.ready:
            return
        member.ready = True
        log.info("worker ready", rank=member.rank)
        if self.ready:
            self.on_ready()

    def failed(self, member: Member, message: pb.Failed) -> None:
        """Hard evidence: the engine or a link is gone. A broken link is often what a peer's trouble looks like from here: the
        peer has a moment to say what it was."""
        text = f"rank {member.rank}: {message.message}"
        if not message.HasField("peer"):
            self.end(EpochError(text) if member.ready else SetupError(text))
        else:
            self.broken_at = self.broken_at if self.broken_links else self.ticked
            self.broken_links[member.rank] = LinkError(f"{text} (its link to rank {message.peer})", rank=message.peer)

    def lost(self, member: Member) -> None:
        """A worker's stream ended."""
        if member.rank in self.broken_links:
            return  # it has said why
        self.end(EpochError(f"rank {member.rank} on {member.hello.host} has gone: its stream to the pool manager ended"))

    # ---- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Ends the group where a worker never joined or has been silent for too long. A manager that slept itself (stopped, or
        its machine suspended) has not listened: everybody gets that time back."""
        if self.broken_links and self.ticked > self.broken_at:
            self.end(next(iter(self.broken_links.values())))
        slept, self.ticked = now - self.ticked, now
        if slept > self.dead_after / 2:
            log.warning("this manager was stopped for a while", seconds=round(slept, 1))
            for member in self.ranks():
                member.seen = max(member.seen, now - SUSPECTED_AFTER)
        missing = [rank for rank in range(self.world) if rank not in self.members]
        if missing and now - self.started > self.join_timeout:
            joined = ", ".join(map(str, sorted(self.members))) or "none"
            who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
            self.end(SetupError(f"{who} not joined in {self.join_timeout:g} s (joined: {joined})"))
        for member in self.ranks():
            if now - member.seen > self.dead_after:
                host = member.hello.host
                self.end(EpochError(f"rank {member.rank} on {host} has been silent for {self.dead_after:g} s (--dead-after)"))

    def state_of(self, rank: int, now: float) -> str:
        """absent | loading | loaded | ready | suspected"""
        member = self.members.get(rank)
        if member is None:
            return "absent"
        if now - member.seen > SUSPECTED_AFTER:
            return "suspected"
        return "ready" if member.ready else "loaded" if member.loaded is not None else "loading"

    # ---- ending --------------------------------------------------------------------------------------------------

    def broadcast(self, message: pb.JoinResponse) -> None:
        for member in self.ranks():
            member.outlet.send(message)

    def end(self, error: LatentPoolError | None, reason: str = "") -> None:
        """Ends the epoch: error None is an operator's orderly stop for `reason`. Only the first call counts."""
        if self.ended is not None:
            return
        self.ended = str(error) if error is not None else reason
        log.info("epoch ended", epoch=self.epoch, reason=self.ended, orderly=error is None)
        self.broadcast(pb.JoinResponse(stop=pb.Stop(reason=self.ended, orderly=error is None)))
        for member in self.ranks():
            member.outlet.close()
        self.on_end(error, self.ended)
