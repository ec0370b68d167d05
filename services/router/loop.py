"""The router's loop: deliver, admit, extend, compose, send, rest. It never waits for a client, and sends a round before the
last one is answered."""

from __future__ import annotations

import asyncio
from collections import deque

import structlog

from latentpool.errors import DigestMismatchError, EpochError, NotServedError
from latentpool.v1 import pool_manager_pb2, router_pb2
from latentpool.v1 import rank_worker_pb2 as pb
from services.router import digests
from services.router.compose import Composer, Draft
from services.router.conversations import Book, Carry, Conversation, Phase
from services.router.idle import after
from services.router.keeper import Keeper
from services.router.manager import Session
from services.router.outcomes import Outcomes
from services.router.progress import Reports
from services.router.workers import Workers

log = structlog.get_logger()

ROUNDS_IN_FLIGHT = 2
"""One runs while the next one is on its way."""
PING_SECONDS = 2.0
"""An idle group is probed this often."""
AHEAD_ROWS = 256
"""Pages are asked for this many rows ahead of need, but not for more than an admission covers: whoever comes back from parking
must not be parked for what it does not need yet."""
_DRY_SECONDS = 0.05


class RoundLoop:
    """One group in one term and epoch. `wake` is set whenever there may be something to do; `ready` once all ranks have
    answered a round. States of `keep_from` tokens and more are kept (0: none), with `keep_replies` those at the ends of replies
    too."""

    def __init__(
        self,
        session: Session,
        workers: Workers,
        composer: Composer,
        book: Book,
        vocab: int,
        page_rows: int,
        headroom: int,
        keep_from: int = 0,
        keep_replies: bool = True,
    ) -> None:
        self.book = book
        self.counters = workers.counters
        self.wake = asyncio.Event()
        self.ready = asyncio.Event()
        self._session = session
        self._workers = workers
        self._composer = composer
        self._page_rows = page_rows
        self._ahead = min(AHEAD_ROWS, headroom + page_rows)
        self._clock = asyncio.get_running_loop().time
        self._outcomes = Outcomes(vocab, self._clock, workers.counters, self.leave, self._replied)
        self._keeper = Keeper(session, workers, page_rows, keep_from)
        self._keep_replies = keep_replies
        self._reports = Reports()
        self._drafts: deque[Draft] = deque()
        """Of the rounds in flight."""
        self._admits: dict[int, Conversation] = {}
        self._leaving: list[Conversation] = []
        self._ping_due = True

    async def run(self) -> None:
        """Runs rounds until it is cancelled. Raises EpochError; DigestMismatchError is reported to the manager first."""
        while True:
            self.wake.clear()
            self.deliver()
            self.admit()
            self.extend()
            self.report()
            if not await self.send(self.compose()):
                await self.rest()

    # ---- entering and leaving -------------------------------------------------------------------------------------

    def submit(self, conversation: Conversation) -> None:
        """A conversation arrives. It computes itself what idle ones would keep of its prompt."""
        self._overtake(conversation)
        self.book.enqueue(conversation)
        self.admit()

    def leave(self, conversation: Conversation) -> None:
        """A conversation ends, wherever it stands; a repeat does nothing."""
        if conversation.phase is Phase.ENDED:
            return
        self.book.leave(conversation)
        self._admits = {key: c for key, c in self._admits.items() if c is not conversation}
        self._vacate(conversation)

    def park(self, conversation: Conversation) -> None:
        """A conversation gives its lane and pages to others; it is back in the queue once no round in flight touches it."""
        conversation.phase = Phase.PARKED
        self.counters.parked += 1
        self._vacate(conversation)

    def fail(self, error: EpochError) -> None:
        """The epoch is over: every stream ends."""
        self.ready.clear()
        self.book.fail(error)

    def _drop(self, idle: Conversation) -> None:
        """An idle conversation gives way."""
        self.counters.idle_dropped += 1
        self.leave(idle)

    def _overtake(self, conversation: Conversation) -> None:
        """Idle conversations whose tokens another one has too, and more, are not needed any more."""
        blocks = conversation.keeping.blocks
        for idle in self.book.idlers():
            mine = idle.keeping.blocks
            if blocks is not None and mine is not None and mine.begin(blocks):
                self._drop(idle)

    def _replied(self, c: Conversation) -> None:
        """A reply is complete: idle time may keep it. As many wait as there are lanes, the newest."""
        if not self._keep_replies:
            return
        idle = after(c, self.book.ids, self._keeper.keep_from, self.wake, self._clock())
        if idle is not None:
            self._overtake(idle)
            self.book.idle.append(idle)
            for one in self.book.idle[: -self.book.lanes]:
                self._drop(one)

    def _vacate(self, c: Conversation) -> None:
        """Frees its lane. One that the workers know rests until the round that frees it is answered, and its pages are fenced
        by that round."""
        self._keeper.left(c)
        if c.bound and not c.leaving:
            c.leaving = True
            self._leaving.append(c)
        elif c.lane >= 0 and not c.bound:
            self._session.finish(c.id, self._workers.seq)
            self._vacated(c)
        self.wake.set()

    def _vacated(self, c: Conversation) -> None:
        self.book.rest_over(c.lane)
        if c.phase is Phase.PARKED:
            self.book.come_back(c)
        self._pages_came()

    def _carried(self, c: Conversation, carry: pb.Carry, seq: int) -> None:
        """A slice is with the new owner on every rank. With the last one the conversation goes on there, unless it has ended
        or parks: then all it holds goes back when its lane is freed."""
        self.counters.carried_pages += len(carry.pages)
        if not carry.last or not c.runs:
            return
        c.arrive()
        c.carried += 1
        self.counters.carries += 1
        self._session.carried(c.id, seq)
        self._pages_came()

    def _pages_came(self) -> None:
        """The manager may have pages again for those it left dry."""
        for c in self.book.seated.values():
            c.dry_until = 0.0

    # ---- the verbs ------------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Compares the ranks, then gives every conversation what the answered rounds brought it."""
        for round_, results in self._workers.collect():
            draft = self._drafts.popleft()
            try:
                digests.compare(round_, results)
            except DigestMismatchError as error:
                self._session.report_mismatch(str(error))
                raise
            self._session.answered(round_.seq)
            self.ready.set()
            for index, (operation, conversations) in enumerate(zip(round_.operations, draft.conversations, strict=True)):
                if operation.HasField("free"):
                    self._vacated(conversations[0])
                elif operation.HasField("carry"):
                    self._carried(conversations[0], operation.carry, round_.seq)
                else:
                    self._outcomes.give(operation, conversations, [result.results[index] for result in results])
            self._composer.learn(draft, max(r.compute_seconds + r.exchange_seconds for r in results))

    def admit(self) -> None:
        """Asks the manager for pages for as many as there are lanes, in the order in which they are served. Idle ones give
        their lanes to those who wait, and get one where nobody else does anything."""
        book = self.book
        for idle in [c for c in book.seated.values() if c.idle][: max(book.short, 0)]:
            self._drop(idle)
        while book.lane_free and (book.queue or book.may_idle):
            c = book.seat()
            tokens = c.tokens_so_far + (c.idle and c.tokens_so_far == c.prompt_rows)  # behind the last block there is one
            key = self._session.admit(
                c.id, c.lane, tokens, c.tokens_to_come, c.request_id,
                background=c.background, returning=c.parked > 0, blocks=c.keeping.digests, idle=c.idle,
            )  # fmt: skip
            self._admits[key] = c
        for ahead, c in enumerate(book.queue):
            if c.ahead != ahead and ahead >= book.coming:
                c.ahead = ahead
                lanes = "the one lane is busy" if book.lanes == 1 else f"all {book.lanes} lanes are busy"
                c.mailbox.put(router_pb2.Waiting(ahead=ahead, reason=lanes))

    def extend(self) -> None:
        """Asks for the pages that running conversations need soon, rows in flight counted."""
        now, needs = self._clock(), []
        for c in self.book.seated.values():
            rows = min(max(c.sent, c.prompt_rows) + self._ahead, c.rows_at_end)
            may = c.runs and c.carry is None and not c.keeping.awaits_carry and not c.asked_rows and now >= c.dry_until
            if may and not c.has_pages(rows, self._page_rows):
                c.asked_rows = rows
                needs.append(pool_manager_pb2.Need(conversation=c.id, rows=rows))
        if needs:
            self._session.extend(needs)

    def report(self) -> None:
        """Tells the manager how far conversations are, now and then."""
        if progress := self._reports.due(self.book.seated.values(), self._clock()):
            self._session.report(progress)

    def compose(self) -> Draft:
        """The next round, empty where there is nothing to do or enough in flight. Those who leave are freed in it, and their
        pages fenced by it; so are borrowed pages that it gives back. Idle conversations have no rounds run ahead."""
        if self._workers.in_flight == ROUNDS_IN_FLIGHT:
            return Draft()
        self._count_stalls()
        idle = self.book.quiet and not self._workers.in_flight
        draft, seq = self._composer.compose(self.book, self._leaving, self._keeper.forget, idle), self._workers.seq + 1
        for c in self._leaving:
            self._session.finish(c.id, seq)
        for c in draft.released:
            self._session.released(c.id, seq)
        self._leaving.clear()
        self._keeper.sent(draft, seq)
        for c, _ in draft.kept:
            if c.idle:
                self.counters.idle_fills += 1
                self.leave(c)
        if not draft.operations and not self._workers.in_flight and self._ping_due:
            draft.add(pb.Operation(ping=pb.Ping()))
        self._ping_due = False
        return draft

    async def send(self, draft: Draft) -> bool:
        """Sends a round to every rank, if there is anything in it."""
        if draft.operations:
            self._drafts.append(draft)
            await self._workers.send(draft.operations)
        return bool(draft.operations)

    async def rest(self) -> None:
        """Nothing to do: sleeps until there may be, or until a ping is due."""
        dry = any(c.dry_until for c in self.book.seated.values())
        try:
            # not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event
            async with asyncio.timeout(_DRY_SECONDS if dry else PING_SECONDS):
                await self.wake.wait()
        except TimeoutError:
            self._ping_due = not dry

    def _count_stalls(self) -> None:
        for c in self.book.seated.values():
            full = c.runs and c.mailbox.full
            self.counters.mailbox_stalls += full and not c.stalled
            c.stalled = full

    # ---- the manager's answers ---------------------------------------------------------------------------------------

    def on_answer(self, answer: pool_manager_pb2.SessionResponse) -> None:
        """Takes an answer of the manager. Raises EpochError if it makes no sense."""
        if answer.HasField("extended"):
            self._extended(answer.extended)
        elif answer.HasField("orders"):
            self._ordered(answer.orders)
        elif answer.HasField("keep_answer"):
            c = self._keeper.answered(answer.key, answer.keep_answer)
            if c is not None and c.idle and not answer.keep_answer.state:
                self._drop(c)
        c = self._admits.get(answer.key)
        if c is not None and answer.HasField("admitted"):
            del self._admits[answer.key]
            self._admitted(c, answer.admitted)
        elif c is not None and answer.HasField("refused"):
            self._refused(c, answer.refused)
        self.wake.set()

    def _admitted(self, c: Conversation, admitted: pool_manager_pb2.Admitted) -> None:
        peers = self._composer.owners - 1
        if len(admitted.borrowed) % peers if peers else admitted.borrowed:
            raise EpochError(f"the pool manager lent {len(admitted.borrowed)} pages where {peers} owners lend one a slot")
        c.admit(admitted.owner, list(admitted.pages), self._clock(), admitted.borrowed)
        self._keeper.admitted(c, admitted)
        if c.idle and (c.keeping.awaits_carry or not c.keeping.places):
            self._drop(c)

    def _refused(self, c: Conversation, refused: pool_manager_pb2.Refused) -> None:
        if c.idle and not refused.final:
            return  # it waits for pages, until somebody wants its lane
        if not refused.final:
            c.mailbox.put(router_pb2.Waiting(ahead=refused.ahead, reason=refused.reason))
            return
        self.counters.idle_dropped += c.idle
        c.mailbox.fail(NotServedError(refused.reason))
        self.book.leave(c)  # the manager does not know it: there is nothing to finish
        self.book.rest_over(c.lane)
        self._admits = {key: other for key, other in self._admits.items() if other is not c}

    def _extended(self, extended: pool_manager_pb2.Extended) -> None:
        """An answer from before a conversation was parked does not concern it any more: `runs` is false until it is admitted
        again, and answers come in order."""
        for grant in extended.grants:
            c = self.book.find(grant.conversation)
            if c is None or not c.runs:
                continue
            c.asked_rows = 0
            if grant.pages and grant.first_slot != len(c.pages):
                raise EpochError(f"the pool manager granted slot {grant.first_slot} where slot {len(c.pages)} comes next")
            if grant.pages and c.carry is not None:
                raise EpochError(f"the pool manager granted pages to conversation {c.id} while it is carried")
            c.pages += grant.pages
            c.dry_until = 0.0 if grant.pages else self._clock() + _DRY_SECONDS
        for conversation in extended.park:
            c = self.book.find(conversation)
            if c is not None and c.runs:
                self._drop(c) if c.idle else self.park(c)

    def _ordered(self, orders: pool_manager_pb2.Orders) -> None:
        """An order from before a conversation ended or was parked does not concern it any more, as above."""
        for conversation in orders.recall:
            c = self.book.find(conversation)
            if c is not None and c.runs:
                self._drop(c) if c.idle else self._recall(c)
        for order in orders.carry:
            c = self.book.find(order.conversation)
            if c is not None and c.runs:
                self._drop(c) if c.idle else self._carry(c, order)
        self._keeper.forget += orders.forget

    def _recall(self, c: Conversation) -> None:
        """Its borrowed pages go back, if it has any: at the next round, or at once where the workers do not know it yet."""
        if not c.borrowed or c.recalled:
            return
        self.counters.recalls += 1
        c.recalled = c.bound
        if not c.bound:
            c.borrowed = []
            self._session.released(c.id, self._workers.seq)

    def _carry(self, c: Conversation, order: pool_manager_pb2.CarryOrder) -> None:
        """It moves to another owner: slice by slice, or at once where the workers do not know it yet and it has no rows, and
        will not go on from any."""
        if c.carry is not None or len(order.pages) < len(c.pages):
            raise EpochError(
                f"the pool manager carries conversation {c.id} with {len(c.pages)} pages to {len(order.pages)} pages of rank "
                f"{order.owner}" + (f" while it is carried to rank {c.carry.owner}" if c.carry is not None else "")
            )
        self._recall(c)
        c.carry = Carry(order.owner, list(order.pages))
        c.keeping.awaits_carry = False
        if not c.bound and c.keeping.resume is None:
            c.arrive()
            self._session.carried(c.id, self._workers.seq)
