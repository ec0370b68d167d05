"""Kept states between fakes: a worker's, which are what a lane was when it was kept, and a manager's, which finds them, grants
them and forgets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from router_fake_pages import FakePages

from latentpool.v1 import pool_manager_pb2 as pb
from latentpool.v1 import rank_worker_pb2


@dataclass
class Kept:
    at: int
    owner: int
    rows: list[int]
    fixed: list[int]
    state: int


class FakeStates(dict[int, Kept]):
    """Of a worker."""

    def __init__(self, owners: int, page_rows: int, violation: Callable[[str], None]) -> None:
        super().__init__()
        self.owners, self.page_rows = owners, page_rows
        self.violation = violation

    @property
    def pages(self) -> set[int]:
        return {page for kept in self.values() for page in kept.rows + kept.fixed}

    def keep(self, op: rank_worker_pb2.Keep, owner: int, pages: Sequence[int], state: int) -> None:
        slots = -(-op.at // self.page_rows)
        if op.state in self or not op.at or op.at % 64 or len(pages) < slots or len(op.pages) != self.owners:
            self.violation(f"state {op.state} is kept at {op.at} with {len(pages)} pages and {len(op.pages)} of its own")
        self[op.state] = Kept(op.at, owner, list(pages[:slots]), list(op.pages), state)

    def resume(self, op: rank_worker_pb2.Resume, owner: int, pages: Sequence[int]) -> tuple[int, set[int]]:
        """The state, and the pages that are shared with it."""
        kept = self.get(op.state)
        if kept is None:
            self.violation(f"state {op.state} is resumed and does not exist")
            return 0, set()
        full = kept.at // self.page_rows
        if (op.at, owner, list(pages[:full])) != (kept.at, kept.owner, kept.rows[:full]) or len(pages) < len(kept.rows):
            self.violation(f"state {op.state}, {kept}, is resumed at {op.at} of {owner} with {pages}")
        return kept.state, {*kept.rows} & {*pages}

    def forget(self, op: rank_worker_pb2.Forget) -> None:
        for state in op.states:
            if self.pop(state, None) is None:
                self.violation(f"state {state} is forgotten and does not exist")

    def below(self, pages: set[int], row: int) -> set[int]:
        """Of the pages of a lane that writes from a row on, those that hold rows of states from there on."""
        return {page for kept in self.values() if row < kept.at for page in kept.rows[row // self.page_rows :] if page in pages}


@dataclass
class Granted:
    conversation: int
    digest: bytes
    at: int
    mark: int
    owner: int
    rows: list[int]
    fixed: list[int]
    kept: bool = False
    forgetting: bool = False
    pins: set[int] = field(default_factory=set)


class FakeKept:
    """Of a manager. `grants`: says whether a conversation's state at some tokens is kept; `asks`: (conversation, at, mark) of
    all questions; `late`: questions that wait for `answer`, where set."""

    def __init__(self, pages: FakePages, page_rows: int, violation: Callable[[str], None]) -> None:
        self.pages, self.page_rows, self.violation = pages, page_rows, violation
        self.states: dict[int, Granted] = {}
        self.resuming: dict[int, int] = {}
        """States of conversations whose resume is not sent yet."""
        self.fences: list[tuple[int, int, int]] = []
        """(state, conversation, seq) of pins that wait for a round."""
        self.asks: list[tuple[int, int, int]] = []
        self.unanswered: dict[int, int] = {}
        self.resumed: list[tuple[int, int]] = []
        self.ended: dict[int, str] = {}
        self.blocks: dict[int, bytes] = {}
        self.seen: set[bytes] = set()
        self.grants: Callable[[int, int], bool] = lambda _conversation, _at: True
        self.late: list[tuple[int, Any]] | None = None

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def digests(self, blocks: bytes) -> list[bytes]:
        return [blocks[i : i + 16] for i in range(0, len(blocks), 16)]

    def look_up(self, admit: Any) -> tuple[int, Granted] | None:
        """The longest state that is a prefix."""
        digests = self.digests(admit.blocks)
        if admit.prompt_tokens <= 64 * len(digests):
            self.violation(f"{len(digests)} blocks of {admit.prompt_tokens} tokens leave nothing to run")
        ready = [(s, g) for s, g in self.states.items() if g.kept and not g.forgetting and g.digest in digests]
        return max(ready, key=lambda one: one[1].at, default=None)

    def shared(self, admit: Any) -> int:
        """Tokens of the longest prefix that an earlier prompt had too and no state ends."""
        digests = self.digests(admit.blocks)
        at = max((i + 1 for i, digest in enumerate(digests) if digest in self.seen), default=0)
        self.seen.update(digests)
        return 0 if at and any(g.digest == digests[at - 1] for g in self.states.values()) else 64 * at

    def resume(self, name: int, state: int) -> pb.Resumable:
        kept = self.states[state]
        kept.pins.add(name)
        self.resuming[name] = state
        return pb.Resumable(state=state, at=kept.at, mark=kept.mark)

    # ---- keeping ------------------------------------------------------------------------------------------------------

    def ask(self, ask: Any, position: int) -> None:
        name = ask.conversation
        self.asks.append((name, ask.at, ask.mark))
        if ask.at % 64 or not ask.at or ask.at // 64 > len(self.digests(self.blocks.get(name, b""))):
            self.violation(f"conversation {name} asks to be kept at {ask.at}")
        if position > ask.at:
            self.violation(f"conversation {name} asks to be kept at {ask.at} and is at {position}")
        if name in self.unanswered:
            self.violation(f"conversation {name} asks at {ask.at}, and at {self.unanswered[name]} it was not answered")
        self.unanswered[name] = ask.at

    def answer(self, ask: Any) -> pb.KeepAnswer:
        name = ask.conversation
        self.unanswered.pop(name, None)
        lease = self.pages.leases.get(name)
        if lease is None:
            return pb.KeepAnswer(reason="it ended")
        digest = self.digests(self.blocks[name])[ask.at // 64 - 1]
        if any(g.digest == digest for g in self.states.values()):
            return pb.KeepAnswer(reason="it is kept already")
        if not self.grants(name, ask.at):
            return pb.KeepAnswer(reason="not now")
        if min(self.pages.spare(owner) for owner in range(self.pages.owners)) < 1:
            return pb.KeepAnswer(reason="no page is free")
        fixed = [self.pages.take(owner, 1)[0] for owner in range(self.pages.owners)]
        state = 1000 + len(self.states) + len(self.ended)
        rows = lease.pages[: -(-ask.at // self.page_rows)]
        self.states[state] = Granted(name, digest, ask.at, ask.mark, lease.owner, rows, fixed)
        self.pages.states[state] = rows + fixed
        return pb.KeepAnswer(state=state, pages=fixed)

    def keep(self, state: int) -> None:
        granted = self.states.get(state)
        if granted is None or granted.kept:
            self.violation(f"state {state} is kept: {granted}, {self.ended.get(state)}")
        else:
            granted.kept = True

    def forgotten(self, states: Sequence[int], fence: int) -> None:
        """By the workers, as they were told; or never kept."""
        for state in states:
            granted = self.states.pop(state, None)
            if granted is None or granted.kept != granted.forgetting:
                self.violation(f"state {state} is forgotten: {granted}, {self.ended.get(state)}")
            self.ended[state] = "forgotten" if granted is not None and granted.kept else "never kept"
            self.pages.fenced.append((fence, self.pages.states.pop(state, [])))

    # ---- resuming -----------------------------------------------------------------------------------------------------

    def has_resumed(self, name: int, fence: int) -> None:
        if name not in self.resuming:
            self.violation(f"conversation {name} has resumed, and had nothing to resume")
            return
        self.resumed.append((name, fence))
        self.fences.append((self.resuming.pop(name), name, fence))

    def finish(self, name: int, fence: int) -> None:
        if (state := self.resuming.pop(name, None)) is not None:
            self.fences.append((state, name, fence))

    def lift(self, answered: int) -> None:
        for state, name, seq in self.fences:
            if seq <= answered and state in self.states:
                self.states[state].pins.discard(name)
        self.fences = [one for one in self.fences if one[2] > answered]

    def evictable(self) -> list[int]:
        return [state for state, g in self.states.items() if g.kept and not g.forgetting and not g.pins]
