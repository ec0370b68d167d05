"""Keeping states: whether a conversation's state may be kept, what goes for it, and its life until its ids come back.

Source: design section 6. A state is asked for, granted (it holds its ids), kept (it can be resumed), forgotten by order, and
gone. Conversations may end at any point of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from latentpool.errors import RequestError
from latentpool.geometry import BLOCK
from latentpool.units import format_bytes
from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager.kept import DIGEST, Phase, Rules, State, Why, ending, extends
from services.pool_manager.lease import Answer, Ask, Lease

if TYPE_CHECKING:
    from services.pool_manager.leases import Leases


def answers(leases: Leases) -> Iterator[Answer]:
    """Grants or refuses what was asked, the first to ask first; those whose victims' pages are on the way back wait."""
    for ask in list(leases.asked.values()):
        outcome = _decide(leases, ask)
        if outcome is None:
            continue
        leases.asked.pop(ask.conversation)
        if isinstance(outcome, State):
            yield Answer(ask.conversation, outcome)
        else:
            leases.kept.counts.refused += 1
            leases.kept.last_refusal = outcome
            yield Answer(ask.conversation, None, outcome)


def kept(leases: Leases, name: int) -> State | None:
    """The round that keeps it is sent: it can be resumed from now on. None for one that is not granted."""
    state = leases.kept.states.get(name)
    if state is None or state.phase is not Phase.GRANTED:
        return None
    state.phase = Phase.KEPT
    leases.kept.counts.kept += 1
    leases.kept.touch(state, leases.clock())
    return state


def forgotten(leases: Leases, names: Sequence[int], fence: int) -> list[State]:
    """The workers have forgotten these, or they were never kept: their ids are free, where nobody else holds them, once rounds
    up to `fence` are answered. Returns those that were known. Raises ValueError for one that is in use."""
    known = [state for name in names if (state := leases.kept.states.get(name)) is not None]
    for state in known:
        if state.pinned:
            raise ValueError(f"kept state {state.state} is in use, and nobody ordered its end")
    for state in known:
        leases.kept.remove(state.state)
        leases.books.give_back(list(state.ids()), fence)
    return known


def forget(leases: Leases, state: State, why: Why) -> None:
    """Orders a state's end; its ids come back with `forgotten`."""
    leases.kept.forget(state, why)
    leases.orders.forget.append(state.state)


class EvictError(RequestError):
    """A state cannot be evicted by hand. what: "unknown" or "used"."""

    def __init__(self, what: Literal["unknown", "used"], message: str) -> None:
        super().__init__(message)
        self.what = what


def evict_by_hand(leases: Leases, names: Sequence[int]) -> list[int]:
    """Orders the end of these states, or of all that are not in use. Returns those whose end is ordered, now or before. Raises
    EvictError, and orders nothing, for one that is unknown or in use."""
    states = []
    for name in names:
        state = leases.kept.states.get(name)
        if state is None:
            raise EvictError("unknown", f"no kept state {name}: `latentpool kept` lists those that are")
        if state.pinned or state.phase is Phase.GRANTED:
            doing = "is being resumed" if state.pinned else "is being kept"
            raise EvictError("used", f"state {name} {doing}: try again in a moment")
        states.append(state)
    if not names:
        states = sorted(leases.kept.victims(), key=lambda state: state.state)
    for state in states:
        if state.phase is Phase.KEPT:
            forget(leases, state, "hand")
    return [state.state for state in states]


def being_kept(leases: Leases, conversation: int) -> bool:
    """Whether the conversation waits for an answer, or for the round that keeps its state: its pages must stay where they
    are."""
    return conversation in leases.asked or any(
        state.phase is Phase.GRANTED and state.conversation == conversation for state in leases.kept.states.values()
    )


def _decide(leases: Leases, ask: Ask) -> State | str | None:
    """The granted state, why not, or None: later."""
    rules, lease = leases.rules, leases.running.get(ask.conversation)
    reason = _reason(leases, ask, lease)
    if reason is not None:
        return reason
    assert rules is not None
    assert lease is not None
    ranks = range(leases.books.residues)
    if not ask.evicted and not (_affordable(leases, rules, lease, ask) and _free(leases, rules)):
        victims = _victims(leases, rules, lease, ask)
        if isinstance(victims, str):
            return victims
        for state, why in victims:
            forget(leases, state, why)
        leases.asked[ask.conversation] = replace(ask, evicted=True)
    if not _affordable(leases, rules, lease, ask):
        return _over_budget(leases, rules, lease, ask)
    if _free(leases, rules):
        return _grant(leases, rules, lease, ask)
    if min(map(leases.prospect, ranks)) >= rules.fixed_pages:
        return None
    return f"others took the pages that were to hold what is fixed: {rules.fixed_pages} of each rank are needed"


