"""Where a conversation goes when it is admitted: to the owner of a kept state, after a carry to another rank, or afresh.

Source: design sections 5 and 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.pool_manager import relief
from services.pool_manager.kept import State
from services.pool_manager.lease import Lease, Move, Place, Request, Resume

if TYPE_CHECKING:
    from services.pool_manager.leases import Leases


def place(leases: Leases, request: Request) -> Place | None:
    """Where it can be admitted now, whoever waits; None: nowhere. Best is the owner of the longest kept state that it goes on
    from, then a rank with room that the state is carried to, then the usual owner, afresh. An idle one only goes on."""
    if not leases.plan.paged:
        window = leases.plan.window_pages
        return Place(0, window) if leases.books.can_take_run(request.lane * window, window) else None
    quota, state = leases.quota(request), leases.kept.lookup(request.blocks)
    if state is not None:
        own = quota - whole_pages(leases, state)
        if own <= leases.unreserved(state.owner):
            return Place(state.owner, own, state)
        if may_carry(leases, state, request) and quota <= leases.unreserved(to := relief.roomiest(leases, state.owner)):
            return Place(state.owner, quota, state, to)
    if request.idle:
        return None
    owner = leases.owner()
    return Place(owner, quota) if quota <= leases.unreserved(owner) else None


def whole_pages(leases: Leases, state: State) -> int:
    """Pages of a state that those who resume it share; a partly filled last one is copied."""
    return state.at // leases.plan.page_rows


def may_carry(leases: Leases, state: State, request: Request) -> bool:
    """Whether a state is worth being carried to where the request has room."""
    return leases.rules is not None and leases.plan.split and not request.idle and state.at >= leases.rules.carry_from


def lease(leases: Leases, request: Request, there: Place) -> Lease:
    """Takes the pages of its place: what it shares with a state comes first, and is pinned until it is resumed."""
    made = Lease(request, there.owner, leases.quota(request), [], leases.clock())
    if not leases.plan.paged:
        made.pages = leases.books.take_run(request.lane * there.pages, there.pages)
    else:
        _take(leases, made, there)
    _look_up(leases, made, there)
    leases.running[request.conversation] = made
    return made


def _take(leases: Leases, made: Lease, there: Place) -> None:
    name, state = made.request.conversation, there.state
    if state is not None:
        made.pages = state.pages[: None if there.to is not None else whole_pages(leases, state)]
        made.shared, made.resume = len(made.pages), Resume(state.state, state.at, state.mark)
        leases.books.hold(made.pages)
        state.pins.add(name)
    if there.to is None:
        made.pages = made.pages + leases.books.take(there.owner, there.pages)
    else:
        made.move = Move(name, there.to, leases.books.take(there.to, there.pages))
        leases.orders.carry.append(made.move)
    if state is None:
        made.borrowed = leases.lend(made.request, there.owner)


def _look_up(leases: Leases, made: Lease, there: Place) -> None:
    """Counts what came of the lookup, and what the prompt has in common with earlier ones."""
    blocks, kept, counts, state = made.request.blocks, leases.kept, leases.kept.counts, there.state
    if not blocks:
        return
    if state is not None:
        if not made.request.idle:  # which goes on from its own conversation's state
            counts.hits += 1
            counts.hit_tokens += state.at
            counts.carried_hits += there.to is not None
            state.hits += 1
        kept.touch(state, leases.clock())
    elif (found := kept.lookup(blocks)) is None:
        counts.misses_unknown += 1
    elif leases.rules is not None and found.at < leases.rules.carry_from:
        counts.misses_short += 1
    else:
        counts.misses_room += 1
    if not made.request.idle:
        made.shared_prefix = kept.shared_prefix(blocks, 0 if state is None else state.at)
        kept.prompts.remember(blocks)
