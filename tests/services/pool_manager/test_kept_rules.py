"""Kept states, rule by rule: what is kept, what is resumed and where, what goes first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kept_fakes import (
    BLOCK,
    HISTORY,
    REPLY,
    REWIND,
    SHARED,
    alive,
    asked,
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
from services.pool_manager.relief import CarryError, carry_by_hand

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
    leases.rules = None
    assert refused(leases, 1, 2).startswith("this group keeps nothing")


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


# ---- the budget, and what goes first -------------------------------------------------------------------------------


def test_bytes_are_the_limit_and_never_a_number_of_states() -> None:
    """Sixty-four states of one block each share nothing; a pool and a budget that hold them hold all of them."""
    leases = keepers(1, 64 * 2 + 3, budget=64 * 2)
    names = [went(leases, name, [name]).state for name in range(1, 65)]
    assert alive(leases) == names
    one_more = went(leases, 65, "Z")
    assert leases.take_orders().forget == names[:1]
    assert alive(leases) == [*names[1:], one_more.state]
    assert leases.kept.counts.evicted_for_budget == 1


def test_shared_pages_count_once() -> None:
    leases = keepers(1, 40, budget=8)
    went(leases, 1, "abcdefgh")
    for name, end in enumerate("XYZ", start=2):
        begun(leases, name, f"abcdefgh{end}")
        leases.resumed(name, 0)
    assert leases.kept.used == [5]
    kept(leases, 2, 9)
    assert leases.kept.used == [7]  # one page of rows and one fixed
    assert len(alive(leases)) == 2


def test_extended_states_go_first_then_the_least_recently_used() -> None:
    leases = keepers(1, 60)
    a, b = went(leases, 1, "ab"), went(leases, 2, "xy")
    c, d = went(leases, 3, "abcd"), went(leases, 4, "pq")
    assert [state.state for state in leases.kept.victims()] == [a.state, b.state, c.state, d.state]
    begun(leases, 5, "xyz")
    leases.resumed(5, 0)
    assert [state.state for state in leases.kept.victims()] == [a.state, c.state, d.state, b.state]
    keeping.evict_by_hand(leases, [c.state])  # nothing extends the first any more
    assert [state.state for state in leases.kept.victims()] == [a.state, d.state, b.state]
    assert leases.kept.extended(a) is False
    begun(leases, 6, "abQ")
    assert [state.state for state in leases.kept.victims()] == [d.state, b.state]  # in use


def test_two_long_chats_on_a_nearly_full_pool_keep_each_others_only_state_while_older_ones_exist() -> None:
    """Turn by turn, each a block longer; three older chats are there first. The pool is what is short."""
    leases = keepers(1, 17)
    old = [went(leases, name, [name] * 3).state for name in (1, 2, 3)]
    chats = {"A": ["A"] * 5, "B": ["B"] * 5}
    last: dict[str, int] = {}
    name = 10
    for turn in range(6):
        for chat, story in chats.items():
            story.append(f"{chat}{turn}")
            name += 1
            answer = talk(leases, name, story)
            if isinstance(answer, Waiting):
                obey(leases)
                (answer,) = leases.admit_waiting()
            assert isinstance(answer, Lease)
            assert (answer.resume and answer.resume.state) == last.get(chat), f"turn {turn} of {chat}"
            leases.resumed(name, 0)
            leases.ask_keep(name, BLOCK * len(story), HISTORY)
            found = next(leases.answers(), None)
            if found is None:
                obey(leases)
                found = next(leases.answers())
            assert found.state is not None, found.reason
            keeping.kept(leases, found.state.state)
            leases.finish(name, 0)
            last[chat] = found.state.state
    assert leases.kept.counts.evicted_for_pages > 0
    assert not set(old) & set(alive(leases))
    assert set(last.values()) <= set(alive(leases))


def test_a_sub_agent_that_shares_the_system_prompt_never_costs_the_parent_its_longer_state() -> None:
    """Only the parent's state is there, and the budget has no room for more."""
    system = ["s"] * 4
    parent_story = [*system, *"parent of all"]
    leases = keepers(1, 60, budget=12, window=12)
    parent = went(leases, 1, parent_story)
    for name, own in ((2, "abc"), (3, "de")):
        lease = begun(leases, name, [*system, *own])
        assert (lease.resume, lease.shared_prefix) == (None, 4 * BLOCK)
        assert "worth less" in refused(leases, name, 4, SHARED)
        assert "worth less" in refused(leases, name, 4 + len(own), HISTORY)
        assert "worth less" in refused(leases, name, 4 + len(own), REPLY)
        leases.finish(name, 0)
    assert alive(leases) == [parent.state]
    begun(leases, 4, "Stranger")  # begins otherwise: the least recently used goes
    assert granted(leases, 4, 8) is not None
    assert parent.state not in alive(leases)


