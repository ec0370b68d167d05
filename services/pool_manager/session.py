"""The router's session: the term it was granted, its leases, one answer a key, and orders that come unasked.

Source: design sections 5 and 9. Knows no gRPC beyond messages; the stream is an outlet.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from latentpool.errors import DigestMismatchError
from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager.lease import Lease, Move, Refusal, Request, Waiting
from services.pool_manager.leases import Leases
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
            case other:
                raise ValueError(f"a session has no {other} message after its first")
        self._admit_waiting()
        self._order()

    def carry(self, conversation: int, owner: int | None) -> tuple[Move, asyncio.Future[bool]]:
        """Orders a carry by hand. The future says whether it arrived; False: it ended before, or the session did. Raises
        CarryError with numbers."""
        move = carry_by_hand(self.leases, conversation, owner)
        arrival = self._arrivals[conversation] = asyncio.get_running_loop().create_future()
        self._order()
        return move, arrival

    def close(self) -> None:
        """Nothing arrives any more."""
        for conversation in list(self._arrivals):
            self._arrived(conversation, False)

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
        log.info(
            "conversation admitted",
            conversation=lease.request.conversation,
            lane=lease.request.lane,
            owner=lease.owner,
            pages=len(lease.pages),
            borrowed=len(lease.borrowed),
        )
        admitted = pb.Admitted(owner=lease.owner, pages=lease.pages, quota=lease.quota, borrowed=lease.borrowed)
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

    def _admit_waiting(self) -> None:
        for lease in self.leases.admit_waiting():
            self._admitted(self._keys.pop(lease.request.conversation), lease)

    def _order(self) -> None:
        """Tells the router what it has not been told."""
        orders = self.leases.take_orders()
        if orders.recall or orders.carry:
            for conversation in orders.recall:
                log.info("borrowed pages recalled", conversation=conversation)
            for move in orders.carry:
                log.info("conversation must move", conversation=move.conversation, owner=move.owner, pages=len(move.pages))
            carry = [pb.CarryOrder(conversation=move.conversation, owner=move.owner, pages=move.pages) for move in orders.carry]
            self.outlet.send(pb.SessionResponse(orders=pb.Orders(recall=orders.recall, carry=carry)))
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
    ) -> None:
        message = pb.SessionResponse(key=key, admitted=admitted, refused=refused, extended=extended, finished=finished)
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
