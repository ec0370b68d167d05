"""What is done when pages run out: park what is idle, recall what was lent, evict kept states, carry a conversation to another
owner, park one.

Source: design section 5. Every choice is by conversation id, rank and the order of states alone. An owner that runs dry goes
through that list in order until what comes back covers what it owes; for those that wait to be admitted, nobody is carried
or parked but the idle.

Carrying ends: it happens only while an owner owes a page that nothing covers, and covers at least one such page or, where
the one that moves is owed pages itself, brings them along. So there are no more carries than pages that were ever owed, and
none goes to and fro for nothing: the new owner had the room unreserved, with a page of slack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from latentpool.errors import RequestError
from services.pool_manager import keeping, placing
from services.pool_manager.kept import State
from services.pool_manager.lease import Lease, Move, Request

if TYPE_CHECKING:
    from services.pool_manager.leases import Leases


class CarryError(RequestError):
    """A carry that was asked for by hand cannot be done. what: "conversation" (it does not run), "rank" (there is none such)
    or "state" (not now, or not in this group)."""

    def __init__(self, what: Literal["conversation", "rank", "state"], message: str) -> None:
        super().__init__(message)
        self.what = what


def relieve(leases: Leases, owner: int) -> None:
    """Orders until what comes back to `owner` covers what it owes, or nothing is left to order: then a conversation that is on
    its way to this owner has pages here, or a state is in use, and the next to be chosen once that is over."""
    while leases.shortfall(owner) > 0:
        if (idle := _youngest_idle(leases, owner)) is not None:
            leases.park(idle)
        elif (borrower := _youngest_borrower(leases, owner)) is not None:
            leases.recall(borrower)
        elif (victim := _victim(leases)) is not None:
            keeping.forget(leases, victim, "pages")
        elif (move := _next_move(leases, owner)) is not None:
            leases.move(*move)
        elif (name := leases.youngest(owner)) is not None:
            leases.park(name)
        else:
            return


@dataclass(frozen=True, slots=True)
class _Wish:
    """A way to admit: so many pages of `owner`, while `state` is kept."""

    owner: int
    pages: int
    state: State | None = None


def make_room(leases: Leases, request: Request) -> None:
    """Orders for the first of those that wait, if it would fit with what that brings back, and not without: best where it goes
    on from a kept state. An idle one takes nobody's loan and parks nobody."""
    wishes = _wishes(leases, request)
    if any(leases.prospect(wish.owner) >= wish.pages for wish in wishes):
        return
    found = next((wish for wish in wishes if _would_fit(leases, wish, request.idle)), None)
    if found is None:
        return
    owner = found.owner
    while leases.prospect(owner) < found.pages:
        if not request.idle and (idle := _youngest_idle(leases, owner)) is not None:
            leases.park(idle)
        elif not request.idle and (borrower := _youngest_borrower(leases, owner)) is not None:
            leases.recall(borrower)
        elif (victim := _victim(leases, found.state)) is not None:
            keeping.forget(leases, victim, "pages")
        else:
            return


def _wishes(leases: Leases, request: Request) -> list[_Wish]:
    """The ways to admit, best first: on the state's owner; carried to where most would be free; afresh there."""
    quota, state = leases.quota(request), leases.kept.lookup(request.blocks)
    ranks = list(range(leases.books.residues))
    wishes = []
    if state is not None:
        wishes.append(_Wish(state.owner, quota - placing.whole_pages(leases, state), state))
        if placing.may_carry(leases, state, request):
            others = [rank for rank in ranks if rank != state.owner]
            wishes.append(_Wish(max(others, key=lambda rank: (_potential(leases, rank, state), -rank)), quota, state))
    if not request.idle:
        wishes.append(_Wish(max(ranks, key=lambda rank: (_potential(leases, rank), -rank)), quota))
    return wishes


def hopeless(leases: Leases, request: Request) -> bool:
    """Whether an idle one waits for nothing: its state is gone, or neither what can be ordered back nor the end of others that
    run would bring it the pages."""
    if leases.kept.lookup(request.blocks) is None:
        return True
    if any(not lease.request.idle for lease in leases.running.values()):
        return False
    return not any(_would_fit(leases, wish, idle=True) for wish in _wishes(leases, request))