def test_with_room_for_one_more_the_sub_agents_take_turns_and_the_parent_stays() -> None:
    system = ["s"] * 4
    leases = keepers(1, 60, budget=12 + 5, window=12)
    parent = went(leases, 1, [*system, *"parent of all"])
    for name in range(2, 8):
        went(leases, name, [*system, f"agent {name}", "x"])
        assert parent.state in alive(leases)
    assert leases.kept.counts.evicted_for_budget == 5


def test_a_shared_beginning_takes_the_place_of_its_like_only() -> None:
    leases = keepers(1, 60, budget=8)
    long = went(leases, 1, "abcdefgh")
    short = went(leases, 2, "xy")
    begun(leases, 3, "abcdX")
    assert "worth less" in refused(leases, 3, 4, SHARED)
    begun(leases, 4, "xyz")
    leases.resumed(4, 0)
    assert granted(leases, 4, 3).pages  # extends `short`, which goes for it
    assert alive(leases) == [long.state, 3]
    assert short.phase.value == "forgetting"


def test_a_rewind_takes_the_place_of_extended_states_only() -> None:
    leases = keepers(1, 60, budget=7)
    went(leases, 1, "abcd")
    went(leases, 2, "wxyz")
    begun(leases, 3, "klmn")
    assert "worth less" in refused(leases, 3, 2, REWIND)
    assert granted(leases, 3, 4, HISTORY)


def test_nothing_is_evicted_for_what_would_not_fit_anyway() -> None:
    leases = keepers(1, 60, budget=8)
    states = [went(leases, 1, "abcd").state, went(leases, 2, "wxyz").state]
    begun(leases, 3, "0123456789ABCDE")
    assert refused(leases, 3, 15).startswith("kept states take 60 of 80 bytes a rank")
    assert alive(leases) == states


def test_states_in_use_are_not_evicted_for_the_budget() -> None:
    leases = keepers(1, 60, budget=6)
    went(leases, 1, "abcd")
    went(leases, 2, "wxyz")
    begun(leases, 3, "abcdX")
    begun(leases, 4, "wxyzX")
    begun(leases, 5, "new")
    assert "worth less" in refused(leases, 5, 3)


# ---- pages ---------------------------------------------------------------------------------------------------------


def test_a_keep_waits_for_the_pages_of_its_victims() -> None:
    leases = keepers(1, 9)
    old = went(leases, 1, "abcd")
    begun(leases, 2, "01234567")  # 6 of 9; the state has 3
    assert asked(leases, 2, 8) is None
    assert leases.take_orders() == Orders(forget=[old.state])
    assert list(leases.answers()) == []
    keeping.forgotten(leases, [old.state], fence=3)
    assert list(leases.answers()) == []
    leases.answered(3)
    (answer,) = leases.answers()
    assert answer.state is not None
    assert leases.kept.counts.evicted_for_pages == 1


def test_a_keep_whose_pages_others_took_is_refused_at_last() -> None:
    leases = keepers(1, 9)
    old = went(leases, 1, "abcd")
    begun(leases, 2, "01234567")
    assert asked(leases, 2, 8) is None
    keeping.forgotten(leases, [old.state], fence=0)
    leases.extend([(2, 9 * 128)])
    (answer,) = leases.answers()
    assert (answer.state, answer.reason[:27]) == (None, "others took the pages that ")


