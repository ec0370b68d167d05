"""Conversations with made-up blocks over small leases that keep states, for tests of kept states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from lease_model import small_plan

from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager import keeping
from services.pool_manager.kept import Rules, State
from services.pool_manager.lease import Answer, Lease, Refusal, Request, Waiting
from services.pool_manager.leases import Leases

BLOCK = 64
ROWS = 128
HISTORY, REWIND, SHARED, REPLY = pb.MARK_HISTORY, pb.MARK_REWIND, pb.MARK_SHARED, pb.MARK_REPLY

MARKS = (HISTORY, REWIND, SHARED, REPLY)


def digests(story: Sequence[object]) -> bytes:
    """Chained digests of a prompt whose blocks are these."""
    chain, last = b"", b""
    for block in story:
        last = blake2b(last + repr(block).encode(), digest_size=16).digest()
        chain += last
    return chain


def keepers(
    residues: int, owner_pages: int, *, budget: int = 1000, fixed: int = 1, window: int = 9, keep: int = 64, carry: int = 128
) -> Leases:
    """Leases of so many pages an owner, of two blocks each; budget: pages a rank that states may take."""
    plan = replace(
        small_plan(residues, True, owner_pages, 16), page_rows=ROWS, window_pages=window, context=(window - 1) * ROWS
    )
    rules = Rules(fixed_pages=fixed, page_bytes=10, budget_bytes=10 * budget, keep_from=keep, carry_from=carry)
    return Leases(plan, headroom=0, clock=lambda: 0.0, borrow=False, rules=rules)


def talk(leases: Leases, name: int, story: Sequence[object], **more: Any) -> Lease | Waiting | Refusal:
    """A conversation whose prompt is a token longer than the story."""
    fields: dict[str, Any] = {"max_tokens": 0, "blocks": digests(story)} | more
    return leases.admit(Request(name, name % 16, BLOCK * len(story) + 1, **fields))


def begun(leases: Leases, name: int, story: Sequence[object], **more: Any) -> Lease:
    lease = talk(leases, name, story, **more)
    assert isinstance(lease, Lease)
    return lease


def asked(leases: Leases, name: int, blocks: int, mark: pb.Mark.ValueType = HISTORY) -> Answer | None:
    """The answer, None where it has to wait."""
    leases.ask_keep(name, BLOCK * blocks, mark)
    return next(leases.answers(), None)


def granted(leases: Leases, name: int, blocks: int, mark: pb.Mark.ValueType = HISTORY) -> State:
    answer = asked(leases, name, blocks, mark)
    assert answer is not None
    assert answer.state is not None, answer.reason
    return answer.state


def kept(leases: Leases, name: int, blocks: int, mark: pb.Mark.ValueType = HISTORY) -> State:
    state = granted(leases, name, blocks, mark)
    assert keeping.kept(leases, state.state) is state
    return state


def refused(leases: Leases, name: int, blocks: int, mark: pb.Mark.ValueType = HISTORY) -> str:
    answer = asked(leases, name, blocks, mark)
    assert answer is not None
    assert answer.state is None
    return answer.reason


def went(leases: Leases, name: int, story: Sequence[object], mark: pb.Mark.ValueType = HISTORY) -> State:
    """A conversation that came, kept the state at its end, and left; everything is answered."""
    begun(leases, name, story)
    leases.resumed(name, 0)
    state = kept(leases, name, len(story), mark)
    leases.finish(name, 0)
    return state


def obey(leases: Leases, fence: int = 0) -> list[int]:
    """What the workers had to forget is forgotten."""
    names = leases.take_orders().forget
    keeping.forgotten(leases, names, fence)
    return names


def alive(leases: Leases) -> list[int]:
    """States that are not on their way out."""
    assert leases.check_integrity() == []
    return [state.state for state in leases.kept.lasting]
