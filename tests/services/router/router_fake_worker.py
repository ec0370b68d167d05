"""Rank workers that speak the protos over loopback, check what the router tells them, and run a model that is a hash."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import numpy as np
from router_fake_lanes import FakeLanes, Lane
from router_fake_model import VOCAB, fold, logits

from latentpool import net
from latentpool.geometry import R_MAX, share
from latentpool.v1 import rank_worker_pb2, rank_worker_pb2_grpc


class FakeWorker(rank_worker_pb2_grpc.RankWorkerServicer):
    """One rank. `gate` holds rounds back while it is cleared; `corrupt` names a seq whose digests are wrong; `fail` ends the
    stream with that message instead of answering, and refuses others; `breaks` is the probability that the stream breaks at a
    round, before or after it is executed; `pause` is how long a round takes; `forget` makes lanes that are bound again for
    the same conversation sample otherwise; `stale` names a seq in which it holds other rows than the rest. `ends` has the rows
    at its end of every conversation that was admitted."""

    def __init__(self, rank: int, world: int, owners: int, page_rows: int) -> None:
        self.rank, self.world = rank, world
        self.lanes = FakeLanes(owners, page_rows, self.violation)
        self.may_run: Callable[[int, int], str] = lambda _conversation, _row: ""
        """Why a conversation may not run now, from a row on; "" where it may."""
        self.columns = share(VOCAB, world, rank)
        self.gate = asyncio.Event()
        self.gate.set()
        self.held = False
        self.corrupt = self.stale = 0
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
            self.held = not self.gate.is_set()
            await self.gate.wait()
            self.held = False
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
                self.violation(f"round {round_.seq} is another one when it is sent again")
            return self.kept[round_.seq]
        if round_.seq != len(self.rounds) + 1:
            self.violation(f"round {round_.seq} after {len(self.rounds)}")
        if round_.seq - round_.acknowledged_seq > 2:
            self.violation(f"round {round_.seq} while {round_.acknowledged_seq} is the last that is answered")
        self.rounds.append(round_)
        self.lanes.begin(round_)
        result = rank_worker_pb2.RoundResult(seq=round_.seq, compute_seconds=0.001)
        for operation in round_.operations:
            result.results.append(self.execute(operation))
        self.lanes.end()
        if self.corrupt == round_.seq:
            result.results[-1].digest ^= 1
        if self.stale == round_.seq:
            result.results[-1].rows_digest ^= 1
        self.reply_bytes = max(self.reply_bytes, result.ByteSize())
        self.kept[round_.seq] = result
        return result

    def violation(self, text: str) -> None:
        self.violations.append(text)

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
        again = any(bind.conversation == op.conversation for bind in self.binds)
        self.lanes.bind(op, forgetful=self.forget and again)
        self.binds.append(op)

    def _table(self, op: Any, _result: Any) -> None:
        self.lanes.table(op)

    def _borrow(self, op: Any, _result: Any) -> None:
        self.lanes.borrow(op)

    def _release(self, op: Any, _result: Any) -> None:
        self.lanes.release(op)

    def _carry(self, op: Any, result: Any) -> None:
        """The owners old and new hash the rows."""
        if self.rank in (self.lanes[op.lane].owner, op.owner):
            result.rows_digest = 1 + fold(0, op.pages) % 2**60
        self.lanes.carry(op)

    def _free(self, op: Any, _result: Any) -> None:
        self.lanes.free(op)

    def _keep(self, op: Any, _result: Any) -> None:
        self.lanes.keep(op)

    def _resume(self, op: Any, _result: Any) -> None:
        self.lanes.resume(op)

    def _forget(self, op: Any, _result: Any) -> None:
        self.lanes.states.forget(op)

    def _run(self, name: int, tokens: Sequence[int]) -> list[int]:
        """Runs tokens; the states after each."""
        lane = self.lanes[name]
        if why := self.may_run(lane.conversation, lane.position):
            self.violation(f"conversation {lane.conversation} runs at {lane.position}: {why}")
        self.lanes.write(name, len(tokens))
        lane.position += len(tokens)
        if lane.position > len(lane.pages) * self.lanes.page_rows:
            self.violation(f"row {lane.position - 1} has no page: {len(lane.pages)} are mapped")
        if lane.position > self.ends[lane.conversation]:
            self.violation(f"row {lane.position - 1} of a conversation that ends at {self.ends[lane.conversation]}")
        states = []
        for token in tokens:
            lane.state = fold(lane.state, [token])
            states.append(lane.state)
        return states

    def _prompt(self, op: Any, result: Any) -> None:
        lane = self.lanes[op.lane]
        if op.start != lane.position or op.start % 64 or (not op.last and len(op.tokens) % 64) or not op.tokens:
            self.violation(f"chunk of {len(op.tokens)} at {op.start}, lane at {lane.position}")
        self.lanes.check_prompt(op)
        states = self._run(op.lane, op.tokens)
        following = [*op.tokens[1:], op.following if op.HasField("following") else -1]
        self._score(op.logits, states, following, result)
        if op.last:
            self._sample(lane, states[-1:], result)
            if op.log_probs:
                self._score(rank_worker_pb2.LOGITS_SCORES, states[-1:], [lane.last], result, op.log_probs - 1)

    def _decode(self, op: Any, result: Any) -> None:
        lanes = [self.lanes[lane] for lane in op.lanes]
        self.lanes.check_decode(op)
        if not 1 <= op.rows <= R_MAX or len(set(op.lanes)) != len(lanes):
            self.violation(f"a window of {op.rows} rows for lanes {list(op.lanes)}")
        states, following, sampled = [], [], []
        for i, lane in enumerate(lanes):
            window = list(op.forced[i * op.rows : (i + 1) * op.rows]) or [lane.last]
            if not op.logits and window[0] != lane.last:
                self.violation(f"lane {op.lanes[i]} is fed {window[0]} where it sampled {lane.last}")
            mine = self._run(op.lanes[i], window)
            after = self._sample(lane, mine, result)
            if not op.logits and window[1:] != after[:-1]:
                self.violation(f"lane {op.lanes[i]} is fed {window} where it sampled {after}")
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
