"""What goes into a round: frees, seats and tables first, then what is kept, carries, prompt chunks, and one window for all that
decode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from latentpool.geometry import BLOCK
from latentpool.v1 import rank_worker_pb2 as pb
from services.router.conversations import Book, Conversation, Phase
from services.router.kept import Ask
from services.router.pace import Pace

REPLY_BYTES = 32 << 20
"""Raw logits that a round may bring back from all ranks together, one block of rows excepted."""


@dataclass(slots=True)
class Draft:
    """A round in the making: operations, and beside each the conversations whose results it brings."""

    operations: list[pb.Operation] = field(default_factory=list)
    conversations: list[Sequence[Conversation]] = field(default_factory=list)
    released: list[Conversation] = field(default_factory=list)
    """Their borrowed pages are given back in this round."""
    carried_rows: int = 0
    forgotten: list[int] = field(default_factory=list)
    """States that end in this round."""
    resumed: list[Conversation] = field(default_factory=list)
    """They go on from kept states in this round."""
    asking: list[Conversation] = field(default_factory=list)
    """Their chunks reach places where states are to be kept."""
    kept: list[tuple[Conversation, int]] = field(default_factory=list)
    """States that this round keeps."""

    def add(self, operation: pb.Operation, conversations: Sequence[Conversation] = ()) -> None:
        self.operations.append(operation)
        self.conversations.append(conversations)


class Composer:
    """Writes rounds for a group. Only it authors positions; the workers advance lanes alike. A conversation goes on from what
    was sent, answered or not: its workers feed their own last token. `owners`: ranks among which the rows are split, 1 where
    every rank keeps them all."""

    def __init__(self, page_rows: int, vocab: int, chunk_rows: int, owners: int = 1) -> None:
        self.owners = owners
        self._page_rows = page_rows
        self._raw_rows = max(BLOCK, REPLY_BYTES // (4 * vocab) // BLOCK * BLOCK)
        self._raw_left = 0
        self.pace = Pace(chunk_rows)

    def compose(self, book: Book, leaving: Sequence[Conversation], forget: Sequence[int] = (), idle: bool = False) -> Draft:
        """The next round; empty if there is nothing to do. Lanes of those that leave are freed before anybody is seated. States
        of `forget` end; idle conversations are served with `idle` only. Advances conversations: the round must be sent."""
        draft = Draft(forgotten=list(forget))
        self._raw_left = self._raw_rows
        for c in leaving:
            draft.add(pb.Operation(free=pb.Free(lane=c.lane)), (c,))
        if forget:
            draft.add(pb.Operation(forget=pb.Forget(states=forget)))
        filling, decoding = book.running(Phase.FILLING), book.running(Phase.DECODING)
        idlers = [c for c in book.seated.values() if c.idle and c.runs]
        served = idlers if idle else []
        for c in (*filling, *decoding, *served):
            self._seat(draft, c)
        for c in (*filling, *idlers):
            self._keep(draft, c)
        windows = [c for c in decoding if self.can_decode(c)]
        self._carries(draft, [*filling, *decoding], self.pace.carried_rows(bool(windows)))
        rows = self.pace.rows(bool(windows), draft.carried_rows)
        self._prompts(draft, [c for c in filling if not c.stands], rows)
        self._replies(draft, [c for c in windows if c.sent >= c.given_rows])
        self._given(draft, [c for c in windows if c.sent < c.given_rows])
        # short, as if somebody decoded: whoever comes waits for it
        self._prompts(draft, [c for c in served if not c.stands], self.pace.rows(others_decode=True))
        return draft

    def can_decode(self, c: Conversation) -> bool:
        """Whether it takes part in this round's decode: it has rows left to run whatever is sampled, its pages came and are
        not on their way to another owner, and its client reads."""
        may = c.sent < c.rows_at_end and c.carry is None and not c.mailbox.full
        return may and c.has_pages(c.sent + c.window, self._page_rows)

    def learn(self, draft: Draft, seconds: float) -> None:
        """The slowest rank took so long for a round. What is kept or resumed is copied, which says nothing of other rounds."""
        if draft.kept or draft.resumed:
            return
        blocks = sum(-(-len(operation.prompt.tokens) // BLOCK) for operation in draft.operations)
        decodes = any(operation.HasField("decode") for operation in draft.operations)
        self.pace.learn(blocks, decodes, seconds, draft.carried_rows)

    # ---- parts ------------------------------------------------------------------------------------------------

    def _seat(self, draft: Draft, c: Conversation) -> None:
        """What the workers must know before they run anything for it. While it is carried its new pages are on the way; one
        that is carried at once goes on from a state first, on the owner of that."""
        new = not c.bound
        if new:
            draft.add(pb.Operation(bind=_bind(c)))
            c.bound = True
        if (new or c.carry is None) and c.tabled < len(c.pages):
            table = pb.Table(lane=c.lane, first_slot=c.tabled, pages=c.pages[c.tabled :])
            draft.add(pb.Operation(table=table))
            c.tabled = len(c.pages)
        if c.keeping.resume is not None:
            resume = c.resumed()
            draft.add(pb.Operation(resume=pb.Resume(lane=c.lane, state=resume.state, at=resume.at)), (c,))
            draft.resumed.append(c)
        if new and c.borrowed:
            draft.add(pb.Operation(borrow=pb.Borrow(lane=c.lane, first_slot=0, pages=c.borrowed)))
        if c.recalled:
            self._release(draft, c)

    @staticmethod
    def _keep(draft: Draft, c: Conversation) -> None:
        """Its state where it stands, once that is granted."""
        keeping, ask = c.keeping, c.keeping.ask
        if ask is not None and ask.state:
            keep = pb.Keep(lane=c.lane, state=ask.state, at=ask.place.at, pages=ask.pages)
            draft.add(pb.Operation(keep=keep), (c,))
            draft.kept.append((c, ask.state))
            keeping.ask, keeping.at = None, ask.place.at

    @staticmethod
    def _release(draft: Draft, c: Conversation) -> None:
        draft.add(pb.Operation(release=pb.Release(lane=c.lane)), (c,))
        draft.released.append(c)
        c.borrowed, c.recalled = [], False

    def _carries(self, draft: Draft, conversations: Sequence[Conversation], rows: int) -> None:
        """Slices of carries under way, whole pages of so many rows at most, but at least one page a round."""
        left = max(rows // self._page_rows, 1)
        for c in conversations:
            if not left or c.carry is None or c.carry.all_sent or c.keeping.ask is not None:
                continue
            carry, start = c.carry, c.carry.sent
            filled = max(-(-c.sent // self._page_rows) - start, 0)
            pages = carry.pages[start : start + left] if left < filled else carry.pages[start:]  # empty ones cost nothing
            carry.sent += len(pages)
            left -= min(left, filled)
            slice_ = pb.Carry(lane=c.lane, owner=carry.owner, first_slot=start, pages=pages, last=carry.all_sent)
            draft.add(pb.Operation(carry=slice_), (c,))
            draft.carried_rows += max(min(c.sent, carry.sent * self._page_rows) - start * self._page_rows, 0)

    def _prompts(self, draft: Draft, filling: Sequence[Conversation], left: int) -> None:
        """Chunks of prompts in the order in which they are served, `left` rows at most."""
        for c in filling:
            mode, rows = self._mode(c, min(left, c.rows_to_place))
            if _logits(c) == pb.LOGITS_RAW:
                rows = min(rows, self._raw_left // BLOCK * BLOCK)
                self._raw_left -= rows
            if not rows or c.mailbox.full or not c.has_pages(c.sent + rows, self._page_rows):
                continue
            end = c.sent + rows
            last = end == c.prompt_rows and not c.idle
            prompt = pb.Prompt(
                lane=c.lane,
                start=c.sent,
                tokens=c.tokens[c.sent : end].tolist(),
                last=last,
                logits=_logits(c),
                log_probs=log_probs((c,)) if last and not c.generated else 0,
                mode=mode,
            )
            if c.scoring is not None and end < len(c.tokens):
                prompt.following = int(c.tokens[end])
            draft.add(pb.Operation(prompt=prompt), (c,))
            c.advance(rows)
            if c.keeping.places and end == c.keeping.places[0].at:
                c.keeping.ask = Ask(c.keeping.places.pop(0))
                draft.asking.append(c)
            left -= -(-rows // BLOCK) * BLOCK
            if c.borrowed and (last or end == self._borrowed_rows(c)):
                self._release(draft, c)

    def _mode(self, c: Conversation, rows: int) -> tuple[pb.PromptMode.ValueType, int]:
        """Where the ranks find latent rows in its next chunk, and how many of so many rows the chunk may have then."""
        if self.owners == 1:
            return pb.PROMPT_MODE_LOCAL, rows
        if c.borrowed:
            return pb.PROMPT_MODE_BORROWED, min(rows, self._borrowed_rows(c) - c.sent)
        return pb.PROMPT_MODE_FETCH, rows

    def _borrowed_rows(self, c: Conversation) -> int:
        """Rows of the slots for which other owners lend it pages."""
        return len(c.borrowed) // (self.owners - 1) * self._page_rows

    def _replies(self, draft: Draft, replies: Sequence[Conversation]) -> None:
        """One operation for all replies: each lane's last token is run, and the next one sampled."""
        if replies:
            decode = pb.Decode(lanes=[c.lane for c in replies], rows=1, log_probs=log_probs(replies))
            draft.add(pb.Operation(decode=decode), replies)
            for c in replies:
                c.advance(1)

    def _given(self, draft: Draft, conversations: Sequence[Conversation]) -> None:
        """One operation for all windows alike whose tokens are given: those of Scores, and of replies being replayed."""
        alike: dict[tuple[int, pb.Logits.ValueType, bool], list[Conversation]] = defaultdict(list)
        for c in conversations:
            if _logits(c) == pb.LOGITS_RAW:
                if self._raw_left < c.window:
                    continue
                self._raw_left -= c.window
            alike[c.window, _logits(c), c.scoring is not None and c.sent + c.window < len(c.tokens)].append(c)
        for (rows, logits, follows), group in alike.items():
            decode = pb.Decode(lanes=[c.lane for c in group], rows=rows, logits=logits)
            for c in group:
                decode.forced.extend(c.token(row) for row in range(c.sent, c.sent + rows))
                if follows:
                    decode.following.append(c.token(c.sent + rows))
                c.advance(rows)
            draft.add(pb.Operation(decode=decode), group)


def _bind(c: Conversation) -> pb.Bind:
    s = c.sampling
    return pb.Bind(
        lane=c.lane,
        conversation=c.id,
        temperature=s.temperature,
        top_k=s.top_k,
        seed=c.seed,
        top_p=s.top_p,
        min_p=s.min_p,
        owner=c.owner,
    )


def log_probs(conversations: Iterable[Conversation]) -> int:
    """What an operation must be asked for these replies' log-probabilities: 1 + the most likeliest tokens that one of them
    wants, 0 where none wants any."""
    return max((1 + wanted for c in conversations if (wanted := c.sampling.log_probs) is not None), default=0)


def _logits(c: Conversation) -> pb.Logits.ValueType:
    if c.scoring is None:
        return pb.LOGITS_UNSPECIFIED
    return pb.LOGITS_RAW if c.scoring.raw else pb.LOGITS_SCORES
