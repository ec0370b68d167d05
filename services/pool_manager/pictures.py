"""What leases look like to operators: pages as runs, conversations, kept states."""

from __future__ import annotations

from collections.abc import Iterator

from latentpool.v1 import pool_admin_pb2 as pb
from services.pool_manager.books import Kind
from services.pool_manager.kept import Phase, State
from services.pool_manager.lease import Lease, Waiting
from services.pool_manager.leases import Leases

_KINDS = {
    Kind.FREE: pb.PAGE_KIND_FREE,
    Kind.LEASED: pb.PAGE_KIND_LIVE,
    Kind.FENCED: pb.PAGE_KIND_FENCED,
}


def pages(leases: Leases) -> pb.ListPagesResponse:
    return pb.ListPagesResponse(
        runs=page_runs(leases),
        pages=leases.plan.pages,
        free=sum(leases.books.free(residue) for residue in range(leases.books.residues)),
        reserved=sum(lease.quota for lease in leases.running.values()),
        page_rows=leases.plan.page_rows,
    )


def page_runs(leases: Leases) -> list[pb.PageRun]:
    """Every id once: runs of ids of one residue with one kind and the same holders, by residue, then id. Of several holders
    those with the lowest numbers are named. Pages of a carry under way are live on both sides; the holder of a borrowed page is
    the borrower."""
    plan, holders = leases.plan, leases.books.holders
    places = [(_KINDS[kind], 0, 0) for kind in leases.books.kinds()]
    for name in sorted(leases.kept.states, reverse=True):
        for page in leases.kept.states[name].ids():
            places[page] = pb.PAGE_KIND_KEPT, 0, name
    for conversation in sorted(leases.running, reverse=True):
        lease = leases.running[conversation]
        for page in lease.ids():
            places[page] = pb.PAGE_KIND_LIVE, conversation, places[page][2]
        for page in lease.borrowed:
            places[page] = pb.PAGE_KIND_BORROWED, conversation, 0
    runs: list[pb.PageRun] = []
    for residue in range(plan.residues):
        last: tuple[tuple[pb.PageKind.ValueType, int, int], int] | None = None
        owner = residue if plan.split else None
        for page in range(residue, plan.pages, plan.residues):
            here = places[page], holders(page)
            if last == here:
                runs[-1].count += 1
                continue
            last = here
            (kind, conversation, state), count = here
            run = pb.PageRun(first=page, count=1, stride=plan.residues, kind=kind, owner=owner)
            run.conversation, run.state, run.holders = conversation, state, count
            runs.append(run)
    return runs


def conversations(leases: Leases, now: float) -> Iterator[pb.ConversationInfo]:
    for name, lease in leases.running.items():
        info = _info(lease, now, lease.quota)
        info.pages, info.borrowed = len(lease.pages), len(lease.borrowed)
        info.state = _doing(leases, name, lease)
        info.cached_tokens = 0 if lease.resume is None else lease.resume.at
        info.rows = lease.rows or 0
        if leases.plan.split:
            info.owner = lease.owner
        if lease.move is not None:
            info.carried_to = lease.move.owner
        yield info
    for waiting in leases.waiting:
        info = _info(waiting, now, leases.quota(waiting.request))
        info.state = pb.CONVERSATION_STATE_WAITING
        yield info


def _doing(leases: Leases, name: int, lease: Lease) -> pb.ConversationState.ValueType:
    if lease.move is not None:
        return pb.CONVERSATION_STATE_CARRYING
    if name in leases.parking:
        return pb.CONVERSATION_STATE_PARKING
    if lease.rows is None:
        return pb.CONVERSATION_STATE_RUNNING
    return pb.CONVERSATION_STATE_DECODING if lease.decoding else pb.CONVERSATION_STATE_FILLING


def _info(one: Lease | Waiting, now: float, quota: int) -> pb.ConversationInfo:
    return pb.ConversationInfo(
        conversation=one.request.conversation,
        request_id=one.request.request_id,
        lane=one.request.lane,
        prompt_tokens=one.request.prompt_tokens,
        quota=quota,
        age_seconds=now - one.since,
        idle=one.request.idle,
    )


def kept(leases: Leases, now: float) -> pb.ListKeptResponse:
    """States that can be resumed, or will be; those whose end is ordered are left out."""
    rules, used = leases.rules, max(leases.kept.used)
    return pb.ListKeptResponse(
        kept=[_kept_info(leases, state, now) for state in leases.kept.lasting if state.phase is Phase.KEPT],
        bytes=0 if rules is None else used * rules.page_bytes,
        budget_bytes=0 if rules is None else rules.budget_bytes,
        counts=counts(leases),
        nothing_kept=leases.nothing_kept,
        last_refusal=leases.kept.last_refusal,
        keep_from=0 if rules is None else rules.keep_from,
    )


def counts(leases: Leases) -> pb.KeptCounts:
    found = leases.kept.counts
    return pb.KeptCounts(**{name: getattr(found, name) for name in type(found).__dataclass_fields__})


def _kept_info(leases: Leases, state: State, now: float) -> pb.KeptInfo:
    residues = leases.plan.residues
    alone = sum(leases.books.holders(page) == 1 for page in state.ids() if page % residues == state.owner)
    page_bytes = 0 if leases.rules is None else leases.rules.page_bytes
    return pb.KeptInfo(
        state=state.state,
        at=state.at,
        mark=state.mark,
        owner=state.owner if leases.plan.split else None,
        row_pages=len(state.pages),
        fixed_pages=len(state.fixed) // residues,
        bytes=alone * page_bytes,
        age_seconds=now - state.since,
        idle_seconds=now - state.used_at,
        hits=state.hits,
        extended=leases.kept.extended(state),
        pinned=state.pinned,
        request_id=state.request_id,
    )
