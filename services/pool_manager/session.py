"""The router's session: the term it was granted, its leases, one answer a key, and orders that come unasked.

Source: design sections 5 and 9. Knows no gRPC beyond messages; the stream is an outlet.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from latentpool.errors import DigestMismatchError
from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager import keeping
from services.pool_manager.keeping import evict_by_hand
from services.pool_manager.lease import Answer, Lease, Move, Refusal, Request, Waiting
from services.pool_manager.leases import NOTHING_LEFT, Leases
from services.pool_manager.relief import carry_by_hand

log = structlog.get_logger()

_ANSWERS = 4_096
"""Answers kept for repeats; the router has far fewer requests in flight."""


class Outlet(Protocol):
    """The sending side of the router's stream; returns at once."""

    def send(self, message: pb.SessionResponse, /) -> None: ...


@dataclass(slots=True)
class Session:
    """One router in one term. `on_mismatch` ends the epoch. Orders go out with key 0 before the answer of the request that
    brought them about; parking that no Extend brought about is an Extended with key 0 and no grants."""

    name: str
    term: int
    leases: Leases
    outlet: Outlet
    on_mismatch: Callable[[DigestMismatchError], None]
    _answers: OrderedDict[int, pb.SessionResponse | None] = field(default_factory=OrderedDict)  # None: it has none
    _keys: dict[int, int] = field(default_factory=dict)  # waiting conversation -> key of its Admit
    _arrivals: dict[int, asyncio.Future[bool]] = field(default_factory=dict)  # conversations that are carried by hand
    _asks: dict[int, int] = field(default_factory=dict)  # conversation -> key of its AskKeep
    _evictions: list[tuple[set[int], asyncio.Future[bool]]] = field(default_factory=list)  # by hand: states still there
    _unproven: bool = False

    def take(self, message: pb.SessionRequest) -> None:
        """Carries out one request and answers it. Raises ValueError for what no router should send."""
        match message.WhichOneof("message"):
            case "answered":
                self.leases.answered(message.answered.seq)
            case "mismatch":
                self.on_mismatch(DigestMismatchError(message.mismatch.message))
            case _ if message.key in self._answers:
                self._repeat(self._answers[message.key])
                return
            case "admit":
                self._admit(message.key, message.admit)
            case "extend":
                self._extend(message.key, message.extend)
            case "finish":
                self._finish(message.key, message.finish)
            case "released":
                self._released(message.released)
                self._remember(message.key, None)
            case "carried":
                self._carried(message.carried)
                self._remember(message.key, None)
            case "ask_keep":
                self._ask_keep(message.key, message.ask_keep)
            case "kept":
                self._kept(message.kept)
                self._remember(message.key, None)
            case "resumed":
                self.leases.resumed(message.resumed.conversation, message.resumed.fence_seq)
                self._remember(message.key, None)
            case "forgotten":
                self._forgotten(message.forgotten)
                self._remember(message.key, None)
            case "report":
                for one in message.report.progress:
                    self.leases.report(one.conversation, one.rows, one.decoding)
                return
            case other:
                raise ValueError(f"a session has no {other} message after its first")
        self._settle()

    def carry(self, conversation: int, owner: int | None) -> tuple[Move, asyncio.Future[bool]]:
        """Orders a carry by hand. The future says whether it arrived; False: it ended before, or the session did. Raises
        CarryError with numbers."""
        move = carry_by_hand(self.leases, conversation, owner)
        arrival = self._arrivals[conversation] = asyncio.get_running_loop().create_future()
        self._order()
        return move, arrival

    def evict(self, states: Sequence[int]) -> tuple[list[int], asyncio.Future[bool]]:
        """Orders the end of kept states by hand; all that are not in use where none is named. The future says whether they are
        forgotten; False: the session ended before. Raises EvictError."""
        names = evict_by_hand(self.leases, states)
        gone = asyncio.get_running_loop().create_future()
        self._evictions.append((set(names), gone))
        self._forgot(())
        self._settle()
        return names, gone

    def close(self) -> None:
        """Nothing arrives any more, and nothing is forgotten."""
        for conversation in list(self._arrivals):
            self._arrived(conversation, False)
        for _, gone in self._evictions:
            if not gone.done():
                gone.set_result(False)
        self._evictions.clear()

    def prove(self) -> None:
        """Checks the books once after each busy time, while idle. A check reads every page, so no request waits for it."""
        if self._unproven and self.leases.idle:
            self._unproven = False
            for violation in self.leases.check_integrity():
                log.error("books are not whole", violation=violation)

    def _admit(self, key: int, admit: pb.Admit) -> None:
        limit = admit.max_tokens if admit.HasField("max_tokens") else None
        request = Request(
            conversation=admit.conversation,
            lane=admit.lane,
            prompt_tokens=admit.prompt_tokens,
            max_tokens=limit,
            request_id=admit.request_id,
            background=admit.background,
            returning=admit.returning,
            blocks=admit.blocks,
            idle=admit.idle,
        )
        try:
            answer = self.leases.admit(request)
        except ValueError as error:
            answer = Refusal(str(error))
        match answer:
            case Lease():
                self._admitted(key, answer)
            case Waiting():
                self._keys[request.conversation] = key
                log.info("conversation waits", conversation=request.conversation, ahead=answer.ahead, reason=answer.reason)
                self._answer(key, refused=pb.Refused(final=False, reason=answer.reason, ahead=answer.ahead))
            case Refusal(reason):
                log.info("conversation refused", conversation=request.conversation, reason=reason)
                self._answer(key, refused=pb.Refused(final=True, reason=reason))

    def _admitted(self, key: int, lease: Lease) -> None:
        resume = lease.resume
        log.info(
            "conversation admitted",
            conversation=lease.request.conversation,
            lane=lease.request.lane,
            owner=lease.owner,
            pages=len(lease.pages),
            borrowed=len(lease.borrowed),
            cached=0 if resume is None else resume.at,
        )
        admitted = pb.Admitted(
            owner=lease.owner,
            pages=lease.pages,
            quota=lease.quota,
            borrowed=lease.borrowed,
            resume=None if resume is None else pb.Resumable(state=resume.state, at=resume.at, mark=resume.mark),
            shared_prefix=lease.shared_prefix,
        )
        self._answer(key, admitted=admitted)

    def _extend(self, key: int, extend: pb.Extend) -> None:
        extension = self.leases.extend([(need.conversation, need.rows) for need in extend.needs])
        self._order()
        self._log_parks(extension.park)
        grants = [
            pb.Grant(conversation=grant.conversation, first_slot=grant.first_slot, pages=grant.pages)
            for grant in extension.grants
        ]
        self._answer(key, extended=pb.Extended(grants=grants, park=extension.park))

    def _finish(self, key: int, finish: pb.Finish) -> None:
        self._keys.pop(finish.conversation, None)
        pages = self.leases.finish(finish.conversation, finish.fence_seq)
        self._arrived(finish.conversation, False)
        self._unproven = True
        log.info("conversation finished", conversation=finish.conversation, pages=pages)
        self._answer(key, finished=pb.Finished(pages=pages))

    def _released(self, released: pb.Released) -> None:
        pages = self.leases.released(released.conversation, released.fence_seq)
        if pages:
            log.info("borrowed pages released", conversation=released.conversation, pages=pages)

    def _carried(self, carried: pb.Carried) -> None:
        move = self.leases.carried(carried.conversation, carried.fence_seq)
        if move is not None:
            log.info("conversation carried", conversation=move.conversation, owner=move.owner, pages=len(move.pages))
            self._arrived(move.conversation, True)

    def _arrived(self, conversation: int, there: bool) -> None:
        arrival = self._arrivals.pop(conversation, None)
        if arrival is not None and not arrival.done():  # done: nobody waits for it any more
            arrival.set_result(there)

    def _ask_keep(self, key: int, ask: pb.AskKeep) -> None:
        self.leases.ask_keep(ask.conversation, ask.at, ask.mark)
        self._asks[ask.conversation] = key

    def _kept(self, kept: pb.Kept) -> None:
        state = keeping.kept(self.leases, kept.state)
        if state is not None:
            log.info("state kept", state=state.state, conversation=state.conversation, at=state.at)

    def _forgotten(self, forgotten: pb.Forgotten) -> None:
        for state in keeping.forgotten(self.leases, forgotten.states, forgotten.fence_seq):
            log.info("state forgotten", state=state.state, at=state.at, was=state.phase.value)
        self._forgot(forgotten.states)
        self._unproven = True

    def _forgot(self, states: Iterable[int]) -> None:
        """Answers those who wait for the end of states."""
        names = set(states)
        for left, gone in self._evictions:
            left -= names
            if not left and not gone.done():  # done: nobody waits for it any more
                gone.set_result(True)
        self._evictions = [(left, gone) for left, gone in self._evictions if left and not gone.done()]

    def _settle(self) -> None:
        """Whatever a request has made possible or necessary."""
        for lease in self.leases.admit_waiting():
            self._admitted(self._keys.pop(lease.request.conversation), lease)
        for request in self.leases.give_up():
            log.info("idle conversation given up", conversation=request.conversation)
            refused = pb.Refused(final=True, reason=NOTHING_LEFT)
            self._answer(self._keys.pop(request.conversation), refused=refused)
        for answer in self.leases.answers():
            self._answer_ask(answer)
        self._order()

    def _answer_ask(self, answer: Answer) -> None:
        key, state = self._asks.pop(answer.conversation), answer.state
        if state is None:
            log.info("state not kept", conversation=answer.conversation, reason=answer.reason)
            self._answer(key, keep_answer=pb.KeepAnswer(state=0, reason=answer.reason))
        else:
            self._answer(key, keep_answer=pb.KeepAnswer(state=state.state, pages=state.fixed))

    def _order(self) -> None:
        """Tells the router what it has not been told."""
        orders = self.leases.take_orders()
        if orders.recall or orders.carry or orders.forget:
            for conversation in orders.recall:
                log.info("borrowed pages recalled", conversation=conversation)
            for move in orders.carry:
                log.info("conversation must move", conversation=move.conversation, owner=move.owner, pages=len(move.pages))
            if orders.forget:
                log.info("states must be forgotten", states=orders.forget)
            carry = [pb.CarryOrder(conversation=move.conversation, owner=move.owner, pages=move.pages) for move in orders.carry]
            self.outlet.send(pb.SessionResponse(orders=pb.Orders(recall=orders.recall, carry=carry, forget=orders.forget)))
        if orders.park:
            self._log_parks(orders.park)
            self.outlet.send(pb.SessionResponse(extended=pb.Extended(park=orders.park)))

    def _log_parks(self, names: list[int]) -> None:
        for name in names:
            lease = self.leases.running[name]
            log.info("conversation must park", conversation=name, owner=lease.owner, pages=len(lease.pages))

    def _answer(
        self,
        key: int,
        admitted: pb.Admitted | None = None,
        refused: pb.Refused | None = None,
        extended: pb.Extended | None = None,
        finished: pb.Finished | None = None,
        keep_answer: pb.KeepAnswer | None = None,
    ) -> None:
        message = pb.SessionResponse(
            key=key, admitted=admitted, refused=refused, extended=extended, finished=finished, keep_answer=keep_answer
        )
        self._remember(key, message)
        self.outlet.send(message)

    def _remember(self, key: int, answer: pb.SessionResponse | None) -> None:
        if not key:
            return  # not a key: what needs no answer may come without one
        self._answers[key] = answer
        if len(self._answers) > _ANSWERS:
            self._answers.popitem(last=False)

    def _repeat(self, answer: pb.SessionResponse | None) -> None:
        if answer is not None:
            self.outlet.send(answer)
