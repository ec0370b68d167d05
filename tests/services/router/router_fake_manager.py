"""A pool manager that speaks the proto over loopback, and checks what the router tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from router_fake_pages import FakePages
from router_fake_states import FakeKept, Granted
from router_fake_worker import FakeWorker

from latentpool import handshake, net
from latentpool.v1 import plan_pb2, pool_manager_pb2_grpc
from latentpool.v1 import pool_manager_pb2 as pb

CONFIG = Path(__file__).parents[2] / "data" / "oracle" / "tiny" / "config.json"


class FakeManager(pool_manager_pb2_grpc.PoolManagerServicer):
    """Leases the owner's pages lowest first, fences them as it is told, and recalls, carries and at last parks the youngest
    where pages run out. `refuse` ends sessions in those words; `largest`: prompts above so many tokens are refused for good;
    `late` answers extensions so much later; `lends`: slots that a fill may borrow; `carries`: whether dry owners carry;
    `carries_resumed`: whether what resumes is carried first, where another owner has room."""

    def __init__(
        self,
        workers: Sequence[FakeWorker],
        *,
        lanes: int,
        context: int,
        pages: int,
        secret: bytes,
        owners: int,
        lends: int,
        page_rows: int,
        keep_from: int,
    ) -> None:
        self.workers = workers
        self.secret = secret
        self.lanes, self.context, self.total = lanes, context, pages
        self.owners, self.lends = owners, lends
        self.page_rows, self.keep_from = page_rows, keep_from
        self.carries_resumed = False
        self.refuse = ""
        self.largest = context
        self.late = 0.0
        self.carries = True
        self.violations: list[str] = []
        self.pages = FakePages(pages, owners, self.violations.append)
        self.kept = FakeKept(self.pages, page_rows, self.violations.append)
        self.reports: list[Any] = []
        self.background: dict[int, bool] = {}
        self.waiting: list[tuple[int, Any]] = []
        self.idle: set[int] = set()
        self.told: set[int] = set()
        """To park, and not finished yet."""
        self.parked: set[int] = set()
        self.answered = 0
        self.admits: list[Any] = []
        self.admitted: list[int] = []
        self.finished: list[tuple[int, int]] = []
        self.released: list[tuple[int, int]] = []
        self.carried: list[tuple[int, int]] = []
        self.ordered: list[pb.Orders] = []
        self.mismatches: list[str] = []
        self.out: asyncio.Queue[Any] = asyncio.Queue()

    async def start(self) -> None:
        self.server = net.server()
        pool_manager_pb2_grpc.add_PoolManagerServicer_to_server(self, self.server)
        self.address = net.bind(self.server, "127.0.0.1:0", "fake manager")
        await self.server.start()

    async def Session(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        nonce = handshake.nonce()
        yield pb.SessionResponse(challenge=pb.Challenge(nonce=nonce))
        first = await anext(requests)
        opening = first.open
        if not handshake.proven(self.secret, "router", nonce, opening.nonce, opening.mac):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this router does not know the group's secret")
        if self.refuse:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuse)
        granted = pb.Granted(
            term=3,
            epoch=1,
            round_key=b"round key",
            mac=handshake.prove(self.secret, "manager", opening.nonce, nonce),
            plan=plan_pb2.Plan(
                world=len(self.workers), paged=True, context=self.context, lanes=self.lanes, page_rows=self.page_rows,
                stream_pages=self.total, pages=self.total, split=self.owners > 1,
            ),
            worker_addresses=[worker.address for worker in self.workers],
            headroom=2048,
            identity=pb.Identity(
                build="b", checkpoint_digest="c", config_json=CONFIG.read_text(), dtype="f32", kv_dtype="f32",
                numerics_digest="n", world=len(self.workers), page_rows=self.page_rows,
            ),
            keep_from=self.keep_from,
        )  # fmt: skip
        yield pb.SessionResponse(key=first.key, granted=granted)
        reader = asyncio.create_task(self._read(requests))
        try:
            while (answer := await self.out.get()) is not None:
                yield answer
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "extend":
                await asyncio.sleep(self.late)
            getattr(self, f"_{kind}")(request.key, getattr(request, kind))
            self.pages.check(f"after {kind}")
        self.out.put_nowait(None)

    # ---- admissions -------------------------------------------------------------------------------------------------

    def _admit(self, key: int, admit: Any) -> None:
        self.admits.append(admit)
        if admit.prompt_tokens > self.largest:
            refused = pb.Refused(final=True, reason=f"{admit.prompt_tokens} tokens are more than the pool's")
            self.out.put_nowait(pb.SessionResponse(key=key, refused=refused))
            return
        self._check_admit(admit)
        self.waiting.append((key, admit))
        self.waiting.sort(key=lambda one: (one[1].idle, one[1].background, not one[1].returning, one[1].conversation))
        self._serve()
        if (key, admit) in self.waiting:
            refused = pb.Refused(reason="all pages are leased", ahead=self.waiting.index((key, admit)))
            self.out.put_nowait(pb.SessionResponse(key=key, refused=refused))

    def _check_admit(self, admit: Any) -> None:
        name = admit.conversation
        scores = admit.HasField("max_tokens") and admit.max_tokens == 0
        end = admit.prompt_tokens + admit.max_tokens - (not scores) if admit.HasField("max_tokens") else self.context - 1
        for worker in self.workers:
            if worker.ends.setdefault(name, end) != end:
                self.violations.append(f"conversation {name} ends at {end} rows when it returns, not at {worker.ends[name]}")
        if admit.idle and any(not other.idle for _, other in self.waiting):
            self.violations.append(f"idle conversation {name} wants pages, and others wait")
        if admit.blocks and (admit.blocks != self.kept.blocks.setdefault(name, admit.blocks) or not self.keep_from):
            self.violations.append(f"conversation {name} has other blocks when it returns")
        if admit.returning != (name in self.parked) or name in self.pages.leases:
            self.violations.append(f"conversation {name} returns: {admit.returning}, parked are {sorted(self.parked)}")
        if admit.background != self.background.setdefault(name, admit.background):
            self.violations.append(f"conversation {name} changed its class")
        self.parked.discard(name)

    def _serve(self) -> None:
        while self.waiting:
            key, admit = self.waiting[0]
            need = -(-admit.prompt_tokens // self.page_rows) + 1
            found = self.kept.look_up(admit)
            if found is not None and self._resume(key, admit, need, *found):
                continue
            owner = max(range(self.owners), key=self.pages.spare)
            if need > self.pages.spare(owner):
                self._make_way(admit)
                return
            self._take(admit)
            lease = self.pages.lease(admit.conversation, owner, need)
            slots = 0 if self.waiting or admit.idle else min(self.lends, -(-admit.prompt_tokens // self.page_rows))
            self.pages.lend(admit.conversation, slots)
            answer = pb.Admitted(owner=owner, pages=lease.pages, quota=need, borrowed=lease.borrowed)
            answer.shared_prefix = self.kept.shared(admit)
            self.out.put_nowait(pb.SessionResponse(key=key, admitted=answer))

    def _take(self, admit: Any) -> None:
        self.waiting.pop(0)
        self.admitted.append(admit.conversation)
        if admit.idle:
            self.idle.add(admit.conversation)

    def _resume(self, key: int, admit: Any, need: int, state: int, kept: Granted) -> bool:
        """On the state's owner, or carried away from there, or not at all."""
        name, full = admit.conversation, kept.at // self.page_rows
        others = [owner for owner in range(self.owners) if owner != kept.owner and self.pages.spare(owner) >= need]
        here = self.pages.spare(kept.owner) >= need - full
        carries = bool(others) and not admit.idle and (self.carries_resumed or not here)
        if not carries and not here:
            return False
        self._take(admit)
        rows = kept.rows if carries else kept.rows[:full]
        lease = self.pages.lease(name, kept.owner, len(rows) if carries else need, rows)
        answer = pb.Admitted(owner=kept.owner, pages=lease.pages, quota=need, resume=self.kept.resume(name, state))
        answer.shared_prefix = self.kept.shared(admit)
        self.out.put_nowait(pb.SessionResponse(key=key, admitted=answer))
        if carries:
            self.order(carry=[(name, others[0], need)])
        return True

    def _make_way(self, admit: Any) -> None:
        """For one that waits: idle ones go first, then what is lent, then what is kept."""
        if admit.idle:
            return
        if idle := [name for name in self.idle if name in self.pages.leases and name not in self.told]:
            self.told.update(idle)
            self.out.put_nowait(pb.SessionResponse(extended=pb.Extended(park=idle)))
        elif lent := [name for name, lease in self.pages.leases.items() if lease.borrowed and not lease.recalled]:
            self.order(recall=lent)
        else:
            self.evict(self.kept.evictable()[:1])

    # ---- pages ------------------------------------------------------------------------------------------------------

    def _extend(self, key: int, extend: Any) -> None:
        grants = []
        for need in extend.needs:
            lease = self.pages.leases.get(need.conversation)
            if lease is None:
                continue
            taken: list[int] = []
            first_slot = len(lease.pages)
            if not lease.moving:
                count = -(-need.rows // self.page_rows) - len(lease.pages)
                if count <= 0:
                    self.violations.append(
                        f"conversation {need.conversation} has {len(lease.pages)} pages and asks for {need.rows} rows"
                    )
                taken = self.pages.extend(need.conversation, count)
            grants.append(pb.Grant(conversation=need.conversation, pages=taken, first_slot=first_slot))
        park = [name for owner in range(self.owners) for name in self._make_room(owner)]
        self.out.put_nowait(pb.SessionResponse(key=key, extended=pb.Extended(grants=grants, park=park)))

    def _make_room(self, owner: int) -> list[int]:
        """Recalls, carries and parks until what is or will be free covers what is owed to the others; of those of an owner
        the last one stays. Returns whom to park."""
        named: list[int] = []
        while self.pages.coming(owner, self.told) < self.pages.owed(owner):
            lent = [name for name, lease in self.pages.leases.items() if lease.borrowed and not lease.recalled]
            mine = [name for name, lease in self.pages.leases.items() if lease.owner == owner]
            staying = [name for name in mine if name not in self.told and not self.pages.leases[name].moving]
            staying.sort(key=self.admitted[::-1].index)
            idle = [name for name in self.idle if name in self.pages.leases and name not in self.told]
            if idle:
                self.told.update(idle)
                named += idle
            elif lent:
                self.order(recall=lent)
            elif states := [s for s in self.kept.evictable() if self.kept.states[s].owner == owner]:
                self.evict(states[:1])
                break
            elif self.carries and (move := self._to_carry(staying)):
                self.order(carry=[move])
            elif len(staying) > 1:
                self.park(staying[0])
                named.append(staying[0])
            else:
                break
        return named

    def park(self, name: int) -> None:
        self.pages.leases[name].owed = 0
        self.told.add(name)

    def _to_carry(self, youngest_first: Sequence[int]) -> tuple[int, int, int] | None:
        for name in youngest_first:
            lease = self.pages.leases[name]
            need = len(lease.pages) + lease.owed
            for owner in range(self.owners):
                if owner != lease.owner and self.pages.spare(owner) > need:
                    return name, owner, need
        return None

    def order(self, recall: Sequence[int] = (), carry: Sequence[tuple[int, int, int]] = ()) -> None:
        """Conversations that release, and (conversation, new owner, its pages there) of those that move."""
        for name in recall:
            self.pages.leases[name].recalled = True
        moves = [pb.CarryOrder(conversation=c, owner=owner, pages=self.pages.move(c, owner, n)) for c, owner, n in carry]
        if recall or moves:
            self.ordered.append(pb.Orders(recall=recall, carry=moves))
            self.out.put_nowait(pb.SessionResponse(orders=self.ordered[-1]))

    def evict(self, states: Sequence[int]) -> None:
        for state in states:
            self.kept.states[state].forgetting = True
        if states:
            self.ordered.append(pb.Orders(forget=states))
            self.out.put_nowait(pb.SessionResponse(orders=self.ordered[-1]))

    # ---- kept states ------------------------------------------------------------------------------------------------

    def _ask_keep(self, key: int, ask: Any) -> None:
        lanes = [lane for worker in self.workers for lane in worker.lanes.values() if lane.conversation == ask.conversation]
        self.kept.ask(ask, max((lane.position for lane in lanes), default=0))
        if self.kept.late is None:
            self.answer_keep(key, ask)
        else:
            self.kept.late.append((key, ask))

    def answer_keep(self, key: int, ask: Any) -> None:
        self.out.put_nowait(pb.SessionResponse(key=key, keep_answer=self.kept.answer(ask)))

    def _kept(self, _key: int, kept: Any) -> None:
        self.kept.keep(kept.state)

    def _resumed(self, _key: int, resumed: Any) -> None:
        self.kept.has_resumed(resumed.conversation, resumed.fence_seq)
        self._lift()

    def _forgotten(self, _key: int, forgotten: Any) -> None:
        self.kept.forgotten(forgotten.states, forgotten.fence_seq)
        self._lift()

    def _report(self, _key: int, report: Any) -> None:
        self.reports.append(report)

    def carry(self, name: int, owner: int | None = None, more: int = 0) -> None:
        """By hand: to the owner, or the next one, with `more` pages than it has; recalls first what it borrows."""
        lease = self.pages.leases[name]
        owner = (lease.owner + 1) % self.owners if owner is None else owner
        recall = [name] if lease.borrowed and not lease.recalled else []
        self.order(recall, [(name, owner, len(lease.pages) + more)])

    # ---- what comes back --------------------------------------------------------------------------------------------

    def _finish(self, key: int, finish: Any) -> None:
        self.waiting = [(k, admit) for k, admit in self.waiting if admit.conversation != finish.conversation]
        if finish.conversation in self.told:
            self.told.discard(finish.conversation)
            if finish.conversation not in self.idle:
                self.parked.add(finish.conversation)
        self.finished.append((finish.conversation, finish.fence_seq))
        self.kept.finish(finish.conversation, finish.fence_seq)
        count = self.pages.finish(finish.conversation, finish.fence_seq)
        self._lift()
        self.out.put_nowait(pb.SessionResponse(key=key, finished=pb.Finished(pages=count)))

    def _released(self, _key: int, released: Any) -> None:
        self.released.append((released.conversation, released.fence_seq))
        self.pages.released(released.conversation, released.fence_seq)
        self._lift()

    def _carried(self, _key: int, carried: Any) -> None:
        self.carried.append((carried.conversation, carried.fence_seq))
        self.pages.moved(carried.conversation, carried.fence_seq)
        self._lift()

    def _answered(self, _key: int, answered: Any) -> None:
        late = [worker.rank for worker in self.workers if worker.answered < answered.seq]
        if late:
            self.violations.append(f"round {answered.seq} reported as answered, but not by ranks {late}")
        self.answered = answered.seq
        self._lift()

    def _lift(self) -> None:
        self.kept.lift(self.answered)
        for page in self.pages.lift(self.answered):
            if any(page in lane.holds for worker in self.workers for lane in worker.lanes.values()):
                self.violations.append(f"page {page} came back, and a lane holds it")
            if any(page in worker.lanes.states.pages for worker in self.workers):
                self.violations.append(f"page {page} came back, and a kept state holds it")
        self._serve()

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _mismatch(self, _key: int, mismatch: Any) -> None:
        self.mismatches.append(mismatch.message)
        self.end(mismatch.message)

    def end(self, reason: str, orderly: bool = False) -> None:
        ended = pb.EpochEnded(epoch=1, reason=reason, orderly=orderly)
        self.out.put_nowait(pb.SessionResponse(epoch_ended=ended))
        self.out.put_nowait(None)
