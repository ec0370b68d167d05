"""A pool manager and rank workers that speak the protos over loopback, check what the router tells them, and answer with a
model that is a hash: the logits after tokens t0..tn are random numbers seeded by them all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from latentpool import handshake, net
from latentpool.client import Client
from latentpool.geometry import share
from latentpool.v1 import plan_pb2, pool_manager_pb2, pool_manager_pb2_grpc, rank_worker_pb2, rank_worker_pb2_grpc
from services.router.service import Router, RouterSettings

CONFIG = Path(__file__).parents[2] / "data" / "oracle" / "tiny" / "config.json"
VOCAB = 256
PAGE_ROWS = 64
SECRET = b"a secret"
_MASK = 2**64 - 1


def fold(state: int, tokens: Sequence[int]) -> int:
    for token in tokens:
        state = (state * 6364136223846793005 + int(token) + 1442695040888963407) & _MASK
    return state


def logits(state: int) -> np.ndarray:
    """float32 [V] after a prefix."""
    return np.random.default_rng(state).standard_normal(VOCAB).astype(np.float32)


def reply(prompt: Sequence[int], count: int) -> list[int]:
    """What the fake model says greedily, by its definition."""
    state, out = fold(0, prompt), []
    for _ in range(count):
        out.append(int(logits(state).argmax()))
        state = fold(state, out[-1:])
    return out


class Lane:
    def __init__(self, conversation: int) -> None:
        self.conversation = conversation
        self.pages: list[int] = []
        self.state = 0
        self.position = 0
        self.last: int | None = None


class FakeWorker(rank_worker_pb2_grpc.RankWorkerServicer):
    """One rank. `gate` holds rounds back while it is cleared; `corrupt` names a seq whose digests are wrong; `fail` ends the
    stream with that message instead of answering."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.columns = share(VOCAB, world, rank)
        self.gate = asyncio.Event()
        self.gate.set()
        self.corrupt = 0
        self.fail = ""
        self.rounds: list[rank_worker_pb2.Round] = []
        self.answered = 0
        self.binds: list[rank_worker_pb2.Bind] = []
        self.lanes: dict[int, Lane] = {}
        self.violations: list[str] = []
        self.reply_bytes = 0
        self.refuse_openings = 0

    async def start(self) -> None:
        self.server = net.server()
        rank_worker_pb2_grpc.add_RankWorkerServicer_to_server(self, self.server)
        self.address = net.bind(self.server, "127.0.0.1:0", "fake worker")
        await self.server.start()

    async def Rounds(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        opening = (await anext(requests)).open
        if self.refuse_openings:
            self.refuse_openings -= 1
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no such term yet")
        assert (opening.term, opening.epoch, opening.key) == (3, 1, b"round key")
        yield rank_worker_pb2.RoundsResponse(opened=rank_worker_pb2.RoundsOpened(last_seq=0))
        async for request in requests:
            round_ = request.round
            if round_.seq != len(self.rounds) + 1:
                self.violations.append(f"round {round_.seq} after {len(self.rounds)}")
            self.rounds.append(round_)
            await self.gate.wait()
            if self.fail:
                await context.abort(grpc.StatusCode.UNAVAILABLE, self.fail)
            result = rank_worker_pb2.RoundResult(seq=round_.seq, compute_seconds=0.001)
            for operation in round_.operations:
                result.results.append(self.execute(operation))
            if self.corrupt == round_.seq:
                result.results[-1].digest ^= 1
            self.reply_bytes = max(self.reply_bytes, result.ByteSize())
            self.answered = round_.seq
            yield rank_worker_pb2.RoundsResponse(result=result)

    # ---- execution --------------------------------------------------------------------------------------------

    def execute(self, operation: rank_worker_pb2.Operation) -> rank_worker_pb2.OperationResult:
        digest = int.from_bytes(hashlib.sha256(operation.SerializeToString(deterministic=True)).digest()[:8], "little")
        result = rank_worker_pb2.OperationResult(digest=digest)
        kind = operation.WhichOneof("operation")
        getattr(self, f"_{kind}")(getattr(operation, kind), result)
        return result

    def _ping(self, _op: Any, _result: Any) -> None:
        pass

    def _bind(self, op: Any, _result: Any) -> None:
        if op.lane in self.lanes:
            self.violations.append(f"lane {op.lane} bound twice")
        self.lanes[op.lane] = Lane(op.conversation)
        self.binds.append(op)

    def _table(self, op: Any, _result: Any) -> None:
        lane = self.lanes[op.lane]
        if op.first_slot != len(lane.pages):
            self.violations.append(f"lane {op.lane}: slot {op.first_slot} after {len(lane.pages)}")
        for page in op.pages:
            if any(page in other.pages for other in self.lanes.values()):
                self.violations.append(f"page {page} mapped twice")
        lane.pages += op.pages

    def _free(self, op: Any, _result: Any) -> None:
        del self.lanes[op.lane]

    def _run(self, lane: Lane, tokens: Sequence[int]) -> list[int]:
        """Runs tokens; the states after each."""
        lane.position += len(tokens)
        if lane.position > len(lane.pages) * PAGE_ROWS:
            self.violations.append(f"row {lane.position - 1} has no page: {len(lane.pages)} are mapped")
        states = []
        for token in tokens:
            lane.state = fold(lane.state, [token])
            states.append(lane.state)
        return states

    def _prompt(self, op: Any, result: Any) -> None:
        lane = self.lanes[op.lane]
        if op.start != lane.position or op.start % 64 or (not op.last and len(op.tokens) % 64) or not op.tokens:
            self.violations.append(f"chunk of {len(op.tokens)} at {op.start}, lane at {lane.position}")
        states = self._run(lane, op.tokens)
        following = [*op.tokens[1:], op.following if op.HasField("following") else -1]
        self._score(op.logits, states, following, result)
        if op.last:
            self._sample([lane], result)

    def _decode(self, op: Any, result: Any) -> None:
        lanes = [self.lanes[lane] for lane in op.lanes]
        if op.forced:
            states, following = [], []
            for i, lane in enumerate(lanes):
                window = op.forced[i * op.rows : (i + 1) * op.rows]
                states += self._run(lane, window)
                following += [*window[1:], op.following[i] if op.following else -1]
            self._score(op.logits, states, following, result)
        else:
            for lane in lanes:
                assert lane.last is not None
                self._run(lane, [lane.last])
            self._sample(lanes, result)

    def _sample(self, lanes: Sequence[Lane], result: Any) -> None:
        for lane in lanes:
            lane.last = int(logits(lane.state).argmax())
            if self.rank == 0:
                result.tokens.append(lane.last)

    def _score(self, wanted: int, states: Sequence[int], following: Sequence[int], result: Any) -> None:
        if not wanted:
            return
        start = self.columns.start
        mine = np.stack([logits(state) for state in states])[:, self.columns]
        largest = mine.max(axis=1)
        after = [row[t - start] if 0 <= t - start < len(row) else np.nan for row, t in zip(mine, following, strict=True)]
        result.scores.max = largest.astype("<f4").tobytes()
        result.scores.sum = np.exp(mine.astype(np.float64) - largest[:, None]).sum(axis=1).astype("<f8").tobytes()
        result.scores.best = (mine.argmax(axis=1) + start).astype("<u4").tobytes()
        result.scores.next = np.array(after, dtype="<f4").tobytes()
        if wanted == rank_worker_pb2.LOGITS_RAW:
            result.scores.raw = mine.astype("<f4").tobytes()


class FakeManager(pool_manager_pb2_grpc.PoolManagerServicer):
    """Leases pages lowest first, fences them as it is told. `refuse` ends sessions in those words; `too_large` is the final
    refusal of prompts above `largest` tokens."""

    def __init__(self, workers: Sequence[FakeWorker], *, lanes: int, context: int, pages: int, secret: bytes) -> None:
        self.workers = workers
        self.secret = secret
        self.lanes, self.context, self.total = lanes, context, pages
        self.refuse = ""
        self.largest = context
        self.free = list(range(pages))
        self.leased: dict[int, list[int]] = {}
        self.fenced: list[tuple[int, list[int]]] = []
        self.waiting: list[tuple[int, Any]] = []
        self.answered = 0
        self.admits: list[Any] = []
        self.finished: list[tuple[int, int]] = []
        self.mismatches: list[str] = []
        self.violations: list[str] = []
        self.out: asyncio.Queue[Any] = asyncio.Queue()

    async def start(self) -> None:
        self.server = net.server()
        pool_manager_pb2_grpc.add_PoolManagerServicer_to_server(self, self.server)
        self.address = net.bind(self.server, "127.0.0.1:0", "fake manager")
        await self.server.start()

    async def Session(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        pb = pool_manager_pb2
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
                world=len(self.workers), paged=True, context=self.context, lanes=self.lanes, page_rows=PAGE_ROWS,
                stream_pages=self.total, pages=self.total,
            ),
            worker_addresses=[worker.address for worker in self.workers],
            identity=pb.Identity(
                build="b", checkpoint_digest="c", config_json=CONFIG.read_text(), dtype="f32", kv_dtype="f32",
                numerics_digest="n", world=len(self.workers), page_rows=PAGE_ROWS,
            ),
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
            getattr(self, f"_{kind}")(request.key, getattr(request, kind))
        self.out.put_nowait(None)

    # ---- books ------------------------------------------------------------------------------------------------

    def _admit(self, key: int, admit: Any) -> None:
        self.admits.append(admit)
        if admit.prompt_tokens > self.largest:
            refused = pool_manager_pb2.Refused(final=True, reason=f"{admit.prompt_tokens} tokens are more than the pool's")
            self.out.put_nowait(pool_manager_pb2.SessionResponse(key=key, refused=refused))
            return
        self.waiting.append((key, admit))
        self._serve()
        if self.waiting:
            refused = pool_manager_pb2.Refused(reason="all pages are leased", ahead=len(self.waiting) - 1)
            self.out.put_nowait(pool_manager_pb2.SessionResponse(key=key, refused=refused))

    def _serve(self) -> None:
        while self.waiting:
            key, admit = self.waiting[0]
            need = -(-admit.prompt_tokens // PAGE_ROWS) + 1
            if need > len(self.free):
                return
            self.waiting.pop(0)
            pages = self.leased[admit.conversation] = self._take(need)
            answer = pool_manager_pb2.Admitted(owner=0, pages=pages, quota=need)
            self.out.put_nowait(pool_manager_pb2.SessionResponse(key=key, admitted=answer))

    def _take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def _extend(self, key: int, extend: Any) -> None:
        grants = []
        for need in extend.needs:
            pages = self.leased.get(need.conversation)
            if pages is None:
                continue
            count = -(-need.rows // PAGE_ROWS) - len(pages)
            taken = self._take(count) if count <= len(self.free) else self._take(1)
            grants.append(pool_manager_pb2.Grant(conversation=need.conversation, pages=taken, first_slot=len(pages)))
            pages += taken
        self.out.put_nowait(pool_manager_pb2.SessionResponse(key=key, extended=pool_manager_pb2.Extended(grants=grants)))

    def _finish(self, key: int, finish: Any) -> None:
        self.waiting = [(k, admit) for k, admit in self.waiting if admit.conversation != finish.conversation]
        pages = self.leased.pop(finish.conversation, [])
        self.finished.append((finish.conversation, finish.fence_seq))
        self.fenced.append((finish.fence_seq, pages))
        self._lift()
        answer = pool_manager_pb2.Finished(pages=len(pages))
        self.out.put_nowait(pool_manager_pb2.SessionResponse(key=key, finished=answer))

    def _answered(self, _key: int, answered: Any) -> None:
        late = [worker.rank for worker in self.workers if worker.answered < answered.seq]
        if late:
            self.violations.append(f"round {answered.seq} reported as answered, but not by ranks {late}")
        self.answered = answered.seq
        self._lift()

    def _lift(self) -> None:
        for seq, pages in self.fenced:
            if seq <= self.answered:
                self.free = sorted(self.free + pages)
        self.fenced = [(seq, pages) for seq, pages in self.fenced if seq > self.answered]
        self._serve()

    def _mismatch(self, _key: int, mismatch: Any) -> None:
        self.mismatches.append(mismatch.message)
        self.end(mismatch.message)

    def end(self, reason: str, orderly: bool = False) -> None:
        ended = pool_manager_pb2.EpochEnded(epoch=1, reason=reason, orderly=orderly)
        self.out.put_nowait(pool_manager_pb2.SessionResponse(epoch_ended=ended))
        self.out.put_nowait(None)


class Rig:
    """A router between fakes. Leaving it asserts that nobody saw a rule broken, and that all lanes and pages came back
    (unless the epoch ended)."""

    def __init__(self, world: int = 2, *, lanes: int = 2, context: int = 1024, pages: int = 40, **settings: Any) -> None:
        self.workers = [FakeWorker(rank, world) for rank in range(world)]
        self.manager = FakeManager(self.workers, lanes=lanes, context=context, pages=pages, secret=SECRET)
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
                ended.cancel()
                assert self.violations() == []
        finally:
            for worker in self.workers:
                worker.gate.set()
            await self.client.close()
            await self.router.stop()
            for member in (self.manager, *self.workers):
                await member.server.stop(0)

    def violations(self) -> list[str]:
        return [text for member in (self.manager, *self.workers) for text in member.violations]

    def at_rest(self) -> bool:
        lanes = [lane for worker in self.workers for lane in worker.lanes]
        return not lanes and not self.manager.leased and self.manager.free == list(range(self.manager.total))

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
