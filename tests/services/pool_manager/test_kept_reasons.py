"""What operators are told where nothing is kept, a state is not, or idle work stays where it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kept_fakes import begun, keepers, kept, refused, went

from services.pool_manager.kept import Rules, rules_of
from services.pool_manager.lease import Waiting
from services.pool_manager.plan import Ledger
from services.pool_manager.relief import CarryError, carry_by_hand


def test_what_a_group_can_keep() -> None:
    """Windows of 8 pages of 128 rows; a page is 1 KiB, and a state of 256 tokens takes 3 + 2 pages."""
    plan = keepers(2, 20).plan
    plan = replace(plan, ledgers=(Ledger(0, 0, 1024, 0, 0, 0, 0),) * 2)
    assert rules_of(plan, 3, 5 << 10, 256, 512) == Rules(3, 1024, 5 << 10, 256, 512)
    assert isinstance(rules_of(replace(plan, pages=10), 3, 5 << 10, 256, 512), Rules)
    assert isinstance(rules_of(plan, 3, 1 << 30, 1024, 512), Rules)


@pytest.mark.parametrize(
    ("changed", "arguments", "why"),
    [
        ({"paged": False}, {}, "its lanes are windows (--kv-pages off, or auto on one rank); --kv-pages on keeps prompts"),
        ({}, {"cache_bytes": 0}, "it was started with --cache 0"),
        ({}, {"keep_from": 1088}, "--keep-from 1088 is more than the 1024 tokens of the longest conversation (--context)"),
        ({}, {"cache_bytes": (5 << 10) - 1}, "a state takes 5.00 KiB a rank at least, 5 pages, and --cache is 5.00 KiB"),
        ({}, {"cache_bytes": 4 << 10}, "a state takes 5.00 KiB a rank at least, 5 pages, and --cache is 4.00 KiB"),
        ({"pages": 8}, {}, "a state takes 5.00 KiB a rank at least, 5 pages, and the pool has 4 a rank"),
    ],
)
def test_why_a_group_keeps_nothing(changed: dict[str, Any], arguments: dict[str, int], why: str) -> None:
    plan = replace(keepers(2, 20).plan, ledgers=(Ledger(0, 0, 1024, 0, 0, 0, 0),) * 2, **changed)
    sizes = {"cache_bytes": 16 << 10, "keep_from": 256, "carry_from": 512}
    assert rules_of(plan, 3, **(sizes | arguments)) == why


def test_a_state_that_alone_is_over_the_budget_is_refused_as_that() -> None:
    leases = keepers(2, 20, budget=3)
    begun(leases, 1, "abcdefghij")
    assert refused(leases, 1, 10) == "a state of 640 tokens takes 60 B a rank, and --cache is 30 B"
    kept(leases, 1, 4)
    begun(leases, 2, "ABCDEFGHIJ")
    assert refused(leases, 2, 10) == "a state of 640 tokens takes 60 B a rank, and --cache is 30 B"


def test_where_conversations_hold_every_page_nothing_else_is_blamed() -> None:
    leases = keepers(1, 4, fixed=2)
    begun(leases, 1, "abcde")
    assert refused(leases, 1, 4) == "no page is free for it: conversations hold them, and 2 of each rank are needed"


@pytest.mark.parametrize("waits", [False, True])
def test_idle_work_is_not_carried_and_told_so(waits: bool) -> None:
    """It is there to be listed, but the router would end it instead."""
    leases = keepers(2, 12, fixed=2)
    went(leases, 1, "abcd")
    begun(leases, 2, "abcdefgh", idle=True)
    if waits:
        leases.waiting.append(Waiting(leases.running.pop(2).request, 0, "", 0.0))
    with pytest.raises(CarryError, match=r"conversation 2 is idle work: it computes a reply again, to keep it") as refused:
        carry_by_hand(leases, 2, 1)
    assert refused.value.what == "state"
    assert leases.take_orders().carry == []
