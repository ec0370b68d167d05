"""What goes into a round: frees, seats and tables first, then prompt chunks, then one window for all that decode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from latentpool.geometry import BLOCK
from latentpool.v1 import rank_worker_pb2 as pb
from services.router.conversations import Book, Conversation, Phase
from services.router.pace import Pace

REPLY_BYTES = 32 << 20
"""Raw logits that a round may bring back from all ranks together, one block of rows excepted."""


@dataclass(slots=True)
class Draft:
    """A round in the making: operations, and beside each the conversations whose results it brings."""

    operations: list[pb.Operation] = field(default_factory=list)
    conversations: list[Sequence[Conversation]] = field(default_factory=list)

    def add(self, operation: pb.Operation, conversations: Sequence[Conversation] = ()) -> None:
        self.operations.append(operation)
        self.conversations.append(conversations)


class Composer:
    """Writes rounds for a group. Only it authors positions; the workers advance lanes alike. A conversation goes on from what
    was sent, answered or not: its workers feed their own last token."""

    def __init__(self, page_rows: int, vocab: int, chunk_rows: int) -> None:
        self._page_rows = page_rows
        self._raw_rows = max(BLOCK, REPLY_BYTES // (4 * vocab) // BLOCK * BLOCK)
        self._raw_left = 0
        self.pace = Pace(chunk_rows)

    def compose(self, book: Book, leaving: Sequence[Conversation]) -> Draft:
        """The next round; empty if there is nothing to do. Lanes of those that leave are freed before anybody is seated.
        Advances conversations: the round must be sent."""
        draft = Draft()
        self._raw_left = self._raw_rows
        for c in leaving:
            draft.add(pb.Operation(free=pb.Free(lane=c.lane)), (c,))
        filling, decoding = book.running(Phase.FILLING), book.running(Phase.DECODING)
        self._seat(draft, [*filling, *decoding])
        windows = [c for c in decoding if self.can_decode(c)]
        self._prompts(draft, filling, bool(windows))
        self._replies(draft, [c for c in windows if c.sent >= c.given_rows])
        self._given(draft, [c for c in windows if c.sent < c.given_rows])
        return draft

    def can_decode(self, c: Conversation) -> bool:
        """Whether it takes part in this round's decode: it has rows left to run whatever is sampled, its pages came, and its
        client reads."""
        return c.sent < c.rows_at_end and not c.mailbox.full and c.has_pages(c.sent + c.window, self._page_rows)

    def learn(self, round_: pb.Round, seconds: float) -> None:
        """The slowest rank took so long for a round."""
        blocks = sum(-(-len(operation.prompt.tokens) // BLOCK) for operation in round_.operations)
        self.pace.learn(blocks, any(operation.HasField("decode") for operation in round_.operations), seconds)

    # ---- parts ------------------------------------------------------------------------------------------------

    def _seat(self, draft: Draft, conversations: Sequence[Conversation]) -> None:
        for c in conversations:
            if not c.bound:
                s = c.sampling
                bind = pb.Bind(
                    lane=c.lane,
                    conversation=c.id,
                    temperature=s.temperature,
                    top_k=s.top_k,
                    seed=c.seed,
                    top_p=s.top_p,
                    min_p=s.min_p,
                )
                draft.add(pb.Operation(bind=bind))
                c.bound = True
            if c.tabled < len(c.pages):
                table = pb.Table(lane=c.lane, first_slot=c.tabled, pages=c.pages[c.tabled :])
                draft.add(pb.Operation(table=table))
                c.tabled = len(c.pages)

    def _prompts(self, draft: Draft, filling: Sequence[Conversation], others_decode: bool) -> None:
        """Chunks of prompts in the order in which they are served, as many rows as the round may hold."""
        left = self.pace.rows(others_decode)
        for c in filling:
            rows = min(left, c.prompt_rows - c.sent)
            if _logits(c) == pb.LOGITS_RAW:
                rows = min(rows, self._raw_left // BLOCK * BLOCK)
                self._raw_left -= rows
            if not rows or c.mailbox.full or not c.has_pages(c.sent + rows, self._page_rows):
                continue
            end = c.sent + rows
            last = end == c.prompt_rows
            prompt = pb.Prompt(
                lane=c.lane,
                start=c.sent,
                tokens=c.tokens[c.sent : end].tolist(),
                last=last,
                logits=_logits(c),
                log_probs=log_probs((c,)) if last and not c.generated else 0,
            )
            if c.scoring is not None and end < len(c.tokens):
                prompt.following = int(c.tokens[end])
            draft.add(pb.Operation(prompt=prompt), (c,))
            c.advance(rows)
            left -= -(-rows // BLOCK) * BLOCK

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


def log_probs(conversations: Iterable[Conversation]) -> int:
    """What an operation must be asked for these replies' log-probabilities: 1 + the most likeliest tokens that one of them
    wants, 0 where none wants any."""
    return max((1 + wanted for c in conversations if (wanted := c.sampling.log_probs) is not None), default=0)


def _logits(c: Conversation) -> pb.Logits.ValueType:
    if c.scoring is None:
        return pb.LOGITS_UNSPECIFIED
    return pb.LOGITS_RAW if c.scoring.raw else pb.LOGITS_SCORES
