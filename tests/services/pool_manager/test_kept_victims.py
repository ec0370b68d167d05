"""Kept states, rule by rule: the budget and what goes first; pages that keeps, admissions and extensions take; the idle."""

from __future__ import annotations

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
    granted,
    keepers,
    kept,
    obey,
    refused,
    talk,
    went,
)

from services.pool_manager import keeping
from services.pool_manager.lease import Lease, Orders, Refusal, Waiting
from services.pool_manager.relief import CarryError, carry_by_hand

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


def test_a_state_where_prompts_part_does_not_go_first() -> None:
    """Everything extends the end of a system prompt; without it all agents compute it again."""
    leases = keepers(1, 60)
    system, other = went(leases, 1, "ab"), went(leases, 2, "xy")
    went(leases, 3, "abcd")
    assert leases.kept.victims()[0] is system  # so far one goes on from it, and its state serves in its place
    went(leases, 4, "abpq")
    assert leases.kept.extended(system)
    assert leases.kept.victims()[0] is other


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
    assert refused(leases, 3, 15).startswith("a state of 960 tokens takes 90 B a rank, and --cache is 80 B")
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
