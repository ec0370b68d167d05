"""The router's session: the term it was granted, its leases, and one answer a key.

Source: design sections 5 and 9. Knows no gRPC beyond messages; the stream is an outlet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from latentpool.errors import DigestMismatchError
from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager.leases import Lease, Leases, Refusal, Request, Waiting

log = structlog.get_logger()

_ANSWERS = 4_096
"""Answers kept for repeats; the router has far fewer requests in flight."""


class Outlet(Protocol):
    """The sending side of the router's stream; returns at once."""

    def send(self, message: pb.SessionResponse, /) -> None: ...


@dataclass(slots=True)
class Session:
    """One router in one term. `on_mismatch` ends the epoch."""

    name: str
    term: int
    leases: Leases
    outlet: Outlet
    on_mismatch: Callable[[DigestMismatchError], None]
    _answers: OrderedDict[int, pb.SessionResponse] = field(default_factory=OrderedDict)
    _keys: dict[int, int] = field(default_factory=dict)  # waiting conversation -> key of its Admit
    _unproven: bool = False

    def take(self, message: pb.SessionRequest) -> None:
        """Carries out one request and answers it. Raises ValueError for what no router should send."""
        match message.WhichOneof("message"):
            case "answered":
                self.leases.answered(message.answered.seq)
                self._admit_waiting()
            case "mismatch":
                self.on_mismatch(DigestMismatchError(message.mismatch.message))
            case _ if message.key in self._answers:
                self.outlet.send(self._answers[message.key])
            case "admit":
                self._admit(message.key, message.admit)
            case "extend":
                self._answer(message.key, extended=self._extend(message.extend))
                self._admit_waiting()
            case "finish":
                self._finish(message.key, message.finish)
            case other:
                raise ValueError(f"a session has no {other} message after its first")

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
        request = lease.request
        log.info("conversation admitted", conversation=request.conversation, lane=request.lane, pages=len(lease.pages))
        self._answer(key, admitted=pb.Admitted(owner=lease.owner, pages=lease.pages, quota=lease.quota))

    def _extend(self, extend: pb.Extend) -> pb.Extended:
        extension = self.leases.extend([(need.conversation, need.rows) for need in extend.needs])
        for name in extension.park:
            lease = self.leases.running[name]
            log.info("conversation must park", conversation=name, owner=lease.owner, pages=len(lease.pages))
        grants = [
            pb.Grant(conversation=grant.conversation, first_slot=grant.first_slot, pages=grant.pages)
            for grant in extension.grants
        ]
        return pb.Extended(grants=grants, park=extension.park)

    def _finish(self, key: int, finish: pb.Finish) -> None:
        self._keys.pop(finish.conversation, None)
        pages = self.leases.finish(finish.conversation, finish.fence_seq)
        self._unproven = True
        log.info("conversation finished", conversation=finish.conversation, pages=pages)
        self._answer(key, finished=pb.Finished(pages=pages))
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        for lease in self.leases.admit_waiting():
            self._admitted(self._keys.pop(lease.request.conversation), lease)

    def _answer(
        self,
        key: int,
        admitted: pb.Admitted | None = None,
        refused: pb.Refused | None = None,
        extended: pb.Extended | None = None,
        finished: pb.Finished | None = None,
    ) -> None:
        message = pb.SessionResponse(key=key, admitted=admitted, refused=refused, extended=extended, finished=finished)
        self._answers[key] = message
        if len(self._answers) > _ANSWERS:
            self._answers.popitem(last=False)
        self.outlet.send(message)