def _reason(leases: Leases, ask: Ask, lease: Lease | None) -> str | None:
    """Why it is out of the question, whatever is free."""
    rules, name = leases.rules, ask.conversation
    if rules is None:
        return f"this group keeps nothing: {leases.nothing_kept}"
    if lease is None:
        return f"conversation {name} does not run"
    if name in leases.parking:
        return f"conversation {name} is being parked"
    if lease.move is not None:
        return f"conversation {name} is being carried to rank {lease.move.owner}"
    if ask.at < rules.keep_from:
        return f"{ask.at} tokens are fewer than --keep-from {rules.keep_from}"
    if not ending(lease.request.blocks, ask.at):
        tokens = len(lease.request.blocks) // DIGEST * BLOCK
        return f"{ask.at} tokens are not whole blocks that conversation {name} can be found by: it has {tokens}"
    if (state := leases.kept.ends(lease.request.blocks, ask.at)) is not None:
        return f"state {state.state} ends there already"
    return None


def _new_rows(leases: Leases, lease: Lease, ask: Ask) -> list[int]:
    """Its pages up to `at`."""
    return lease.pages[: -(-ask.at // leases.plan.page_rows)]


def _free(leases: Leases, rules: Rules) -> bool:
    """Whether ids for what is fixed are free and unreserved now."""
    return all(leases.unreserved(rank) >= rules.fixed_pages for rank in range(leases.books.residues))


def _affordable(leases: Leases, rules: Rules, lease: Lease, ask: Ask, without: Sequence[State] = ()) -> bool:
    """Whether all states and this one are within the budget once those of `without` are gone."""
    held, used = leases.kept.held, list(leases.kept.used)
    if without:
        held = held.copy()
        for state in without:
            for page in state.ids():
                held[page] -= 1
                used[page % len(used)] -= not held[page]
    used[lease.owner] += sum(not held[page] for page in _new_rows(leases, lease, ask))
    return (max(used) + rules.fixed_pages) * rules.page_bytes <= rules.budget_bytes


def _victims(leases: Leases, rules: Rules, lease: Lease, ask: Ask) -> list[tuple[State, Why]] | str:
    """What goes for it, the least valuable first, or why nothing can."""
    chain = lease.request.blocks[: ask.at // BLOCK * DIGEST]
    left = _less_valuable(leases, rules, chain, ask.mark)
    chosen: list[tuple[State, Why]] = []
    ranks, waits = range(leases.books.residues), bool(leases.waiting) and not leases.waiting[0].request.idle
    while True:
        states = [state for state, _ in chosen]
        ids = [page for state in states for page in state.ids()]
        affordable = _affordable(leases, rules, lease, ask, states)
        short = _free(leases, rules) is False and min(leases.prospect(rank, ids) for rank in ranks) < rules.fixed_pages
        if affordable and not short:
            return chosen
        if short and waits:
            return "conversations wait for the pages that it would take"
        if not left:
            return _no_page(leases, rules) if short else _over_budget(leases, rules, lease, ask)
        chosen.append((left.pop(0), "pages" if affordable else "budget"))


def _less_valuable(leases: Leases, rules: Rules, chain: bytes, mark: pb.Mark.ValueType) -> list[State]:
    """Victims that a state of this chain may take the place of. One that a longer one extends, or soon will, is worth as much
    as its like only; any other is worth more than what was used before it, but for the one that the conversation may have come
    from: of the longer states that begin like it, the one used last."""
    victims = leases.kept.victims(chain)
    extended = mark == pb.MARK_REWIND or any(extends(state.chain, chain) for state in leases.kept.lasting)
    begin = chain[: -(-rules.keep_from // BLOCK) * DIGEST]
    kin = [
        state
        for state in leases.kept.lasting
        if len(state.chain) > len(chain) and state.chain.startswith(begin) and not leases.kept.extended(state, chain)
    ]
    parent = max(kin, key=lambda state: state.used, default=None)
    return [
        state
        for state in victims
        if leases.kept.extended(state, chain) or not (extended or (parent is not None and state is parent))
    ]


def _over_budget(leases: Leases, rules: Rules, lease: Lease, ask: Ask) -> str:
    alone = (len(_new_rows(leases, lease, ask)) + rules.fixed_pages) * rules.page_bytes
    budget = format_bytes(rules.budget_bytes)
    if alone > rules.budget_bytes:
        return f"a state of {ask.at} tokens takes {format_bytes(alone)} a rank, and --cache is {budget}"
    used = format_bytes(max(leases.kept.used) * rules.page_bytes)
    return f"kept states take {used} of {budget} a rank, and it is worth less than what is kept"


def _no_page(leases: Leases, rules: Rules) -> str:
    if any(leases.kept.lasting):
        return "no page is free for it, and it is worth less than what is kept"
    return f"no page is free for it: conversations hold them, and {rules.fixed_pages} of each rank are needed"


def _grant(leases: Leases, rules: Rules, lease: Lease, ask: Ask) -> State:
    """It holds its ids from now on, and has its place among the others."""
    rows = list(_new_rows(leases, lease, ask))
    leases.books.hold(rows)
    state = State(
        state=leases.kept.next_name(),
        conversation=ask.conversation,
        request_id=lease.request.request_id,
        at=ask.at,
        mark=ask.mark,
        owner=lease.owner,
        chain=lease.request.blocks[: ask.at // BLOCK * DIGEST],
        pages=rows,
        fixed=[page for rank in range(leases.books.residues) for page in leases.books.take(rank, rules.fixed_pages)],
        since=leases.clock(),
    )
    leases.kept.touch(state, state.since)
    leases.kept.add(state)
    return state
