"""What a fake worker knows of lanes, and the rules of rounds: any operation that breaks one is a violation."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from router_fake_states import FakeStates

from latentpool.v1 import rank_worker_pb2 as pb

_STAGES = {
    "free": 0, "forget": 0, "bind": 1, "table": 1, "resume": 1, "borrow": 1, "release": 1, "keep": 2, "carry": 3, "prompt": 4,
    "decode": 5, "ping": 6,
}  # fmt: skip
"""Operations of a round come in this order; a release may also follow its lane's chunk."""


class Lane:
    def __init__(self, bind: pb.Bind, forgetful: bool) -> None:
        self.conversation = bind.conversation
        self.owner = bind.owner
        self.forgetful = forgetful
        self.pages: list[int] = []
        self.borrowed: list[int] = []
        self.fetches = False
        """Since it released its borrowed pages, or ran a chunk without any."""
        self.arriving: list[int] = []
        """New owner's pages of the slices so far."""
        self.new_owner: int | None = None
        self.carried_in = 0
        """The round with the last slice of its last carry."""
        self.state = 0
        self.position = 0
        self.last: int | None = None
        self.shared: set[int] = set()
        """Pages of the state that it went on from."""
        self.new: list[int] = []
        """Pages mapped in this round."""

    @property
    def holds(self) -> list[int]:
        return self.pages + self.borrowed + self.arriving


