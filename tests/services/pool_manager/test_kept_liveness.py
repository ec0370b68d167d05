"""The obedient router keeps states: at the ends of prompts, where prompts part, and of replies in idle conversations.
Everything that is asked for still finishes, however little room there is, with keeps, evictions, resumes and carries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_fakes import BLOCK, HISTORY, REPLY, REWIND, SHARED, digests
from lease_model import small_plan
from test_parking_liveness import ROWS, ObedientRouter, StuckError, Talk, plan_of

from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager import keeping
from services.pool_manager.kept import Rules, State
from services.pool_manager.lease import Lease, Request
from services.pool_manager.leases import Leases
from services.pool_manager.plan import Plan


@dataclass(slots=True)
class KeptTalk(Talk):
    """story: its blocks, as many as its prompt and reply have. marks: where it will ask, ascending."""

    story: tuple[object, ...] = ()
    marks: list[tuple[int, pb.Mark.ValueType]] = field(default_factory=list)
    asked: bool = False
    resuming: bool = False
    cached: int = 0
    last: int = 0

    @property
    def blocks(self) -> tuple[object, ...]:
        return self.story[: (self.prompt - 1) // BLOCK]


class KeepingRouter(ObedientRouter):
    """Composes nothing for one that asked, until the answer; keeps in the next round; forgets when told, a round later."""

    def __init__(self, leases: Sequence[Leases], talks: Sequence[KeptTalk]) -> None:
        super().__init__(leases, talks)
        self.granted_states: list[State] = []
        self.seen: Counter[str] = Counter()
        self.idle_names = 10_000
        self.enough *= 2

    def request(self, talk: Talk, tokens: int) -> Request:
        assert isinstance(talk, KeptTalk)
        return replace(super().request(talk, tokens), blocks=digests(talk.blocks), idle=talk.idle)

    def admitted(self, lease: Lease) -> None:
        super().admitted(lease)
        talk = self.seated[lease.request.conversation]
        assert isinstance(talk, KeptTalk)
        talk.asked, talk.cached = False, 0
        if lease.resume is not None:
            self.seen["resumed"] += 1
            talk.tokens = talk.cached = talk.last = lease.resume.at
            talk.resuming = True
            if lease.move is not None:
                self.seen["carried"] += 1
                self.forgone += 1
        history = len(talk.blocks) * BLOCK
        marks = {history - BLOCK: REWIND, lease.shared_prefix: SHARED, history: REPLY if talk.idle else HISTORY}
        talk.marks = sorted((at, mark) for at, mark in marks.items() if at > max(talk.tokens, 0))

    def limit(self, talk: Talk) -> int:
        assert isinstance(talk, KeptTalk)
        return talk.marks[0][0] if talk.marks else talk.total

    def ended(self, talk: Talk) -> None:
        assert isinstance(talk, KeptTalk)
        if talk.idle:
            self.seen["idle"] += 1
            return
        super().ended(talk)
        if talk.total > talk.last + BLOCK:
            self.idle_names += 1
            self.queue.append(KeptTalk(self.idle_names, talk.total, 0, False, idle=True, story=talk.story))

    def seat(self) -> None:
        super().seat()
        idle = [talk for talk in self.seated.values() if talk.idle and talk not in self.leaving]
        if idle and any(not talk.idle for talk in self.queue):
            self.leaving.append(idle[0])  # somebody wants its lane

    def send(self) -> bool:
        did = self.states()
        moved = super().send()
        if did and not moved:
            self.sent += 1
            self.rounds.append((self.sent, [], []))
        self.ask()
        return did or moved

    def states(self) -> bool:
        """What the next round does with states."""
        did = bool(self.granted_states or self.forgetting)
        going = {talk.name for talk in self.seated.values() if talk not in self.leaving}
        for state in self.granted_states:
            for leases in self.leases:
                if state.conversation in going:
                    keeping.kept(leases, state.state)
                else:
                    keeping.forgotten(leases, [state.state], self.sent + 1)
            if state.conversation in going:
                self.seen["kept"] += 1
                self.seated[state.conversation].last = state.at  # type: ignore[attr-defined]
        forgetting, self.granted_states, self.forgetting = self.forgetting, [], []
        self.seen["forgotten"] += len(forgetting)
        for leases in self.leases:
            assert len(keeping.forgotten(leases, forgetting, self.sent + 1)) == len(forgetting)
        for talk in self.seated.values():
            assert isinstance(talk, KeptTalk)
            if talk.resuming and talk.admitted and talk not in self.leaving:
                did, talk.resuming = True, False
                for leases in self.leases:
                    leases.resumed(talk.name, self.sent + 1)
        return did

    def ask(self) -> None:
        for talk in self.seated.values():
            assert isinstance(talk, KeptTalk)
            here = talk.marks and talk.tokens == talk.marks[0][0] and not talk.asked
            if here and talk.admitted and talk not in self.leaving and talk.move is None:
                talk.asked = True
                for leases in self.leases:
                    leases.ask_keep(talk.name, *talk.marks[0])
        self.admit_waiting()

    def admit_waiting(self) -> None:
        super().admit_waiting()
        lost, same = (leases.give_up() for leases in self.leases)
        assert lost == same
        for request in lost:
            self.free_lanes.append(self.seated.pop(request.conversation).lane)
        one, two = (list(leases.answers()) for leases in self.leases)
        assert one == two
        for answer in one:
            self.seen["answered"] += 1
            talk = self.seated.get(answer.conversation)
            if talk is not None:
                assert isinstance(talk, KeptTalk)
                talk.asked = False
                talk.marks.pop(0)
            if answer.state is not None:
                self.granted_states.append(answer.state)
        self.obey()


def keep_to_end(
    plan: Plan, headroom: int, talks: Sequence[KeptTalk], rules: Rules, kind: type[Leases] = Leases
) -> KeepingRouter:
    """Runs all to their ends; the books are whole, and once every state is evicted everything is free."""
    leases = [kind(plan, headroom, clock=lambda: 0.0, rules=rules) for _ in range(2)]
    router = KeepingRouter(leases, talks)
    router.run()
    assert sorted(router.finished) == sorted(talk.name for talk in talks)
    for one in leases:
        assert one.check_integrity() == []
        assert one.idle
        keeping.evict_by_hand(one, [])
        keeping.forgotten(one, one.take_orders().forget, 0)
        assert sum(map(one.books.free, range(plan.residues))) == plan.pages
    return router


def rules_of(fixed: int = 1, budget: int = 1000, carry: int = 128) -> Rules:
    return Rules(fixed_pages=fixed, page_bytes=1, budget_bytes=budget, keep_from=BLOCK, carry_from=carry)


def turns(chats: int, count: int, first: int, step: int, beginning: int) -> list[KeptTalk]:
    """Chats, turn about: each turn's prompt is the last one's tokens and a step more; all begin alike."""
    talks = []
    for turn in range(count):
        for chat in range(chats):
            prompt = first + turn * step
            story = (*range(beginning), *((chat, at) for at in range(beginning, 64)))
            talks.append(KeptTalk(len(talks) + 1, prompt, step // 2, False, story=story))
    return talks


@pytest.mark.parametrize("residues", [1, 2, 3])
def test_chats_on_a_small_pool_all_finish_and_mostly_resume(residues: int) -> None:
    plan = plan_of(17, lanes=2, residues=residues, spare=24 // residues)
    router = keep_to_end(plan, 0, turns(3, 6, first=200, step=130, beginning=2), rules_of())
    assert router.seen["resumed"] >= 9
    assert router.seen["idle"] > 0
    assert router.seen["forgotten"] > 0


def test_states_in_the_way_of_long_conversations_go() -> None:
    """One window and a page a lane: nothing that is kept may stop anybody."""
    plan = plan_of(17, lanes=4, residues=2, spare=0)
    talks = turns(4, 3, first=130, step=300, beginning=1)
    router = keep_to_end(plan, 0, talks, rules_of(fixed=2))
    assert router.seen["kept"] > 0
    assert router.seen["forgotten"] > 0


@st.composite
def loads(draw: st.DrawFn) -> tuple[Plan, int, list[KeptTalk], Rules]:
    lanes, window = draw(st.integers(1, 6)), draw(st.integers(4, 12))
    plan = plan_of(window, lanes, draw(st.sampled_from([1, 2, 2, 3])), draw(st.sampled_from([0, 1, 5, 12])))
    talks = []
    for name in range(1, draw(st.integers(1, 12)) + 1):
        prompt = draw(st.just(1) | st.integers(1, plan.context - 1))
        reply = draw(st.just(plan.context - prompt) | st.integers(1, plan.context - prompt))
        story = (*("s" * draw(st.integers(0, 5))), *((draw(st.integers(0, 2)), at) for at in range(12)))
        talks.append(KeptTalk(name, prompt, reply, draw(st.booleans()), story=story))
    rules = rules_of(draw(st.integers(1, 2)), draw(st.sampled_from([4, 9, 1000])), draw(st.sampled_from([BLOCK, 256])))
    return plan, draw(st.sampled_from([0, ROWS, 200])), talks, rules


@settings(max_examples=60, deadline=None)
@given(load=loads())
def test_whatever_is_asked_for_finishes_with_states(load: tuple[Plan, int, list[KeptTalk], Rules]) -> None:
    keep_to_end(*load)


@pytest.mark.full
@settings(max_examples=1500, deadline=None)
@given(load=loads())
def test_much_that_is_asked_for_finishes_with_states(load: tuple[Plan, int, list[KeptTalk], Rules]) -> None:
    keep_to_end(*load)


def test_states_that_nobody_evicts_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool fills with what is kept, and somebody waits for ever."""
    monkeypatch.setattr(keeping, "forget", lambda *_: None)
    monkeypatch.setattr("services.pool_manager.relief._victim", lambda *_: None)
    plan = plan_of(17, lanes=2, residues=1, spare=0)
    with pytest.raises(StuckError):
        keep_to_end(plan, 0, turns(4, 4, first=300, step=200, beginning=0), rules_of())


def test_the_helper_makes_pages_of_one_block() -> None:
    assert small_plan(1, True, 9).page_rows == ROWS == BLOCK
