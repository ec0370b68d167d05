"""A group against a clock of its own: suspicion, silence, and what is said once only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from lease_model import small_plan
from manager_fakes import GIB, identity

from latentpool.errors import EpochError, LatentPoolError
from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager.group import Group


@dataclass
class Ear:
    heard: list[str | None] = field(default_factory=list)
    closed: int = 0

    def send(self, message: pb.JoinResponse, /) -> None:
        self.heard.append(message.WhichOneof("message"))

    def close(self) -> None:
        self.closed += 1


class Stage:
    def __init__(self) -> None:
        self.rooms: list[list[int]] = []
        self.ready = 0
        self.ends: list[tuple[LatentPoolError | None, str]] = []
        self.ears = [Ear(), Ear()]
        self.group = Group(
            world=2,
            epoch=1,
            started=100.0,
            make_plan=self.plan,
            on_ready=self.count,
            on_end=lambda error, reason: self.ends.append((error, reason)),
            join_timeout=300.0,
            dead_after=30.0,
        )

    def plan(self, _geometry: Any, _identity: Any, room: list[int]) -> Any:
        self.rooms.append(room)
        return small_plan(1, True, 9)

    def count(self) -> None:
        self.ready += 1

    def join(self, rank: int, now: float) -> Any:
        return self.group.join(pb.Hello(rank=rank, identity=identity(), host=f"host{rank}"), self.ears[rank], now)


@pytest.mark.parametrize(
    ("hosts", "assumed", "rooms"),
    [
        (("a", "b"), (10 * GIB, 10 * GIB), [9 * GIB, 8 * GIB]),  # a host each: nothing is shared
        (("a", "a"), (10 * GIB, 10 * GIB), [4 * GIB, 3 * GIB]),  # half of what each assumed
        (("a", "a"), (10 * GIB, 0), [9 * GIB, 8 * GIB]),  # one stated its memory: the other has all that is assumed
    ],
)
def test_ranks_of_one_host_share_the_memory_they_assume(
    hosts: tuple[str, str], assumed: tuple[int, int], rooms: list[int]
) -> None:
    stage = Stage()
    for rank, host in enumerate(hosts):
        member = stage.group.join(pb.Hello(rank=rank, identity=identity(), host=host), stage.ears[rank], 0.0)
        stage.group.loaded(member, pb.Loaded(room_bytes=(9 - rank) * GIB, assumed_memory_bytes=assumed[rank]))
    assert stage.rooms == [rooms]


def test_a_share_of_assumed_memory_with_nothing_left_is_refused_with_numbers() -> None:
    stage = Stage()
    for rank in (0, 1):
        member = stage.group.join(pb.Hello(rank=rank, identity=identity(), host="a"), stage.ears[rank], 0.0)
        stage.group.loaded(member, pb.Loaded(room_bytes=GIB, assumed_memory_bytes=4 * GIB))
    assert "ranks 0, 1 share 4.00 GiB of a, half of what it has available" in (stage.group.ended or "")
    assert "state --memory on each" in (stage.group.ended or "")


def test_states_on_the_road() -> None:
    stage = Stage()
    group = stage.group
    one = stage.join(1, now=100.0)
    assert [group.state_of(rank, 100.0) for rank in (0, 1)] == ["absent", "loading"]
    group.loaded(one, pb.Loaded(room_bytes=2 * GIB))
    zero = stage.join(0, now=101.0)
    assert (group.state, group.state_of(1, 101.0), stage.rooms) == ("planning", "loaded", [])
    group.loaded(zero, pb.Loaded(room_bytes=GIB))
    assert stage.rooms == [[GIB, 2 * GIB]]
    assert group.state == "laying out"
    group.laid_out(zero)
    group.laid_out(zero)
    assert stage.ready == 0
    group.laid_out(one)
    group.laid_out(one)
    assert (stage.ready, group.state, group.state_of(0, 102.0)) == (1, "ready", "ready")
    assert stage.ears[0].heard == stage.ears[1].heard == ["lay_out"]


def test_silence_is_suspected_after_3_s_and_dead_only_after_dead_after() -> None:
    stage = Stage()
    zero, one = stage.join(0, now=100.0), stage.join(1, now=100.0)
    assert stage.group.state_of(0, 103.0) == "loading"
    assert stage.group.state_of(0, 103.1) == "suspected"
    one.seen = 120.0
    for now in (110.0, 120.0, 130.0):
        stage.group.tick(now)
    assert stage.ends == []
    zero.seen = 130.0
    assert stage.group.state_of(0, 131.0) == "loading"
    stage.group.tick(140.0)
    assert stage.ends == []
    stage.group.tick(150.1)
    error, reason = stage.ends[0]
    assert isinstance(error, EpochError)
    assert reason == str(error) == "rank 1 on host1 has been silent for 30 s (--dead-after)"


def test_a_manager_that_slept_blames_nobody_for_it() -> None:
    """Stopped for a minute, it heard no heartbeat: it waits for one before it judges."""
    stage = Stage()
    zero, one = stage.join(0, now=100.0), stage.join(1, now=100.0)
    stage.group.tick(101.0)
    stage.group.tick(161.0)
    assert stage.ends == []
    zero.seen = 162.0
    for now in (171.0, 181.0):
        stage.group.tick(now)
    assert (stage.ends, one.seen) == ([], 158.0)
    stage.group.tick(188.1)
    assert stage.ends[0][1] == "rank 1 on host1 has been silent for 30 s (--dead-after)"


def test_nobody_joined() -> None:
    stage = Stage()
    stage.group.tick(400.0)
    assert stage.ends == []
    stage.group.tick(400.1)
    assert stage.ends[0][1] == "ranks 0, 1 have not joined in 300 s (joined: none)"


def test_the_first_end_counts() -> None:
    stage = Stage()
    zero, one = stage.join(0, now=100.0), stage.join(1, now=100.0)
    stage.group.failed(zero, pb.Failed(message="first"))
    stage.group.failed(one, pb.Failed(message="second"))
    stage.group.lost(zero)
    stage.group.end(None, "stopped by its operator")
    stage.group.tick(1e9)
    assert [reason for _, reason in stage.ends] == ["rank 0: first"]
    assert [(ear.heard, ear.closed) for ear in stage.ears] == [(["stop"], 1)] * 2
    assert stage.group.state == "rank 0: first"


def test_ready_before_a_plan_is_the_workers_mistake() -> None:
    stage = Stage()
    stage.group.laid_out(stage.join(0, now=100.0))
    assert stage.ends[0][1] == "rank 0 says it is ready before there is a plan"
    assert stage.ready == 0
