"""The pool manager's numbers for Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from latentpool.metrics import Sample, counter, gauge
from latentpool.v1 import pool_admin_pb2 as pb
from services.pool_manager.group import Group
from services.pool_manager.kept import Phase
from services.pool_manager.leases import Leases
from services.pool_manager.pictures import page_runs

_KINDS = {
    pb.PAGE_KIND_FREE: "free",
    pb.PAGE_KIND_LIVE: "live",
    pb.PAGE_KIND_BORROWED: "borrowed",
    pb.PAGE_KIND_FENCED: "fenced",
    pb.PAGE_KIND_KEPT: "kept",
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
    yield from _kept_samples(leases)


def _kept_samples(leases: Leases) -> Iterator[Sample]:
    kept, counts, rules = leases.kept, leases.kept.counts, leases.rules
    page_bytes, budget = (0, 0) if rules is None else (rules.page_bytes, rules.budget_bytes)
    phases = Counter(state.phase for state in kept.states.values())
    for phase in Phase:
        yield gauge("latentpool_kept_states", "Kept states by how far they are.", phases[phase], phase=phase.value)
    for rank, pages in enumerate(kept.used):
        owner = rank if leases.plan.split else "all"
        yield gauge("latentpool_kept_bytes", "Bytes that kept states take on a rank.", pages * page_bytes, owner=owner)
    yield gauge("latentpool_kept_budget_bytes", "Bytes that kept states may take on a rank.", budget)
    yield counter("latentpool_resumes_total", "Prompts that went on from a kept state.", counts.hits)
    help = "Prompts that went on from a kept state whose rows moved to another rank."
    yield counter("latentpool_resumes_carried_total", help, counts.carried_hits)
    help = "Prompt tokens that were resumed instead of computed."
    yield counter("latentpool_resumed_tokens_total", help, counts.hit_tokens)
    for reason, count in (
        ("unknown", counts.misses_unknown),
        ("room", counts.misses_room),
        ("short", counts.misses_short),
    ):
        help = "Prompts that were looked up and computed afresh, by reason: nothing is kept, no room, too short to be carried."
        yield counter("latentpool_resume_misses_total", help, count, reason=reason)
    yield counter("latentpool_keeps_total", "States that were kept.", counts.kept)
    yield counter("latentpool_keeps_refused_total", "States that were not kept though it was asked.", counts.refused)
    for reason, count in (
        ("pages", counts.evicted_for_pages),
        ("budget", counts.evicted_for_budget),
        ("hand", counts.evicted_by_hand),
    ):
        help = "Kept states that were evicted, by reason: for pages, for the budget, by hand."
        yield counter("latentpool_evictions_total", help, count, reason=reason)
