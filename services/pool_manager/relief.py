"""What is done when pages run out: recall what was lent, carry a conversation to another owner, park one.

Source: design section 5. Every choice is by conversation id and rank alone. An owner that runs dry recalls first, then
carries, then parks, until what comes back covers what it owes.

Carrying ends: it happens only while an owner owes a page that nothing covers, and covers at least one such page or, where
the one that moves is owed pages itself, brings them along. So there are no more carries than pages that were ever owed, and
none goes to and fro for nothing: the new owner had the room unreserved, with a page of slack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from latentpool.errors import RequestError
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
    """Orders recalls, carries and parks until what comes back to `owner` covers what it owes, or nothing is left to order:
    then a conversation that is on its way to this owner has pages here, and the next to be chosen once it has arrived."""
    while leases.shortfall(owner) > 0:
        if (borrower := _youngest_borrower(leases, owner)) is not None:
            leases.recall(borrower)
        elif (move := _next_move(leases, owner)) is not None:
            leases.move(*move)
        elif (name := leases.youngest(owner)) is not None:
            leases.park(name)
        else:
            return


def recall_for(leases: Leases, request: Request) -> None:
    """Recalls for the first of those that wait, if it would fit with what is lent, and not without."""
    quota, owners = leases.quota(request), range(leases.books.residues)
    if max(map(leases.prospect, owners)) >= quota:
        return
    owner = max(owners, key=lambda one: (leases.prospect(one) + leases.lent(one), -one))
    if leases.prospect(owner) + leases.lent(owner) < quota:
        return
    while leases.prospect(owner) < quota and (borrower := _youngest_borrower(leases, owner)) is not None:
        leases.recall(borrower)


def carry_by_hand(leases: Leases, conversation: int, owner: int | None) -> Move:
    """Orders one carry, to the rank with most unreserved pages where `owner` is None. Raises CarryError with numbers."""
    lease = _movable(leases, conversation)
    if owner is not None and not 0 <= owner < leases.books.residues:
        raise CarryError("rank", f"rank {owner}: this group has ranks 0 to {leases.books.residues - 1}")
    if owner == lease.owner:
        raise CarryError("state", f"conversation {conversation} is on rank {owner} already")
    target = _roomiest(leases, lease.owner) if owner is None else owner
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
    if lease is None:
        if any(one.request.conversation == conversation for one in leases.waiting):
            raise CarryError("state", f"conversation {conversation} waits for pages: it has no rows to carry yet")
        raise CarryError("conversation", f"no conversation {conversation}: `latentpool conversations` lists those that run")
    if conversation in leases.parking:
        raise CarryError("state", f"conversation {conversation} is being parked: it gives back its {len(lease.pages)} pages")
    if lease.move is not None:
        raise CarryError("state", f"conversation {conversation} is being carried to rank {lease.move.owner} already")
    return lease


def _youngest_borrower(leases: Leases, owner: int) -> int | None:
    """Of those that have pages of `owner` on loan and were not told to return them."""
    names = [name for name, lease in leases.running.items() if lease.owner != owner and lease.borrowed and not lease.recalled]
    return max(names, default=None)


def _next_move(leases: Leases, owner: int) -> tuple[int, int] | None:
    """(conversation, new owner): the youngest that another rank has room for."""
    if leases.books.residues == 1:
        return None
    target = _roomiest(leases, owner)
    room = leases.unreserved(target)
    fit = [name for name in leases.staying(owner) if leases.move_size(name) <= room]
    return (max(fit), target) if fit else None


def _roomiest(leases: Leases, owner: int) -> int:
    """The rank but `owner` with most unreserved pages, ties to the lowest."""
    others = [rank for rank in range(leases.books.residues) if rank != owner]
    return max(others, key=lambda rank: (leases.unreserved(rank), -rank))
