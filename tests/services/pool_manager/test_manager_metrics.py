"""The pool manager's numbers: pages by owner and kind add up to the pool, conversations by state."""

from types import SimpleNamespace

from kept_fakes import begun, keepers, refused, went
from test_leases_machine import ROWS, small_plan

from services.pool_manager import keeping
from services.pool_manager.lease import Lease, Request, Waiting
from services.pool_manager.leases import Leases
from services.pool_manager.metrics import samples

GROUP = SimpleNamespace(world=2, state_of=lambda rank, _now: ("ready", "loading")[rank])


def told(leases):
    return {(s.name, *s.labels.values()): s.value for s in samples(GROUP, leases, lambda: 0.0)}


def pages(leases, owner):
    return {name[2]: value for name, value in told(leases).items() if name[:2] == ("latentpool_pages", owner) and value}


def test_before_there_is_a_plan():
    assert told(None) == {("latentpool_ranks_ready",): 1, ("latentpool_ranks",): 2}


def test_pages_by_owner_and_kind():
    leases = Leases(small_plan(2, True, 9), headroom=0)
    size = leases.plan.pages // 2
    lease = leases.admit(Request(1, 0, 2 * ROWS))
    assert isinstance(lease, Lease)
    assert (lease.owner, len(lease.borrowed)) == (0, 2)
    own = len(lease.pages)
    assert pages(leases, "0") == {"live": own, "free": size - own}
    assert pages(leases, "1") == {"borrowed": 2, "free": size - 2}
    leases.released(1, fence=5)
    assert pages(leases, "1") == {"fenced": 2, "free": size - 2}
    leases.answered(5)
    assert pages(leases, "1") == {"free": size}
    leases.finish(1, fence=6)
    assert pages(leases, "0") == {"fenced": own, "free": size - own}


def test_a_group_that_is_not_split_has_one_owner():
    leases = Leases(small_plan(1, True, 18), headroom=0)
    assert pages(leases, "all") == {"free": leases.plan.pages}
    assert not pages(leases, "0")


def test_conversations_by_state():
    leases = Leases(small_plan(2, True, 5), headroom=0, borrow=False)

    def states():
        found = {name[1]: value for name, value in told(leases).items() if name[0] == "latentpool_conversations"}
        return [found.pop(state) for state in ("running", "waiting", "parking", "carrying")] + list(found)

    assert states() == [0, 0, 0, 0]
    for name in (1, 2):
        assert isinstance(leases.admit(Request(name, name, ROWS)), Lease)
    assert isinstance(leases.admit(Request(3, 3, 3 * ROWS)), Waiting)
    assert states() == [2, 1, 0, 0]
    leases.move(1, 1)
    assert states() == [1, 1, 0, 1]
    leases.park(2)
    assert states() == [0, 1, 1, 1]


def test_kept_states_and_what_was_looked_up():
    leases = keepers(2, 20, budget=4)
    went(leases, 1, "abcdef")
    begun(leases, 2, "abcdefgh")
    assert "--cache is 40 B" in refused(leases, 2, 8)
    assert pages(leases, "0") == {"live": 6, "kept": 1, "free": 13}  # three of the live ones are shared
    assert pages(leases, "1") == {"kept": 1, "free": 19}
    found = told(leases)
    assert found[("latentpool_kept_states", "kept")] == 1
    assert (found[("latentpool_kept_bytes", "0")], found[("latentpool_kept_bytes", "1")]) == (40, 10)
    assert found[("latentpool_kept_budget_bytes",)] == 40
    assert (found[("latentpool_resumes_total",)], found[("latentpool_resumed_tokens_total",)]) == (1, 384)
    assert found[("latentpool_resume_misses_total", "unknown")] == 1
    assert (found[("latentpool_keeps_total",)], found[("latentpool_keeps_refused_total",)]) == (1, 1)
    keeping.evict_by_hand(leases, [])
    assert told(leases)[("latentpool_evictions_total", "hand")] == 0  # in use
