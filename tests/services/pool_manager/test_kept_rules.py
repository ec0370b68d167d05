"""Kept states, rule by rule: what is kept, what is resumed and where, what goes first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kept_fakes import (
    BLOCK,
    HISTORY,
    SHARED,
    alive,
    begun,
    digests,
    granted,
    keepers,
    kept,
    obey,
    refused,
    talk,
    went,
)

from latentpool.geometry import Geometry
from services.pool_manager import keeping
from services.pool_manager.kept import Prompts, fixed_pages
from services.pool_manager.lease import Lease, Move, Orders, Refusal, Request, Waiting

CONFIG = Path(__file__).parents[2] / "data" / "glm-5.3-flash" / "config.json"


# ---- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "pages"), [(1, 24), (2, 12), (3, 9), (4, 6)])
def test_fixed_pages_of_the_real_geometry(world: int, pages: int) -> None:
    """34 KDA layers of 32 heads, 128 wide: a state of fp32 and three rows of q, k and v before it; 6 MiB of rows a page."""
    geometry = Geometry.from_config(json.loads(CONFIG.read_text()))
    heads = -(-geometry.kda_heads // world)
    width = heads * geometry.kda_head_dim
    size = len(geometry.kda_layers) * (width * geometry.kda_head_dim * 4 + 3 * 3 * width * 2)
    assert fixed_pages(geometry, world, "bf16", "bf16", 512) == -(-size // (512 * 12_288)) == pages


# ---- keeping -------------------------------------------------------------------------------------------------------


def test_a_state_shares_its_conversations_pages_and_takes_fixed_ones_of_every_rank() -> None:
    leases = keepers(2, 12, fixed=2)
    lease = begun(leases, 1, "abcde")
    state = granted(leases, 1, 5)
    assert lease.pages == [0, 2, 4, 6]
    assert (state.pages, state.fixed) == ([0, 2, 4], [8, 10, 1, 3])  # the third page is half full
    assert [leases.books.holders(page) for page in (0, 4, 6, 8, 1)] == [2, 2, 1, 1, 1]
    assert leases.kept.lookup(digests("abcdef")) is None  # granted, not kept
    assert keeping.kept(leases, state.state) is state
    assert leases.kept.lookup(digests("abcdef")) is state
    leases.finish(1, 0)
    assert [leases.books.free(rank) for rank in (0, 1)] == [7, 10]
    assert alive(leases) == [state.state]


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        (1, "64 tokens are fewer than --keep-from 128"),
        (6, "384 tokens are not whole blocks that conversation 1 can be found by: it has 320"),
    ],
)
def test_what_is_not_kept(blocks: int, reason: str) -> None:
    leases = keepers(1, 20, keep=128)
    begun(leases, 1, "abcde")
    assert refused(leases, 1, blocks) == reason
    assert leases.kept.counts.refused == 1


def test_no_conversation_no_blocks_no_cache() -> None:
    leases = keepers(1, 20)
    assert refused(leases, 9, 2) == "conversation 9 does not run"
    leases.admit(Request(1, 1, 200, 0))
    assert refused(leases, 1, 2).startswith("128 tokens are not whole blocks")
    leases.rules, leases.nothing_kept = None, "it was started with --cache 0"
    assert refused(leases, 1, 2) == leases.kept.last_refusal == "this group keeps nothing: it was started with --cache 0"


def test_one_state_of_the_same_tokens_is_enough_unless_it_is_on_its_way_out() -> None:
    leases = keepers(1, 40)
    first = granted(leases, begun(leases, 1, "abc").request.conversation, 3)
    begun(leases, 2, "abc")
    assert refused(leases, 2, 3) == f"state {first.state} ends there already"
    keeping.kept(leases, first.state)
    assert refused(leases, 2, 3) == f"state {first.state} ends there already"
    keeping.evict_by_hand(leases, [first.state])
    assert granted(leases, 2, 3).pages == leases.running[2].pages[:2]


def test_mistakes_of_a_router() -> None:
    leases = keepers(1, 20)
    begun(leases, 1, "abc")
    with pytest.raises(ValueError, match="at 100 tokens: a block has 64"):
        leases.ask_keep(1, 100, HISTORY)
    leases.ask_keep(1, 128, HISTORY)
    with pytest.raises(ValueError, match="before it knows of the last one"):
        leases.ask_keep(1, 192, HISTORY)
    (answer,) = leases.answers()
    assert answer.state is not None
    keeping.kept(leases, answer.state.state)
    begun(leases, 2, "abc")
    with pytest.raises(ValueError, match="kept state 1 is in use, and nobody ordered its end"):
        keeping.forgotten(leases, [1], 0)


def test_a_conversation_that_ends_before_its_keep_gives_the_ids_back() -> None:
    leases = keepers(1, 20)
    begun(leases, 1, "abcde")
    state = granted(leases, 1, 5)
    leases.finish(1, fence=3)
    leases.answered(3)
    assert leases.books.free(0) == 20 - 3 - 1
    assert keeping.forgotten(leases, [state.state], 4) == [state]
    assert keeping.forgotten(leases, [state.state], 4) == []
    assert keeping.kept(leases, state.state) is None
    assert (leases.books.free(0), leases.books.fenced(0)) == (16, 4)
    leases.answered(4)
    assert leases.books.free(0) == 20


def test_a_page_is_free_after_the_last_round_of_any_of_its_holders() -> None:
    """The state's own fence is lower than that of the conversation that shared its pages."""
    leases = keepers(1, 20)
    begun(leases, 1, "abcd")
    state = granted(leases, 1, 4)
    leases.finish(1, fence=9)
    keeping.forgotten(leases, [state.state], fence=2)
    leases.answered(8)
    assert leases.books.free(0) == 16
    leases.answered(9)
    assert leases.books.free(0) == 20
    assert leases.check_integrity() == []


