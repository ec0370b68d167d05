"""The pool manager's numbers for Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from latentpool.metrics import Sample, gauge
from latentpool.v1 import pool_admin_pb2 as pb
from services.pool_manager.admin import page_runs
from services.pool_manager.group import Group
from services.pool_manager.leases import Leases

_KINDS = {
    pb.PAGE_KIND_FREE: "free",
    pb.PAGE_KIND_LIVE: "live",
    pb.PAGE_KIND_BORROWED: "borrowed",
    pb.PAGE_KIND_FENCED: "fenced",
}
STATES = ("running", "waiting", "parking", "carrying")


def samples(group: Group, leases: Leases | None, clock: Callable[[], float] = time.monotonic) -> Iterator[Sample]:
    """`leases` None: before there is a plan; clock: the group's."""
    now = clock()
    ready = sum(group.state_of(rank, now) == "ready" for rank in range(group.world))
    yield gauge("latentpool_ranks_ready", "Ranks that are ready and heard of.", ready)
    yield gauge("latentpool_ranks", "Ranks of the group.", group.world)
    if leases is None:
        return
    pages: Counter[tuple[str, str]] = Counter()
    for run in page_runs(leases):
        pages[str(run.owner) if run.HasField("owner") else "all", _KINDS[run.kind]] += run.count
    for owner in [str(rank) for rank in range(leases.plan.world)] if leases.plan.split else ["all"]:
        for kind in _KINDS.values():
            help = "Pages of the pool by owner (all: every rank keeps every row) and by what they hold."
            yield gauge("latentpool_pages", help, pages[owner, kind], owner=owner, kind=kind)
    states = Counter({"waiting": len(leases.waiting)})
    for conversation, lease in leases.running.items():
        moves = "carrying" if lease.move is not None else "parking" if conversation in leases.parking else "running"
        states[moves] += 1
    for state in STATES:
        yield gauge("latentpool_conversations", "Conversations that the pool manager knows.", states[state], state=state)