def test_a_keep_evicts_nothing_for_itself_while_others_wait_for_pages() -> None:
    leases = keepers(1, 12)
    state = went(leases, 1, "abcd")
    begun(leases, 2, "01234567")
    begun(leases, 3, "klm")
    assert leases.books.free(0) == 0
    assert isinstance(talk(leases, 4, "9" * 14), Waiting)
    assert refused(leases, 2, 8) == "conversations wait for the pages that it would take"
    assert alive(leases) == [state.state]
    leases.finish(4, 0)
    assert isinstance(talk(leases, 5, "abcd" + "9" * 10, idle=True), Waiting)
    assert asked(leases, 2, 8) is None
    assert leases.take_orders() == Orders(forget=[state.state])


def test_one_that_ends_parks_or_moves_while_it_asks() -> None:
    leases = keepers(2, 12)
    begun(leases, 1, "abcd")
    leases.ask_keep(1, 4 * BLOCK, HISTORY)
    leases.finish(1, 0)
    assert [(answer.state, answer.reason) for answer in leases.answers()] == [(None, "conversation 1 does not run")]
    begun(leases, 2, "abcd")
    leases.park(2)
    assert refused(leases, 2, 4) == "conversation 2 is being parked"
    begun(leases, 3, "wxyz")
    carry_by_hand(leases, 3, None)
    assert refused(leases, 3, 4).startswith("conversation 3 is being carried to rank ")


def test_one_whose_state_is_about_to_be_kept_stays_where_it_is() -> None:
    leases = keepers(2, 12)
    begun(leases, 1, "abcd")
    state = granted(leases, 1, 4)
    with pytest.raises(CarryError, match="is having its state kept"):
        carry_by_hand(leases, 1, None)
    keeping.kept(leases, state.state)
    assert carry_by_hand(leases, 1, None).owner == 1


# ---- admissions and extensions evict -------------------------------------------------------------------------------


def test_one_that_waits_evicts_what_is_worth_least_and_goes_on_from_its_state() -> None:
    leases = keepers(1, 12)
    mine, other, last = went(leases, 1, "abcd"), went(leases, 2, "wxyz"), went(leases, 3, "klmn")
    assert leases.books.free(0) == 3
    assert isinstance(talk(leases, 4, "abcdefghij"), Waiting)  # 6 pages, of which it has two
    assert leases.take_orders() == Orders(forget=[other.state])  # not its own, which is the oldest
    keeping.forgotten(leases, [other.state], fence=2)
    assert list(leases.admit_waiting()) == []
    leases.answered(2)
    (lease,) = leases.admit_waiting()
    assert (lease.resume and lease.resume.state, alive(leases)) == (mine.state, [mine.state, last.state])


def test_its_own_state_goes_where_it_would_not_fit_beside_it() -> None:
    leases = keepers(1, 9)
    mine = went(leases, 1, "abcde")  # three pages of rows, one half full, and one fixed
    assert isinstance(talk(leases, 2, "abcdefghijklmno"), Waiting)  # 9 pages
    assert leases.take_orders() == Orders(forget=[mine.state])
    keeping.forgotten(leases, [mine.state], 0)
    (lease,) = leases.admit_waiting()
    assert (lease.resume, len(lease.pages)) == (None, 9)


def test_nobody_evicts_what_would_not_help() -> None:
    leases = keepers(1, 12)
    state = went(leases, 1, "abcd")
    begun(leases, 2, "0123456789AB")
    assert isinstance(talk(leases, 3, "0123456789abc"), Waiting)
    assert leases.take_orders() == Orders()
    assert alive(leases) == [state.state]


def test_an_owner_that_runs_dry_evicts_before_it_carries_or_parks() -> None:
    leases = keepers(2, 9)
    state = went(leases, 1, "abcd")
    begun(leases, 2, "01234567")
    begun(leases, 3, "01234567")
    owner = leases.running[2].owner
    extension = leases.extend([(2, 9 * 128)])
    assert extension.park == []
    assert leases.take_orders() == Orders(forget=[state.state])
    assert leases.owed[2] > 0
    keeping.forgotten(leases, [state.state], 0)
    assert leases.extend([(2, 9 * 128)]).grants[0].pages != []
    assert leases.running[2].owner == owner


