"""The router's side of a group: it waits for the manager, opens the rounds, runs the loop and says why it ended."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import structlog

from latentpool.errors import BusyError, EpochError, GeometryError, LatentPoolError
from latentpool.geometry import Geometry
from latentpool.metrics import Sample
from latentpool.v1 import pool_manager_pb2
from services.router.compose import Composer
from services.router.conversations import Book, Conversation, Times
from services.router.delivery import Mailbox
from services.router.kept import Blocks
from services.router.loop import RoundLoop
from services.router.manager import Session
from services.router.metrics import samples
from services.router.requests import Accepted, Limits
from services.router.workers import Workers

log = structlog.get_logger()


class Group:
    """One group, for as long as its epoch lives. `on_ready` is called when all ranks have answered the first round."""

    def __init__(
        self,
        session: Session,
        chunk_rows: int,
        max_waiting: int,
        dead_after: float,
        keep_replies: bool,
        on_ready: Callable[[], None],
    ) -> None:
        self._session = session
        self._chunk_rows = chunk_rows
        self._max_waiting = max_waiting
        self._dead_after = dead_after
        self._keep_replies = keep_replies
        self._on_ready = on_ready
        self._loop: RoundLoop | None = None
        self._granted: pool_manager_pb2.Granted | None = None
        self._limits: Limits | None = None
        self._why_not = f"it waits for the pool manager at {session.address}"

    # ---- its life -----------------------------------------------------------------------------------------------

    async def run(self) -> LatentPoolError | None:
        """Serves until the epoch ends. Returns why; None where another member stopped the group in good order."""
        try:
            error = await self._run()
        except LatentPoolError as failure:
            error = failure
        except Exception as bug:
            log.exception("the router failed")
            error = EpochError(f"the router failed: {bug!r}")
        self.end(str(error) if error else "the group was stopped")
        return error

    def end(self, why: str) -> None:
        """Ends every stream and takes no more."""
        self._why_not = why
        if self._loop is not None:
            self._loop.fail(EpochError(why))
        self._limits = None

    def metrics(self) -> Iterable[Sample]:
        """Numbers for Prometheus; none before the group is ready."""
        return () if self._loop is None else samples(self._loop.counters, self._loop.book)

    async def _run(self) -> LatentPoolError | None:
        granted = await self._session.open()
        log.info("term granted", term=granted.term, epoch=granted.epoch, ranks=len(granted.worker_addresses))
        self._why_not = "it opens the rounds to its ranks"
        workers = Workers(granted.worker_addresses, self._dead_after)
        try:
            return await self._serve(granted, workers)
        finally:
            log.info("rounds are over", **asdict(workers.counters))
            await workers.close()

    async def _serve(self, granted: pool_manager_pb2.Granted, workers: Workers) -> LatentPoolError | None:
        plan = granted.plan
        geometry = _geometry(granted.identity.config_json)
        owners = plan.world if plan.split else 1
        composer = Composer(plan.page_rows, geometry.vocab, self._chunk_rows, owners)
        loop = RoundLoop(
            self._session, workers, composer, Book(plan.lanes), geometry.vocab, plan.page_rows, granted.headroom,
            granted.keep_from, self._keep_replies,
        )  # fmt: skip
        self._session.attend(loop.on_answer)
        rounds = asyncio.create_task(self._rounds(loop, workers, granted))
        ready = asyncio.create_task(loop.ready.wait())
        ends: set[asyncio.Future[Any]] = {rounds, self._session.ended}
        try:
            await asyncio.wait(ends | {ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and not rounds.done():
                self._loop, self._granted = loop, granted
                self._limits = Limits(plan.context, geometry, _kept(granted))
                log.info("ready", context=plan.context, lanes=plan.lanes)
                self._on_ready()
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not self._session.ended.done():
                loop.fail(EpochError(str(rounds.exception())))
                # the manager often knows better why a stream broke
                await asyncio.wait({self._session.ended}, timeout=1.0)
            known = self._session.ended.result() if self._session.ended.done() else None
            return known or (_failure(rounds) if rounds.done() else None)
        finally:
            ready.cancel()
            rounds.cancel()
            await asyncio.gather(ready, rounds, return_exceptions=True)

    @staticmethod
    async def _rounds(loop: RoundLoop, workers: Workers, granted: pool_manager_pb2.Granted) -> None:
        await workers.open(granted.term, granted.epoch, granted.round_key, loop.wake.set)
        await loop.run()

    # ---- what handlers ask ------------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """Raises EpochError while the group is not ready, and after it ended."""
        if self._limits is None:
            raise EpochError(f"this group does not serve now: {self._why_not}")
        return self._limits

    @property
    def granted(self) -> pool_manager_pb2.Granted:
        """Plan and identity; valid once `limits` was, and after the epoch too."""
        assert self._granted is not None
        return self._granted

    def check_queue(self, reading: int = 0) -> None:
        """Raises BusyError where too many wait already, with `reading` requests that are being read and will wait."""
        assert self._loop is not None
        book = self._loop.book
        waiting = len(book.queue) + reading
        if waiting >= self._max_waiting + book.lanes - book.taken:
            raise BusyError(
                f"{waiting} conversations wait already, and --max-waiting is {self._max_waiting}: try again later",
                waiting=waiting,
                max_waiting=self._max_waiting,
            )

    def submit(self, accepted: Accepted) -> Conversation:
        """Starts a conversation's life. Raises EpochError, BusyError. `leave` must follow."""
        limits = self.limits
        self.check_queue()
        assert self._loop is not None
        sampling = accepted.sampling
        most = limits.context if sampling.max_tokens is None else len(accepted.tokens) + sampling.max_tokens
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(limits.geometry.eos_ids))
        conversation = Conversation(
            id=next(self._loop.book.ids),
            request_id=accepted.request_id,
            tokens=accepted.tokens,
            sampling=sampling,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            stops=frozenset(stops),
            limit=most,
            mailbox=Mailbox(self._loop.wake),
            times=Times(arrived=asyncio.get_running_loop().time()),
            scoring=accepted.scoring,
            background=accepted.background,
            stop_finder=accepted.stop_finder,
            keeping=accepted.keeping,
        )
        self._loop.submit(conversation)
        return conversation

    def leave(self, conversation: Conversation) -> None:
        """Frees all that a conversation holds; a repeat does nothing."""
        assert self._loop is not None
        self._loop.leave(conversation)


def _failure(rounds: asyncio.Task[None]) -> LatentPoolError | None:
    error = rounds.exception()
    if error is None or isinstance(error, LatentPoolError):
        return error
    raise error


def _kept(granted: pool_manager_pb2.Granted) -> Blocks | None:
    """What all kept states of this epoch have in common; None where none is kept."""
    identity = granted.identity
    if not granted.keep_from:
        return None
    return Blocks.seeded(identity.checkpoint_digest, identity.numerics_digest, identity.dtype, identity.kv_dtype)


def _geometry(config_json: str) -> Geometry:
    try:
        return Geometry.from_config(json.loads(config_json))
    except ValueError as error:
        raise GeometryError(f"the workers' config.json cannot be read as JSON: {error}") from None