# ---- resuming ------------------------------------------------------------------------------------------------------


def test_the_longest_state_is_resumed_on_its_owner_with_its_full_pages() -> None:
    leases = keepers(2, 20)
    went(leases, 1, "ab")
    long = went(leases, 2, "abcde")
    went(leases, 3, "abcdX")
    lease = begun(leases, 4, "abcdefg")
    assert (lease.owner, lease.resume and lease.resume.state, lease.shared) == (long.owner, long.state, 2)
    assert lease.pages[:2] == long.pages[:2]
    assert long.pages[2] not in lease.pages  # half full: copied to a page of its own
    assert leases.books.holders(long.pages[0]) == 4  # three states and the conversation
    assert (leases.kept.counts.hits, leases.kept.counts.hit_tokens) == (3, (2 + 2 + 5) * BLOCK)
    assert lease.borrowed == []


def test_a_state_is_in_use_until_the_round_that_resumes_it_is_answered() -> None:
    leases = keepers(1, 20)
    state = went(leases, 1, "abcd")
    begun(leases, 2, "abcdef")
    begun(leases, 3, "abcdeX")
    with pytest.raises(keeping.EvictError, match="state 1 is being resumed"):
        keeping.evict_by_hand(leases, [state.state])
    leases.resumed(2, fence=5)
    leases.resumed(2, fence=50)  # a repeat
    leases.resumed(7, fence=60)  # a stranger
    leases.answered(5)
    assert state.pinned
    leases.finish(3, fence=6)  # it never resumed
    assert state.pinned
    leases.resumed(3, fence=70)
    leases.answered(6)
    assert not state.pinned
    assert keeping.evict_by_hand(leases, [state.state]) == [state.state]
    assert leases.take_orders() == Orders(forget=[state.state])
    assert isinstance(talk(leases, 4, "abcdef"), Lease)
    assert leases.running[4].resume is None  # on its way out


def test_eviction_leaves_the_pages_to_those_who_share_them() -> None:
    leases = keepers(1, 20)
    went(leases, 1, "abcd")
    lease = begun(leases, 2, "abcdef")
    leases.resumed(2, 0)
    keeping.evict_by_hand(leases, [])
    assert leases.coming(0) == 1  # what is fixed
    obey(leases)
    assert [leases.books.holders(page) for page in lease.pages] == [1] * len(lease.pages)
    leases.finish(2, 0)
    assert leases.books.free(0) == 20


def full_owner(pages: int = 10, carry: int = 128, **more: int) -> object:
    """Two ranks; the state of four blocks is on rank 0, where a conversation has all that is left but a page; it is not
    evictable room that is missing."""
    leases = keepers(2, pages, carry=carry, **more)
    state = went(leases, 1, "abcd")
    leases.admit(Request(2, 2, 1, 0))  # rank 1 has most: it goes there
    leases.finish(2, 0)
    holder = Request(3, 3, 128 * (pages - 6) + 1, 0)
    lease = leases.admit(Request(4, 4, 128 * 5, 0))
    assert isinstance(lease, Lease)
    assert lease.owner == 1
    owner = leases.admit(holder)
    assert isinstance(owner, Lease)
    assert owner.owner == 0
    leases.finish(4, 0)
    assert state.owner == 0
    return leases


def test_without_room_on_its_owner_the_state_is_carried_to_a_rank_with_room() -> None:
    leases = full_owner()
    lease = begun(leases, 5, "abcdefghij")
    state = leases.kept.states[1]
    assert (lease.owner, lease.pages, lease.shared, lease.quota) == (0, state.pages, 2, 7)
    assert lease.move == Move(5, 1, [3, 5, 7, 9, 11, 13, 15])
    assert leases.take_orders() == Orders(carry=[lease.move])
    assert (leases.kept.counts.hits, leases.kept.counts.carried_hits) == (1, 1)
    assert leases.coming(0) == 0  # the state keeps its pages
    leases.resumed(5, fence=2)
    assert state.pinned
    assert leases.carried(5, fence=4) == Move(5, 1, [3, 5, 7, 9, 11, 13, 15])
    assert (leases.running[5].owner, leases.running[5].pages) == (1, [3, 5, 7, 9, 11, 13, 15])
    assert [leases.books.holders(page) for page in state.pages] == [1, 1]
    assert alive(leases) == [1]


