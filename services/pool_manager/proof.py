"""The proof that leases are whole: what holds between leases, states, what is owed, and the id book (design section 5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from services.pool_manager.kept import Phase, State
from services.pool_manager.lease import Lease

if TYPE_CHECKING:
    from services.pool_manager.leases import Leases


def check_integrity(leases: Leases) -> list[str]:
    """What is wrong, [] if nothing: the book holds; every id has one holder that writes it; every lease has its quota, from one
    residue, within a window, and its loan and its move are of the right residues; states have their ids, within the budget, and
    are pinned by those that run; only those that run park or are owed, no more than a window has and comes free; the queue is
    in order."""
    running, states = leases.running.values(), leases.kept.states.values()
    held = [*(list(lease.ids()) for lease in running), *(list(state.ids()) for state in states)]
    violations = leases.books.check_integrity(held)
    writers = Counter(page for lease in running for page in list(lease.ids())[lease.shared :])
    writers.update(page for state in states for page in state.fixed)
    violations += [f"id {page} is leased {count} times" for page, count in sorted(writers.items()) if count > 1]
    violations += [text for lease in running for text in _lease_violations(leases, lease)]
    violations += [text for state in states for text in _state_violations(leases, state)]
    violations += _budget_violations(leases)
    staying = {name for owner in range(leases.books.residues) for name in leases.staying(owner)}
    for what, names, allowed in (
        ("parks", leases.parking, {name for name, lease in leases.running.items() if lease.move is None}),
        ("is owed pages", leases.owed.keys(), staying),
    ):
        violations += [f"conversation {name} {what}, but does not run" for name in sorted(names - allowed)]
    if violations:
        return violations
    for owner in range(leases.books.residues):
        if leases.shortfall(owner) > 0 and leases.youngest(owner) is not None:
            violations.append(f"rank {owner} owes {leases.shortfall(owner)} pages more than come free, and nobody parks")
    turns = [one.request.turn for one in leases.waiting]
    if turns != sorted(turns):
        violations.append(f"the queue is out of order: {[one.request.conversation for one in leases.waiting]}")
    return violations


def _lease_violations(leases: Leases, lease: Lease) -> Iterator[str]:
    name, window, residues = lease.request.conversation, leases.plan.window_pages, leases.books.residues
    owed, move = leases.owed.get(name, 0), lease.move
    most = max(len(lease.pages), 0 if move is None else len(move.pages))
    if not lease.quota <= most <= window - owed:
        yield f"conversation {name} has {most} pages and is owed {owed}: its quota is {lease.quota}, a window {window}"
    if any(page % residues != lease.owner for page in lease.pages):
        yield f"conversation {name} has pages that rank {lease.owner} does not own"
    others = [rank for rank in range(residues) if rank != lease.owner]
    if [page % residues for page in lease.borrowed] != others * leases.slots_lent(lease):
        yield f"conversation {name} borrows pages that are not slots of all ranks but {lease.owner}: {lease.borrowed}"
    if move is not None and (move.owner == lease.owner or any(page % residues != move.owner for page in move.pages)):
        yield f"conversation {name} moves from rank {lease.owner} to pages that rank {move.owner} does not own"
    if move is not None and not len(lease.pages) <= len(move.pages) <= window:
        yield f"conversation {name} moves {len(lease.pages)} pages to {len(move.pages)}: a window has {window}"


def _state_violations(leases: Leases, state: State) -> Iterator[str]:
    name, residues, rules = state.state, leases.books.residues, leases.rules
    each = 0 if rules is None else rules.fixed_pages
    slots = -(-state.at // leases.plan.page_rows)
    if len(state.pages) != slots or any(page % residues != state.owner for page in state.pages):
        yield f"state {name} has {len(state.pages)} pages for {state.at} tokens, or some that rank {state.owner} does not own"
    if [page % residues for page in state.fixed] != [rank for rank in range(residues) for _ in range(each)]:
        yield f"state {name} has not {each} fixed pages of every rank: {state.fixed}"
    for conversation in sorted(state.pins):
        lease = leases.running.get(conversation)
        if lease is None or lease.resume is None or lease.resume.state != name:
            yield f"state {name} is pinned by conversation {conversation}, which does not resume it"
    if state.pinned and state.phase is not Phase.KEPT:
        yield f"state {name} is in use, and {state.phase.value}"


def _budget_violations(leases: Leases) -> Iterator[str]:
    kept, rules = leases.kept, leases.rules
    held = Counter(page for state in kept.lasting for page in state.ids())
    used = [sum(page % kept.residues == rank for page in held) for rank in range(kept.residues)]
    if held != kept.held or used != kept.used:
        yield f"kept states count {kept.used} pages a rank, and hold {used}"
    if rules is not None and max(used) * rules.page_bytes > rules.budget_bytes:
        yield f"kept states take {max(used) * rules.page_bytes} bytes a rank: their budget is {rules.budget_bytes}"
