"""What goes into a round: frees, seats and tables first, then prompt chunks, then one window for all that decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from latentpool.geometry import BLOCK, R_MAX
from latentpool.v1 import rank_worker_pb2 as pb
from services.router.conversations import Book, Conversation, Phase

REPLY_BYTES = 32 << 20
"""Raw logits that a round may bring back from all ranks together, one block of rows excepted."""
GAP_SECONDS = 0.15
"""Target of the gap between a stream's tokens while prompts are computed beside it."""


@dataclass(slots=True)
class Draft:
    """A round in the making: operations, and beside each the conversations whose results it brings."""

    operations: list[pb.Operation] = field(default_factory=list)
    conversations: list[Sequence[Conversation]] = field(default_factory=list)

    def add(self, operation: pb.Operation, conversations: Sequence[Conversation] = ()) -> None:
        self.operations.append(operation)
        self.conversations.append(conversations)


@dataclass(slots=True)
class Pace:
    """How many prompt rows fit beside streams that decode, learned from rounds. Bits do not depend on it (E2)."""

    chunk_rows: int
    seconds_a_row: float = 0.0

    def rows(self, others_decode: bool) -> int:
        """Rows of prompt work a round, a multiple of 64."""
        if not others_decode or not self.seconds_a_row:
            return self.chunk_rows
        fits = int(GAP_SECONDS / self.seconds_a_row) // BLOCK * BLOCK
        return min(max(fits, BLOCK), self.chunk_rows)

    def learn(self, rows: int, seconds: float) -> None:
        if rows and seconds > 0:
            self.seconds_a_row = seconds / rows


class Composer:
    """Writes rounds for a group. Only it authors positions; the workers advance lanes alike."""

    def __init__(self, page_rows: int, vocab: int, chunk_rows: int) -> None:
        self._page_rows = page_rows
        self._raw_rows = max(BLOCK, REPLY_BYTES // (4 * vocab) // BLOCK * BLOCK)
        self._raw_left = 0
        self.pace = Pace(chunk_rows)

    def compose(self, book: Book, freed: Sequence[int]) -> Draft:
        """The next round; empty if there is nothing to do. `freed` lanes are freed before anybody is seated. Marks
        conversations as bound and tabled: the round must be sent."""
        draft = Draft()
        self._raw_left = self._raw_rows
        for lane in freed:
            draft.add(pb.Operation(free=pb.Free(lane=lane)))
        filling = book.running(Phase.FILLING)
        decoding = [c for c in book.running(Phase.DECODING) if self.can_decode(c)]
        self._seat(draft, [*filling, *book.running(Phase.DECODING)])
        self._prompts(draft, filling, bool(decoding))
        self._decodes(draft, decoding)
        return draft

    def can_decode(self, conversation: Conversation) -> bool:
        """Whether it takes part in this round's decode: its pages came and its client reads."""
        return not conversation.mailbox.full and conversation.has_pages(
            conversation.position + self._window(conversation), self._page_rows
        )

    # ---- parts ------------------------------------------------------------------------------------------------

    def _seat(self, draft: Draft, conversations: Sequence[Conversation]) -> None:
        for c in conversations:
            if not c.bound:
                s = c.sampling
                bind = pb.Bind(lane=c.lane, conversation=c.id, temperature=s.temperature, top_k=s.top_k, seed=c.seed)
                draft.add(pb.Operation(bind=bind))
                c.bound = True
            if c.tabled < len(c.pages):
                table = pb.Table(lane=c.lane, first_slot=c.tabled, pages=c.pages[c.tabled :])
                draft.add(pb.Operation(table=table))
                c.tabled = len(c.pages)

    def _prompts(self, draft: Draft, filling: Sequence[Conversation], others_decode: bool) -> None:
        """Chunks of prompts in order of arrival, as many rows as the round may hold."""
        left = self.pace.rows(others_decode)
        for c in filling:
            rows = min(left, c.prompt_rows - c.position)
            if _logits(c) == pb.LOGITS_RAW:
                rows = min(rows, self._raw_left // BLOCK * BLOCK)
                self._raw_left -= rows
            if not rows or c.mailbox.full or not c.has_pages(c.position + rows, self._page_rows):
                continue
            end = c.position + rows
            prompt = pb.Prompt(
                lane=c.lane,
                start=c.position,
                tokens=c.tokens[c.position : end].tolist(),
                last=end == c.prompt_rows,
                logits=_logits(c),
            )
            if c.scoring is not None and end < len(c.tokens):
                prompt.following = int(c.tokens[end])
            draft.add(pb.Operation(prompt=prompt), (c,))
            left -= -(-rows // BLOCK) * BLOCK

    def _decodes(self, draft: Draft, decoding: Sequence[Conversation]) -> None:
        """One operation for all replies, and one for each Score, whose tokens are given."""
        replies = [c for c in decoding if c.scoring is None]
        if replies:
            draft.add(pb.Operation(decode=pb.Decode(lanes=[c.lane for c in replies], rows=1)), replies)
        for c in decoding:
            if c.scoring is not None:
                end = c.position + self._window(c)
                if c.scoring.raw:
                    if self._raw_left < end - c.position:
                        continue
                    self._raw_left -= end - c.position
                decode = pb.Decode(
                    lanes=[c.lane],
                    rows=end - c.position,
                    forced=c.tokens[c.position : end].tolist(),
                    logits=_logits(c),
                    following=c.tokens[end : end + 1].tolist(),
                )
                draft.add(pb.Operation(decode=decode), (c,))

    def _window(self, c: Conversation) -> int:
        return 1 if c.scoring is None else min(R_MAX, len(c.tokens) - c.position)


def _logits(c: Conversation) -> pb.Logits.ValueType:
    if c.scoring is None:
        return pb.LOGITS_UNSPECIFIED
    return pb.LOGITS_RAW if c.scoring.raw else pb.LOGITS_SCORES
