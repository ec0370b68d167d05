"""A pool manager and rank workers that speak the protos over loopback, check what the router tells them, and answer with a
model that is a hash: the logits after tokens t0..tn are random numbers seeded by them all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from latentpool import handshake, net
from latentpool.client import Client
from latentpool.geometry import R_MAX, share
from latentpool.v1 import plan_pb2, pool_manager_pb2, pool_manager_pb2_grpc, rank_worker_pb2, rank_worker_pb2_grpc
from services.router.loop import RoundLoop
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
    def __init__(self, conversation: int, forgetful: bool) -> None:
        self.conversation = conversation
        self.forgetful = forgetful
        self.pages: list[int] = []
        self.state = 0
        self.position = 0
        self.last: int | None = None


class FakeWorker(rank_worker_pb2_grpc.RankWorkerServicer):
    """One rank. `gate` holds rounds back while it is cleared; `corrupt` names a seq whose digests are wrong; `fail` ends the
    stream with that message instead of answering, and refuses others; `breaks` is the probability that the stream breaks at a
    round, before or after it is executed; `pause` is how long a round takes; `forget` makes lanes that are bound again for
    the same conversation sample otherwise. `ends` has the rows at its end of every conversation that was admitted."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.columns = share(VOCAB, world, rank)
        self.gate = asyncio.Event()
        self.gate.set()
        self.corrupt = 0
        self.fail = ""
        self.breaks = 0.0
        self.broken = 0
        self.pause = 0.0
        self.forget = False
        self.random = random.Random(rank)
        self.ends: dict[int, int] = {}
        self.rounds: list[rank_worker_pb2.Round] = []
        self.kept: dict[int, rank_worker_pb2.RoundResult] = {}
        self.repeats = 0
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
        if self.fail:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.fail)
        assert (opening.term, opening.epoch, opening.key) == (3, 1, b"round key")
        yield rank_worker_pb2.RoundsResponse(opened=rank_worker_pb2.RoundsOpened(last_seq=len(self.rounds)))
        async for request in requests:
            round_ = request.round
            await self.gate.wait()
            await self.perhaps_break(context)
            if self.pause:
                await asyncio.sleep(self.pause)
            result = self.take(round_)
            await self.perhaps_break(context)
            self.answered = max(self.answered, round_.seq)
            yield rank_worker_pb2.RoundsResponse(result=result)

    async def perhaps_break(self, context: Any) -> None:
        if self.fail:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.fail)
        if self.random.random() < self.breaks:
            self.broken += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the network forgot this stream")

    def take(self, round_: rank_worker_pb2.Round) -> rank_worker_pb2.RoundResult:
        """Executes a round once; a repeat is answered with what was kept."""
        self.kept = {seq: result for seq, result in self.kept.items() if seq > round_.acknowledged_seq}
        if round_.seq <= len(self.rounds):
            self.repeats += 1
            if round_ != self.rounds[round_.seq - 1]:
                self.violations.append(f"round {round_.seq} is another one when it is sent again")
            return self.kept[round_.seq]
        if round_.seq != len(self.rounds) + 1:
            self.violations.append(f"round {round_.seq} after {len(self.rounds)}")
        if round_.seq - round_.acknowledged_seq > 2:
            self.violations.append(f"round {round_.seq} while {round_.acknowledged_seq} is the last that is answered")
        self.rounds.append(round_)
        result = rank_worker_pb2.RoundResult(seq=round_.seq, compute_seconds=0.001)
        for operation in round_.operations:
            result.results.append(self.execute(operation))
        if self.corrupt == round_.seq:
            result.results[-1].digest ^= 1
        self.reply_bytes = max(self.reply_bytes, result.ByteSize())
        self.kept[round_.seq] = result
        return result

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
        if op.conversation in {lane.conversation for lane in self.lanes.values()}:
            self.violations.append(f"conversation {op.conversation} has two lanes")
        again = any(bind.conversation == op.conversation for bind in self.binds)
        self.lanes[op.lane] = Lane(op.conversation, forgetful=self.forget and again)
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
        if lane.position > self.ends[lane.conversation]:
            self.violations.append(f"row {lane.position - 1} of a conversation that ends at {self.ends[lane.conversation]}")
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
            self._sample(lane, states[-1:], result)
            if op.log_probs:
                self._score(rank_worker_pb2.LOGITS_SCORES, states[-1:], [lane.last], result, op.log_probs - 1)

    def _decode(self, op: Any, result: Any) -> None:
        lanes = [self.lanes[lane] for lane in op.lanes]
        if not 1 <= op.rows <= R_MAX or len(set(op.lanes)) != len(lanes):
            self.violations.append(f"a window of {op.rows} rows for lanes {list(op.lanes)}")
        states, following, sampled = [], [], []
        for i, lane in enumerate(lanes):
            window = list(op.forced[i * op.rows : (i + 1) * op.rows]) or [lane.last]
            if not op.logits and window[0] != lane.last:
                self.violations.append(f"lane {op.lanes[i]} is fed {window[0]} where it sampled {lane.last}")
            mine = self._run(lane, window)
            after = self._sample(lane, mine, result)
            if not op.logits and window[1:] != after[:-1]:
                self.violations.append(f"lane {op.lanes[i]} is fed {window} where it sampled {after}")
            states, sampled = states + mine, sampled + after
            following += [*window[1:], op.following[i] if op.following else -1]
        self._score(op.logits, states, following, result)
        if op.log_probs:
            self._score(rank_worker_pb2.LOGITS_SCORES, states, sampled, result, op.log_probs - 1)

    def _sample(self, lane: Lane, states: Sequence[int], result: Any) -> list[int]:
        """Tokens after rows; the last is the lane's last token."""
        tokens = [int(logits(state).argmax()) for state in states]
        if lane.forgetful and lane.position > 90:
            tokens[-1] ^= 1
        lane.last = tokens[-1]
        if self.rank == 0:
            result.tokens.extend(tokens)
        return tokens

    def _score(self, wanted: int, states: Sequence[int], following: Sequence[int], result: Any, top: int = 0) -> None:
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
        if top:
            order = np.argsort(-mine, axis=1, kind="stable")[:, :top]
            result.scores.top_ids = (order + start).astype("<u4").tobytes()
            result.scores.top_logits = np.take_along_axis(mine, order, axis=1).astype("<f4").tobytes()


