"""A router between a fake pool manager and fake rank workers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

from router_fake_manager import FakeManager
from router_fake_model import PAGE_ROWS
from router_fake_worker import FakeWorker

from latentpool.client import Client
from services.router.loop import RoundLoop
from services.router.service import Router, RouterSettings

SECRET = b"a secret"


class Rig:
    """A router between fakes; `split`: every conversation has an owner. Leaving it asserts that nobody saw a rule broken, and
    that all lanes and pages came back (unless the epoch ended)."""

    def __init__(
        self,
        world: int = 2,
        *,
        lanes: int = 2,
        context: int = 1024,
        pages: int = 40,
        split: bool = False,
        lends: int = 0,
        page_rows: int = PAGE_ROWS,
        keep_from: int = 0,
        **settings: Any,
    ) -> None:
        owners = world if split else 1
        self.workers = [FakeWorker(rank, world, owners, page_rows) for rank in range(world)]
        self.manager = FakeManager(
            self.workers, lanes=lanes, context=context, pages=pages, secret=SECRET, owners=owners, lends=lends,
            page_rows=page_rows, keep_from=keep_from,
        )  # fmt: skip
        for worker in self.workers:
            worker.may_run = functools.partial(self._why_it_may_not_run, worker)
        self.stalls = False
        """Whether a client that does not read leaves time to idle conversations."""
        self.settings = {"secret": SECRET, **settings}

    async def __aenter__(self) -> Rig:
        await asyncio.gather(*(worker.start() for worker in self.workers))
        await self.manager.start()
        self.router = Router(RouterSettings(manager=self.manager.address, **self.settings))
        await self.router.start()
        self.client = Client(self.router.address)
        return self

    async def __aexit__(self, kind: object, *_rest: object) -> None:
        try:
            if kind is None:
                ended = asyncio.ensure_future(self.router.ended())
                await asyncio.sleep(0)
                if not ended.done():
                    await self.until(self.at_rest, "lanes and pages are still taken")
                    self.check_fences()
                    self.manager.evict(self.manager.kept.evictable())
                    await self.until(self.all_free, "kept states are not forgotten")
                ended.cancel()
                violations = self.violations()
                assert not violations, "\n".join(violations[:20])
        finally:
            for worker in self.workers:
                worker.gate.set()
            await self.client.close()
            await self.router.stop()
            for member in (self.manager, *self.workers):
                await member.server.stop(0)

    @property
    def loop(self) -> RoundLoop:
        loop = self.router._group._loop
        assert loop is not None
        return loop

    def violations(self) -> list[str]:
        return [text for member in (self.manager, *self.workers) for text in member.violations]

    def at_rest(self) -> bool:
        """Nothing is held but by states that are kept."""
        lanes = [lane for worker in self.workers for lane in worker.lanes]
        pages, kept = self.manager.pages, self.manager.kept
        rest = not lanes and not pages.leases and not self.manager.told and not pages.fenced and not kept.fences
        rest = rest and all(granted.kept and not granted.forgetting for granted in kept.states.values())
        return rest and all(worker.lanes.states.keys() == kept.states.keys() for worker in self.workers)

    def all_free(self) -> bool:
        return self.at_rest() and not self.manager.kept.states and self.manager.pages.free == list(range(self.manager.total))

    def _why_it_may_not_run(self, worker: FakeWorker, conversation: int, row: int) -> str:
        idle = self.manager.idle
        if conversation in idle and not self.stalls:
            others = [lane.conversation for lane in worker.lanes.values() if lane.conversation not in idle]
            if others:
                return f"it is idle, and {others} are there"
        at = self.manager.kept.unanswered.get(conversation)
        return f"its question at {at} is not answered" if at is not None and row >= at else ""

    def check_fences(self) -> None:
        """Whatever was released or carried in a round was told with that round, once."""
        lanes = self.workers[0].lanes
        told = sorted(one for one in self.manager.released if one[1] and one in lanes.releases)
        assert told == sorted(lanes.releases)
        told = [one for one in self.manager.carried if one in lanes.carries]
        assert len(told) == len(set(told))
        assert len(self.manager.carried) >= self.loop.counters.carries
        for worker in self.workers:
            seqs = {r.seq: [op.resume.state for op in r.operations if op.HasField("resume")] for r in worker.rounds}
            assert all(seqs[seq] for _, seq in self.manager.kept.resumed)
            assert sum(map(len, seqs.values())) == len(self.manager.kept.resumed)

    def gates(self, open_: bool) -> None:
        for worker in self.workers:
            worker.gate.set() if open_ else worker.gate.clear()

    @staticmethod
    async def until(condition: Any, what: str, seconds: float = 10.0) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                return
        raise AssertionError(f"{what}, after {seconds:g} s")