def _would_fit(leases: Leases, wish: _Wish, idle: bool) -> bool:
    return _potential(leases, wish.owner, wish.state, idle) >= wish.pages


def _potential(leases: Leases, owner: int, state: State | None = None, idle: bool = False) -> int:
    """Pages that would be unreserved once everything came back that could be ordered for an admission, `state` excepted."""
    more = [page for victim in leases.kept.victims() if victim is not state for page in victim.ids()]
    if not idle:
        more += [
            page for name in leases.staying(owner) if leases.running[name].request.idle for page in leases.running[name].ids()
        ]
        more += [page for lease in leases.running.values() if not lease.recalled for page in lease.borrowed]
    return leases.prospect(owner, more)


def carry_by_hand(leases: Leases, conversation: int, owner: int | None) -> Move:
    """Orders one carry, to the rank with most unreserved pages where `owner` is None. Raises CarryError with numbers."""
    lease = _movable(leases, conversation)
    if owner is not None and not 0 <= owner < leases.books.residues:
        raise CarryError("rank", f"rank {owner}: this group has ranks 0 to {leases.books.residues - 1}")
    if owner == lease.owner:
        raise CarryError("state", f"conversation {conversation} is on rank {owner} already")
    target = roomiest(leases, lease.owner) if owner is None else owner
    needed, free = leases.move_size(conversation), max(0, leases.unreserved(target))
    if needed > free:
        raise CarryError(
            "state",
            f"rank {target} lacks pages: conversation {conversation} has {len(lease.pages)} and needs {needed} there with room "
            f"to go on, and {free} are free and not reserved",
        )
    return leases.move(conversation, target)


def _movable(leases: Leases, conversation: int) -> Lease:
    """The running conversation, if it can be carried at all."""
    if not leases.plan.split:
        raise CarryError("state", "this group is not split: every rank keeps every row, so there is nothing to carry")
    lease = leases.running.get(conversation)
    waiting = next((one for one in leases.waiting if one.request.conversation == conversation), None)
    known = lease or waiting
    if known is not None and known.request.idle:
        raise CarryError(
            "state",
            f"conversation {conversation} is idle work: it computes a reply again, to keep it, and rather ends than moves",
        )
    if lease is None:
        if waiting is not None:
            raise CarryError("state", f"conversation {conversation} waits for pages: it has no rows to carry yet")
        raise CarryError("conversation", f"no conversation {conversation}: `latentpool conversations` lists those that run")
    if conversation in leases.parking:
        raise CarryError("state", f"conversation {conversation} is being parked: it gives back its {len(lease.pages)} pages")
    if lease.move is not None:
        raise CarryError("state", f"conversation {conversation} is being carried to rank {lease.move.owner} already")
    if keeping.being_kept(leases, conversation):
        raise CarryError("state", f"conversation {conversation} is having its state kept: try again in a moment")
    return lease


def _youngest_borrower(leases: Leases, owner: int) -> int | None:
    """Of those that have pages of `owner` on loan and were not told to return them."""
    names = [name for name, lease in leases.running.items() if lease.owner != owner and lease.borrowed and not lease.recalled]
    return max(names, default=None)


def _youngest_idle(leases: Leases, owner: int) -> int | None:
    return max((name for name in leases.staying(owner) if leases.running[name].request.idle), default=None)


def _victim(leases: Leases, spared: State | None = None) -> State | None:
    """The least valuable state that is not in use. Each has pages of every owner."""
    return next((state for state in leases.kept.victims() if state is not spared), None)


def _next_move(leases: Leases, owner: int) -> tuple[int, int] | None:
    """(conversation, new owner): the youngest that another rank has room for."""
    if leases.books.residues == 1:
        return None
    target = roomiest(leases, owner)
    room = leases.unreserved(target)
    fit = [name for name in leases.staying(owner) if leases.move_size(name) <= room and not keeping.being_kept(leases, name)]
    return (max(fit), target) if fit else None


def roomiest(leases: Leases, owner: int) -> int:
    """The rank but `owner` with most unreserved pages, ties to the lowest."""
    others = [rank for rank in range(leases.books.residues) if rank != owner]
    return max(others, key=lambda rank: (leases.unreserved(rank), -rank))