# ---- idle conversations --------------------------------------------------------------------------------------------


def test_the_idle_wait_behind_everybody_and_block_nobody() -> None:
    leases = keepers(1, 13)
    went(leases, 9, "a")
    begun(leases, 1, "0123456789AB")
    assert isinstance(talk(leases, 2, "abcdefghij", idle=True), Waiting)
    waiting = talk(leases, 3, "klmnopqrst", background=True)
    assert isinstance(waiting, Waiting)
    assert waiting.ahead == 0
    assert [one.request.conversation for one in leases.waiting] == [3, 2]


def test_the_idle_do_not_wait_for_nothing() -> None:
    """Not without a state; not where nobody runs and the pages would not do; nor once the state has gone."""
    leases = keepers(1, 11)
    assert isinstance(talk(leases, 1, "abc", idle=True), Refusal)
    state = went(leases, 2, "abcde")
    begun(leases, 3, "01234567")
    assert isinstance(talk(leases, 4, "abcdeABCDE", idle=True), Waiting)
    assert leases.give_up() == []  # conversation 3 will end
    leases.finish(3, 0)
    assert [lease.request.conversation for lease in leases.admit_waiting()] == [4]
    leases.finish(4, 0)
    leases.books.take(0, 4)  # as if they were gone for ever
    assert isinstance(talk(leases, 5, "abcdeABCDE", idle=True), Waiting)
    assert [request.conversation for request in leases.give_up()] == [5]
    assert leases.waiting == []
    begun(leases, 6, "q")
    assert isinstance(talk(leases, 7, "abcdeABCDE", idle=True), Waiting)
    keeping.evict_by_hand(leases, [state.state])
    assert [request.conversation for request in leases.give_up()] == [7]


def test_the_idle_park_for_those_that_wait_before_loans_and_states() -> None:
    leases = keepers(1, 13)
    state = went(leases, 1, "abcd")
    begun(leases, 2, "abcdefghij", idle=True)
    leases.resumed(2, 0)
    begun(leases, 3, "012")
    assert leases.books.free(0) == 2
    assert isinstance(talk(leases, 4, "uvwxyz"), Waiting)  # five pages
    assert leases.take_orders() == Orders(park=[2])
    leases.finish(2, 0)
    assert [lease.request.conversation for lease in leases.admit_waiting()] == [4]
    assert alive(leases) == [state.state]


def test_the_idle_park_first_where_an_owner_runs_dry_even_alone() -> None:
    leases = keepers(1, 14)
    state = went(leases, 3, "a")
    begun(leases, 1, "0123456")
    begun(leases, 2, "abcdef", idle=True)
    leases.resumed(2, 0)
    assert leases.extend([(1, 9 * 128)]).park == [2]
    leases.finish(2, 0)
    assert leases.extend([(1, 9 * 128)]).park == []
    assert alive(leases) == [state.state]


def test_the_idle_take_no_loans_and_recall_none_and_park_nobody() -> None:
    leases = keepers(2, 14)
    leases.borrow = True
    went(leases, 9, "a")
    first = begun(leases, 1, "0123456789")
    assert first.borrowed
    assert isinstance(talk(leases, 2, "a" + "bcdefghijklmno", idle=True), Waiting)
    assert leases.take_orders() == Orders()
    assert begun(leases, 3, "ab").borrowed == []  # it goes on
    assert begun(leases, 4, "x").borrowed  # an idle one that waits keeps nobody from borrowing


def test_an_idle_one_may_take_the_place_of_old_states_but_not_of_its_own() -> None:
    leases = keepers(1, 10)
    mine, other = went(leases, 1, "abcd"), went(leases, 2, "wxyz")
    assert isinstance(talk(leases, 3, "abcdefghij", idle=True), Waiting)
    assert leases.take_orders() == Orders(forget=[other.state])
    assert leases.give_up() == []
    keeping.forgotten(leases, [other.state], 0)
    (lease,) = leases.admit_waiting()
    assert lease.resume is not None
    assert lease.resume.state == mine.state


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