class FakeManager(pool_manager_pb2_grpc.PoolManagerServicer):
    """Leases pages lowest first, fences them as it is told, and parks the youngest where pages run out. `refuse` ends sessions
    in those words; `largest`: prompts above so many tokens are refused for good; `late` answers extensions so much later."""

    def __init__(self, workers: Sequence[FakeWorker], *, lanes: int, context: int, pages: int, secret: bytes) -> None:
        self.workers = workers
        self.secret = secret
        self.lanes, self.context, self.total = lanes, context, pages
        self.refuse = ""
        self.largest = context
        self.late = 0.0
        self.free = list(range(pages))
        self.leased: dict[int, list[int]] = {}
        self.background: dict[int, bool] = {}
        self.fenced: list[tuple[int, list[int]]] = []
        self.waiting: list[tuple[int, Any]] = []
        self.owed: dict[int, int] = {}
        """Pages asked for and not granted: nobody is admitted with them."""
        self.told: set[int] = set()
        """To park, and not finished yet."""
        self.parked: set[int] = set()
        self.answered = 0
        self.admits: list[Any] = []
        self.admitted: list[int] = []
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
            if kind == "extend":
                await asyncio.sleep(self.late)
            getattr(self, f"_{kind}")(request.key, getattr(request, kind))
        self.out.put_nowait(None)

    # ---- books ------------------------------------------------------------------------------------------------

    def _admit(self, key: int, admit: Any) -> None:
        self.admits.append(admit)
        if admit.prompt_tokens > self.largest:
            refused = pool_manager_pb2.Refused(final=True, reason=f"{admit.prompt_tokens} tokens are more than the pool's")
            self.out.put_nowait(pool_manager_pb2.SessionResponse(key=key, refused=refused))
            return
        self._check_admit(admit)
        self.waiting.append((key, admit))
        self.waiting.sort(key=lambda one: (one[1].background, not one[1].returning, one[1].conversation))
        self._serve()
        if (key, admit) in self.waiting:
            refused = pool_manager_pb2.Refused(reason="all pages are leased", ahead=self.waiting.index((key, admit)))
            self.out.put_nowait(pool_manager_pb2.SessionResponse(key=key, refused=refused))

    def _check_admit(self, admit: Any) -> None:
        name = admit.conversation
        scores = admit.HasField("max_tokens") and admit.max_tokens == 0
        end = admit.prompt_tokens + admit.max_tokens - (not scores) if admit.HasField("max_tokens") else self.context - 1
        for worker in self.workers:
            if worker.ends.setdefault(name, end) != end:
                self.violations.append(f"conversation {name} ends at {end} rows when it returns, not at {worker.ends[name]}")
        if admit.returning != (name in self.parked) or name in self.leased:
            self.violations.append(f"conversation {name} returns: {admit.returning}, parked are {sorted(self.parked)}")
        if admit.background != self.background.setdefault(name, admit.background):
            self.violations.append(f"conversation {name} changed its class")
        self.parked.discard(name)

    def _serve(self) -> None:
        while self.waiting:
            key, admit = self.waiting[0]
            need = -(-admit.prompt_tokens // PAGE_ROWS) + 1
            if need > len(self.free) - sum(self.owed.values()):
                return
            self.waiting.pop(0)
            self.admitted.append(admit.conversation)
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
            if count <= 0:
                self.violations.append(f"conversation {need.conversation} has {len(pages)} pages and asks for {need.rows} rows")
            taken = self._take(min(count, len(self.free)))
            self.owed[need.conversation] = count - len(taken)
            grants.append(pool_manager_pb2.Grant(conversation=need.conversation, pages=taken, first_slot=len(pages)))
            pages += taken
        extended = pool_manager_pb2.Extended(grants=grants, park=self._park())
        self.out.put_nowait(pool_manager_pb2.SessionResponse(key=key, extended=extended))

    def _park(self) -> list[int]:
        """The youngest, until what is or will be free covers what is owed to the others; the last one stays."""
        named: list[int] = []
        while len(staying := [name for name in self.leased if name not in self.told]) > 1:
            coming = len(self.free) + sum(len(pages) for _, pages in self.fenced) + sum(len(self.leased[c]) for c in self.told)
            if coming >= sum(self.owed.values()):
                break
            name = min(staying, key=self.admitted[::-1].index)
            self.owed.pop(name, None)
            self.told.add(name)
            named.append(name)
        return named

    def _finish(self, key: int, finish: Any) -> None:
        self.waiting = [(k, admit) for k, admit in self.waiting if admit.conversation != finish.conversation]
        pages = self.leased.pop(finish.conversation, [])
        self.owed.pop(finish.conversation, None)
        if finish.conversation in self.told:
            self.told.discard(finish.conversation)
            self.parked.add(finish.conversation)
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

    @property
    def loop(self) -> RoundLoop:
        loop = self.router._group._loop
        assert loop is not None
        return loop

    def violations(self) -> list[str]:
        return [text for member in (self.manager, *self.workers) for text in member.violations]

    def at_rest(self) -> bool:
        lanes = [lane for worker in self.workers for lane in worker.lanes]
        return (
            not lanes
            and not self.manager.leased
            and not self.manager.told
            and self.manager.free == list(range(self.manager.total))
        )

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
