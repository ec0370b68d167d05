"""The router's loop: admit, extend, compose, send, collect, deliver. It never waits for a client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from latentpool.errors import BusyError, DigestMismatchError, EpochError, NotServedError
from latentpool.v1 import pool_manager_pb2, router_pb2
from latentpool.v1 import rank_worker_pb2 as pb
from services.router import digests
from services.router.compose import Composer, Draft
from services.router.conversations import Book, Conversation, Phase
from services.router.delivery import Tokens
from services.router.manager import Session
from services.router.scores import assemble
from services.router.workers import Workers

log = structlog.get_logger()

PING_SECONDS = 2.0
"""An idle group is probed this often."""
AHEAD_ROWS = 256
"""Pages are asked for this many rows ahead of need."""
_DRY_SECONDS = 0.05


class RoundLoop:
    """One group in one term and epoch. `wake` is set whenever there may be something to do; `ready` once all ranks have
    answered a round."""

    def __init__(self, session: Session, workers: Workers, composer: Composer, book: Book, vocab: int, page_rows: int) -> None:
        self.book = book
        self.wake = asyncio.Event()
        self.ready = asyncio.Event()
        self._session = session
        self._workers = workers
        self._composer = composer
        self._vocab = vocab
        self._page_rows = page_rows
        self._clock = asyncio.get_running_loop().time
        self._admits: dict[int, Conversation] = {}
        self._leaving: list[Conversation] = []
        self._ping_due = True

    async def run(self) -> None:
        """Runs rounds until it is cancelled. Raises EpochError; DigestMismatchError is reported to the manager first."""
        while True:
            self.wake.clear()
            self.admit()
            self.extend()
            draft = self.compose()
            if not draft.operations:
                await self.rest()
                continue
            round_ = await self._workers.send(draft.operations)
            results = await self._workers.collect(round_)
            self.deliver(draft, round_, results)

    # ---- entering and leaving -------------------------------------------------------------------------------------

    def submit(self, conversation: Conversation) -> None:
        """A conversation arrives."""
        self.book.queue.append(conversation)
        self.admit()

    def leave(self, conversation: Conversation) -> None:
        """A conversation ends, wherever it stands; a repeat does nothing. A lane that the workers know rests until the round
        that frees it is answered; its pages are fenced by that round."""
        if conversation.phase is Phase.ENDED:
            return
        self.book.leave(conversation)
        self._admits = {key: c for key, c in self._admits.items() if c is not conversation}
        if conversation.bound:
            self._leaving.append(conversation)
        elif conversation.lane >= 0:
            self._session.finish(conversation.id, self._workers.seq)
            self.book.rest_over(conversation.lane)
        self.wake.set()

    def fail(self, error: EpochError) -> None:
        """The epoch is over: every stream ends."""
        self.ready.clear()
        self.book.fail(error)

    # ---- the verbs ------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Asks the manager for pages for as many as there are lanes, in order of arrival."""
        while self.book.queue and self.book.lane_free:
            c = self.book.seat()
            max_tokens = 0 if c.scoring is not None else c.sampling.max_tokens
            self._admits[self._session.admit(c.id, c.lane, len(c.tokens), max_tokens, c.request_id)] = c
        for ahead, c in enumerate(self.book.queue):
            if c.ahead != ahead:
                c.ahead = ahead
                lanes = "the one lane is busy" if self.book.lanes == 1 else f"all {self.book.lanes} lanes are busy"
                c.mailbox.put(router_pb2.Waiting(ahead=ahead, reason=lanes))

    def extend(self) -> None:
        """Asks for the pages that running conversations need soon."""
        now, needs = self._clock(), []
        for c in self.book.seated.values():
            rows = min(max(c.position, c.prompt_rows) + AHEAD_ROWS, c.rows_at_end)
            if c.admitted and not c.asked_rows and now >= c.dry_until and not c.has_pages(rows, self._page_rows):
                c.asked_rows = rows
                needs.append(pool_manager_pb2.Need(conversation=c.id, rows=rows))
        if needs:
            self._session.extend(needs)

    def compose(self) -> Draft:
        """The next round. Those who left are freed in it, and their pages fenced by it."""
        draft = self._composer.compose(self.book, [c.lane for c in self._leaving])
        for c in self._leaving:
            self._session.finish(c.id, self._workers.seq + 1)
        self._leaving.clear()
        if not draft.operations and self._ping_due:
            draft.add(pb.Operation(ping=pb.Ping()))
        self._ping_due = False
        return draft

    async def rest(self) -> None:
        """Nothing to do: sleeps until there may be, or until a ping is due."""
        dry = [c for c in self.book.seated.values() if c.dry_until]
        if dry:
            self._relieve(dry)
        try:
            # not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event
            async with asyncio.timeout(_DRY_SECONDS if dry else PING_SECONDS):
                await self.wake.wait()
        except TimeoutError:
            self._ping_due = not dry

    def deliver(self, draft: Draft, round_: pb.Round, results: Sequence[pb.RoundResult]) -> None:
        """Compares the ranks, then gives every conversation what the round brought it."""
        try:
            digests.compare(round_, results)
        except DigestMismatchError as error:
            self._session.report_mismatch(str(error))
            raise
        self._session.answered(round_.seq)
        self.ready.set()
        prompt_rows = 0
        for index, (operation, conversations) in enumerate(zip(round_.operations, draft.conversations, strict=True)):
            parts = [result.results[index] for result in results]
            if operation.HasField("free"):
                self._freed(operation.free.lane)
            elif operation.HasField("prompt"):
                prompt_rows += len(operation.prompt.tokens)
                self._prompted(conversations[0], operation.prompt, parts)
            elif operation.HasField("decode"):
                self._decoded(conversations, operation.decode, parts)
        self._composer.pace.learn(prompt_rows, max(r.compute_seconds + r.exchange_seconds for r in results))

    # ---- what a round brought --------------------------------------------------------------------------------------

    def _freed(self, lane: int) -> None:
        self.book.rest_over(lane)
        for c in self.book.seated.values():
            c.dry_until = 0.0

    def _prompted(self, c: Conversation, prompt: pb.Prompt, parts: Sequence[pb.OperationResult]) -> None:
        if c.phase is Phase.ENDED:
            return
        c.advance(len(prompt.tokens))
        if c.scoring is not None:
            self._scored(c, len(prompt.tokens), parts)
            return
        c.mailbox.put(router_pb2.Filling(tokens_done=c.position, tokens_total=len(c.tokens)))
        if prompt.last:
            self._said(c, _tokens(parts[0], 1)[0])

    def _decoded(self, conversations: Sequence[Conversation], decode: pb.Decode, parts: Sequence[pb.OperationResult]) -> None:
        tokens = [] if decode.forced else _tokens(parts[0], len(conversations))
        for i, c in enumerate(conversations):
            if c.phase is Phase.ENDED:
                continue
            c.advance(decode.rows)
            if c.scoring is not None:
                self._scored(c, decode.rows, parts)
            else:
                self._said(c, tokens[i])

    def _said(self, c: Conversation, token: int) -> None:
        reason = c.take(token, self._clock())
        spoken = reason != router_pb2.FINISH_REASON_STOP
        c.mailbox.put(Tokens(len(c.generated) - 1, [token], int(spoken)))
        if reason is not None:
            self._complete(c, reason)

    def _scored(self, c: Conversation, rows: int, parts: Sequence[pb.OperationResult]) -> None:
        assert c.scoring is not None
        first = c.position - rows
        following = c.tokens[first + 1 : c.position + 1].tolist()
        for message in assemble([p.scores for p in parts], rows, first, following, self._vocab, c.scoring.raw):
            c.mailbox.put(message)
        c.times.first_token = c.times.first_token or self._clock()
        if c.position == len(c.tokens):
            self._complete(c, router_pb2.FINISH_REASON_UNSPECIFIED)

    def _complete(self, c: Conversation, reason: router_pb2.FinishReason.ValueType) -> None:
        """The last event of a stream. Its handler adds the receipt."""
        times, now = c.times, self._clock()
        completion = router_pb2.Completion(
            finish_reason=reason,
            usage=router_pb2.Usage(
                prompt_tokens=c.prompt_rows, generated_tokens=len(c.tokens) - c.prompt_rows + len(c.generated)
            ),
            owner=c.owner,
            seed=c.seed,
            timings=router_pb2.Timings(
                queued_seconds=times.admitted - times.arrived,
                first_token_seconds=times.first_token - times.arrived,
                total_seconds=now - times.arrived,
            ),
        )
        c.mailbox.put(completion)
        self.leave(c)

    def _relieve(self, dry: Sequence[Conversation]) -> None:
        """Nobody can run and nobody will give pages back: the youngest makes room for the others."""
        running = [c for c in self.book.seated.values() if c.admitted]
        if len(dry) < len(running) or any(c.asked_rows for c in dry):
            return
        c = max(dry, key=lambda c: c.id)
        held = sum(len(other.pages) for other in running)
        error = BusyError(
            f"no page is left for this conversation at {c.position} tokens: {len(running)} conversations hold all {held} "
            f"pages of {self._page_rows} tokens that may be had",
            tokens=c.position,
            pages=held,
            page_rows=self._page_rows,
        )
        c.mailbox.fail(error)
        self.leave(c)

    # ---- the manager's answers ---------------------------------------------------------------------------------------

    def on_answer(self, answer: pool_manager_pb2.SessionResponse) -> None:
        """Takes an answer of the manager. Raises EpochError if it makes no sense."""
        for grant in answer.extended.grants:
            self._extended(grant)
        c = self._admits.get(answer.key)
        if c is not None and answer.HasField("admitted"):
            del self._admits[answer.key]
            c.admit(answer.admitted.owner, list(answer.admitted.pages), self._clock())
        elif c is not None and answer.HasField("refused"):
            self._refused(c, answer.refused)
        self.wake.set()

    def _refused(self, c: Conversation, refused: pool_manager_pb2.Refused) -> None:
        if not refused.final:
            c.mailbox.put(router_pb2.Waiting(ahead=refused.ahead, reason=refused.reason))
            return
        c.mailbox.fail(NotServedError(refused.reason))
        self.book.leave(c)  # the manager does not know it: there is nothing to finish
        self.book.rest_over(c.lane)
        self._admits = {key: other for key, other in self._admits.items() if other is not c}

    def _extended(self, grant: pool_manager_pb2.Grant) -> None:
        c = self.book.find(grant.conversation)
        if c is None:
            return
        c.asked_rows = 0
        if grant.pages and grant.first_slot != len(c.pages):
            raise EpochError(f"the pool manager granted slot {grant.first_slot} where slot {len(c.pages)} comes next")
        c.pages += grant.pages
        c.dry_until = 0.0 if grant.pages else self._clock() + _DRY_SECONDS


def _tokens(part: pb.OperationResult, count: int) -> Sequence[int]:
    if len(part.tokens) != count:
        raise EpochError(f"rank 0 returned {len(part.tokens)} sampled tokens where {count} were asked")
    return part.tokens