class FakeLanes(dict[int, Lane]):
    """`releases`, `carries`: (conversation, seq) of every Release and of every last slice."""

    def __init__(self, owners: int, page_rows: int, violation: Callable[[str], None]) -> None:
        super().__init__()
        self.owners = owners
        self.page_rows = page_rows
        self.states = FakeStates(owners, page_rows, violation)
        self.violation = violation
        self.releases: list[tuple[int, int]] = []
        self.carries: list[tuple[int, int]] = []
        self.round = pb.Round()

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def begin(self, round_: pb.Round) -> None:
        self.round = round_
        stage = 0
        previous: tuple[str, Any] = ("", None)
        for operation in round_.operations:
            kind = str(operation.WhichOneof("operation"))
            op = getattr(operation, kind)
            after_its_chunk = kind == "release" and previous[0] == "prompt" and previous[1].lane == op.lane
            if not after_its_chunk:
                if _STAGES[kind] < stage:
                    self.violation(f"round {round_.seq}: {kind} after {previous[0]}")
                stage = _STAGES[kind]
            if kind == "resume" and (previous[0] not in ("bind", "table") or previous[1].lane != op.lane):
                self.violation(f"round {round_.seq}: lane {op.lane} resumes after {previous[0]}")
            previous = kind, op

    def end(self) -> None:
        """Borrowed pages are released in the round of the last chunk that uses them."""
        for name, lane in self.items():
            used_up = lane.borrowed and lane.position == self.borrowed_rows(lane)
            if used_up or (lane.borrowed and lane.last is not None):
                self.violation(f"round {self.round.seq}: lane {name} still borrows after its fill")
            self.check_given(name)

    def borrowed_rows(self, lane: Lane) -> int:
        return len(lane.borrowed) // max(self.owners - 1, 1) * self.page_rows

    # ---- operations -------------------------------------------------------------------------------------------------

    def bind(self, op: pb.Bind, forgetful: bool) -> None:
        if op.lane in self:
            self.violation(f"lane {op.lane} bound twice")
        if op.conversation in {lane.conversation for lane in self.values()}:
            self.violation(f"conversation {op.conversation} has two lanes")
        if op.owner >= self.owners:
            self.violation(f"conversation {op.conversation} is owned by rank {op.owner} of {self.owners}")
        self[op.lane] = Lane(op, forgetful)

    def table(self, op: pb.Table) -> None:
        lane = self[op.lane]
        if op.first_slot != len(lane.pages):
            self.violation(f"lane {op.lane}: slot {op.first_slot} after {len(lane.pages)}")
        if lane.arriving:
            self.violation(f"lane {op.lane} gets pages while it is carried")
        self.check_new(op.pages, [lane.owner] * len(op.pages), but=self.states.pages)
        lane.pages += op.pages
        lane.new += op.pages

    def borrow(self, op: pb.Borrow) -> None:
        lane = self[op.lane]
        lenders = [rank for rank in range(self.owners) if rank != lane.owner]
        slots, rest = divmod(len(op.pages), max(len(lenders), 1))
        if rest or not slots or op.first_slot or slots > len(lane.pages):
            self.violation(f"lane {op.lane} with {len(lane.pages)} pages borrows {len(op.pages)} at slot {op.first_slot}")
        if lane.position or lane.borrowed or lane.fetches:
            self.violation(f"lane {op.lane} borrows after {lane.position} rows")
        self.check_new(op.pages, lenders * slots)
        lane.borrowed = list(op.pages)

    def release(self, op: pb.Release) -> None:
        lane = self[op.lane]
        if not lane.borrowed:
            self.violation(f"lane {op.lane} releases and borrows nothing")
        self.releases.append((lane.conversation, self.round.seq))
        lane.borrowed, lane.fetches = [], True

    def carry(self, op: pb.Carry) -> None:
        lane = self[op.lane]
        if op.owner == lane.owner or op.owner >= self.owners or (lane.arriving and op.owner != lane.new_owner):
            self.violation(f"lane {op.lane} of rank {lane.owner} is carried to {op.owner}, on its way to {lane.new_owner}")
        if op.first_slot != len(lane.arriving) or not op.pages:
            self.violation(f"lane {op.lane}: a slice of {len(op.pages)} at slot {op.first_slot} after {len(lane.arriving)}")
        if lane.borrowed:
            self.violation(f"lane {op.lane} is carried and borrows")
        self.check_new(op.pages, [op.owner] * len(op.pages))
        lane.new_owner = op.owner
        lane.arriving += op.pages
        if op.last:
            if len(lane.arriving) < len(lane.pages):
                self.violation(f"lane {op.lane} is carried with {len(lane.arriving)} of {len(lane.pages)} pages")
            self.carries.append((lane.conversation, self.round.seq))
            lane.pages, lane.arriving, lane.owner, lane.new_owner = lane.arriving, [], op.owner, None
            self.check_given(op.lane)
            lane.carried_in, lane.shared = self.round.seq, set()

    def free(self, op: pb.Free) -> None:
        del self[op.lane]

    def keep(self, op: pb.Keep) -> None:
        lane = self[op.lane]
        if op.at != lane.position or lane.last is not None:
            self.violation(f"lane {op.lane} is kept at {op.at}, at {lane.position}, {lane.last}")
        self._check_stands(op.lane)
        self.check_new(op.pages, list(range(self.owners)))
        self.states.keep(op, lane.owner, lane.pages, lane.state)

    def resume(self, op: pb.Resume) -> None:
        lane = self[op.lane]
        if lane.position or lane.borrowed or lane.arriving:
            self.violation(f"lane {op.lane} resumes at {lane.position}, {lane.borrowed}, {lane.arriving}")
        lane.state, lane.shared = self.states.resume(op, lane.owner, lane.pages)
        lane.position = op.at
        lane.fetches = True

    def write(self, name: int, rows: int) -> None:
        """A lane gets rows where it stands: on pages of its own, above what kept states hold."""
        lane = self[name]
        slots = range(lane.position // self.page_rows, min(-(-(lane.position + rows) // self.page_rows), len(lane.pages)))
        pages = {lane.pages[slot] for slot in slots}
        others = {page for other in self.values() if other is not lane for page in other.holds if page not in other.shared}
        if wrong := pages & (others | lane.shared) or self.states.below(pages, lane.position):
            self.violation(f"round {self.round.seq}: lane {name} at {lane.position} writes on pages {wrong} of others")

    # ---- rules ------------------------------------------------------------------------------------------------------

    def check_prompt(self, op: pb.Prompt) -> None:
        lane = self[op.lane]
        self._check_stands(op.lane)
        if self.owners == 1:
            right = op.mode == pb.PROMPT_MODE_LOCAL
        elif lane.borrowed:
            right = op.mode == pb.PROMPT_MODE_BORROWED and op.start + len(op.tokens) <= self.borrowed_rows(lane)
        else:
            right = op.mode == pb.PROMPT_MODE_FETCH
            lane.fetches = True
        if not right:
            mode = pb.PromptMode.Name(op.mode)
            self.violation(f"chunk at {op.start} of {len(op.tokens)} rows is {mode}, {self.borrowed_rows(lane)} are borrowed")

    def check_decode(self, op: pb.Decode) -> None:
        for lane in op.lanes:
            self._check_stands(lane)

    def _check_stands(self, name: int) -> None:
        """Nothing runs from the first slice of a carry until the last one is answered."""
        lane = self[name]
        if lane.arriving or lane.carried_in > self.round.acknowledged_seq:
            self.violation(f"round {self.round.seq}: lane {name} runs while it is carried")

    def check_given(self, name: int) -> None:
        """A lane has pages of the state only that it goes on from."""
        lane = self[name]
        if strange := self.states.pages & {*lane.new} - lane.shared:
            self.violation(f"round {self.round.seq}: lane {name} was given pages {strange} of kept states")
        lane.new = []

    def check_new(self, pages: Sequence[int], owners: Sequence[int], but: Set[int] = frozenset()) -> None:
        """Pages that nobody holds, each of its owner; or those that may be shared."""
        held = [page for lane in self.values() for page in lane.holds if page not in but]
        held += self.states.pages - but
        for page, owner in zip(pages, owners, strict=False):
            if page in held:
                self.violation(f"page {page} mapped twice")
            if page % self.owners != owner:
                self.violation(f"page {page} is not of rank {owner}")
            held.append(page)