def test_one_that_ends_before_its_state_arrived_gives_back_both() -> None:
    leases = full_owner()
    begun(leases, 5, "abcdefghij")
    assert leases.finish(5, fence=3) == 2 + 7
    assert leases.carried(5, fence=4) is None
    leases.answered(3)
    assert leases.books.free(1) == 9
    assert alive(leases) == [1]


def test_short_states_are_not_carried_and_the_idle_carry_none() -> None:
    leases = full_owner(carry=257)
    assert begun(leases, 5, "abcdefghij").resume is None
    assert leases.kept.counts.misses_short == 1
    leases = full_owner()
    assert isinstance(talk(leases, 5, "abcdefghij", idle=True), Waiting)


def test_lookups_of_those_without_blocks_are_not_counted() -> None:
    leases = keepers(1, 20)
    leases.admit(Request(1, 1, 500, 0))
    assert leases.kept.counts.misses_unknown == 0
    begun(leases, 2, "abc")
    assert leases.kept.counts.misses_unknown == 1


# ---- shared beginnings ---------------------------------------------------------------------------------------------


def test_prompts_are_told_where_they_part_from_earlier_ones() -> None:
    leases = keepers(1, 60)
    assert begun(leases, 1, "abcdef").shared_prefix == 0
    assert begun(leases, 2, "abcdXYZ").shared_prefix == 4 * BLOCK
    state = kept(leases, 2, 4, SHARED)
    third = begun(leases, 3, "abcdPQ")
    assert (third.shared_prefix, third.resume and third.resume.state) == (0, state.state)
    assert begun(leases, 4, "abcdXYW").shared_prefix == 6 * BLOCK
    assert begun(leases, 5, "kl").shared_prefix == 0
    kept(leases, 5, 2)
    assert begun(leases, 6, "klmn", idle=True).shared_prefix == 0
    assert begun(leases, 7, "klmn").shared_prefix == 0  # what an idle one computes is no prompt


def test_old_prompts_are_forgotten_from_their_ends() -> None:
    prompts = Prompts(limit=5)
    prompts.remember(digests("abcd"))
    prompts.remember(digests("xy"))
    assert prompts.shared(digests("abcde")) == 3 * BLOCK
    prompts.shared(digests("abcde"))
    prompts.remember(digests("abc"))
    prompts.remember(digests("pq"))
    assert prompts.shared(digests("abcd")) == 3 * BLOCK
    assert prompts.shared(digests("xy")) == 0
    assert prompts.shared(b"") == 0


# ---- by hand, and proof ----------------------------------------------------------------------------------------------


def test_evictions_by_hand_are_all_or_nothing() -> None:
    leases = keepers(1, 40)
    a, b = went(leases, 1, "ab"), went(leases, 2, "xy")
    with pytest.raises(keeping.EvictError, match="no kept state 99: `latentpool kept` lists") as unknown:
        keeping.evict_by_hand(leases, [a.state, 99])
    assert unknown.value.what == "unknown"
    begun(leases, 3, "pq")
    c = granted(leases, 3, 2)
    with pytest.raises(keeping.EvictError, match="state 3 is being kept") as used:
        keeping.evict_by_hand(leases, [a.state, c.state])
    assert used.value.what == "used"
    assert leases.take_orders() == Orders()
    assert keeping.evict_by_hand(leases, [b.state]) == [b.state]
    assert keeping.evict_by_hand(leases, [b.state]) == [b.state]  # it waits with the first
    assert keeping.evict_by_hand(leases, []) == [a.state]
    assert leases.take_orders().forget == [b.state, a.state]
    assert leases.kept.counts.evicted_by_hand == 2


def test_integrity_names_states_that_are_wrong() -> None:
    leases = keepers(2, 12)
    state = went(leases, 1, "abcd")
    begun(leases, 2, "abcdX")
    assert leases.check_integrity() == []
    state.pins.add(9)
    assert leases.check_integrity() == ["state 1 is pinned by conversation 9, which does not resume it"]
    state.pins.discard(9)
    leases.running[2].shared = 0
    assert leases.check_integrity() == []  # its conversation has ended: nobody else writes there
    begun(leases, 3, "abcdY")
    leases.running[3].shared = 0
    assert leases.check_integrity() == [f"id {page} is leased 2 times" for page in state.pages]
    leases.running[2].shared = leases.running[3].shared = 2
    page = state.fixed.pop()
    assert f"state 1 has not 1 fixed pages of every rank: {state.fixed}" in leases.check_integrity()
    state.fixed.append(page)
    leases.kept.used[0] += 500
    assert leases.check_integrity() == ["kept states count [503, 1] pages a rank, and hold [3, 1]"]


def test_windows_keep_nothing() -> None:
    leases = keepers(1, 20)
    leases.rules = None
    assert not isinstance(talk(leases, 1, "abc"), Refusal)
    assert refused(leases, 1, 3).startswith("this group keeps nothing")
