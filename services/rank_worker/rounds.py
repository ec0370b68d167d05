"""Executes rounds: the operations of one round in order, on this rank (design section 7).

Positions, last tokens and parities of lanes live here and advance alike on every rank. An operation that does not fit the
lanes' state is a fault of the router and ends the epoch: ranks must never guess.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kernels.api import Kernels, Path
from kernels.rows import Array
from latentpool.errors import EpochError
from latentpool.geometry import BLOCK, R_MAX, Geometry, shares
from services.rank_worker import frames
from services.rank_worker.arena import Arena
from services.rank_worker.digest import Digest
from services.rank_worker.exchange.base import Exchange
from services.rank_worker.kept import Inventory
from services.rank_worker.link import Link
from services.rank_worker.model.batch import Batch, decode_batch, prompt_batch
from services.rank_worker.model.model import Model
from services.rank_worker.model.pass_ import LatentRows, Pass
from services.rank_worker.model.sums import Sums
from services.rank_worker.model.workspace import Workspace, workspace_rows
from services.rank_worker.sample import Draws, Sampler
from services.rank_worker.split.audit import Audit
from services.rank_worker.split.carry import Carrying
from services.rank_worker.split.rows import HereRows
from services.rank_worker.split.split import Split

RAW_LOGITS = 2


@dataclass(slots=True)
class Lane:
    """A lane's running conversation. position: rows written so far; parity: which KDA state is committed."""

    conversation: int
    temperature: float
    top_k: int
    seed: int
    top_p: float
    min_p: float
    position: int = 0
    last_token: int = -1
    parity: int = 0
    carrying: Carrying | None = None
    replied: bool = False
    """Whether rows ran on the decode path: then nothing of it can be kept."""


class Rounds:
    """One rank's executor. Prepares its link channels when made, so every rank makes it at the same point.

    shapes_of: (world, rank) whose shapes the weights have, where that is not the exchange's (the numerics digest runs
    rank 0's shapes of a group alone). staging_rows, audit: of split groups, see services.rank_worker.split.
    key: what computes, see services.rank_worker.kept.
    """

    def __init__(
        self, geometry: Geometry, kernels: Kernels, model: Model, arena: Arena, exchange: Exchange, *, chunk_rows: int,
        deadline: float, tick: Callable[[], None], shapes_of: tuple[int, int] | None = None, staging_rows: int = 0,
        audit: bool = False, key: str = "",
    ) -> None:  # fmt: skip
        self.geometry = geometry
        self.arena = arena
        self._kernels = kernels
        self._model = model
        self._tick = tick
        self._chunk_rows = chunk_rows
        self._link = Link(exchange, deadline)
        world, rank = shapes_of or (exchange.world, exchange.rank)
        rows = workspace_rows(geometry, chunk_rows, arena.lanes)
        self._workspace = Workspace(geometry, kernels, world, rank, rows)
        self._sums = Sums(kernels, self._link, max(chunk_rows, R_MAX * arena.lanes), geometry.hidden)
        self._sampler = Sampler(kernels, self._link, shares(geometry.vocab, exchange.world), BLOCK)
        self._columns = model.vocabulary.stop - model.vocabulary.start
        self._logits = kernels.empty((BLOCK, self._columns), "compute")
        self._lanes: list[Lane | None] = [None] * arena.lanes
        self._audit = audit
        self._term = 0
        self.inventory = Inventory(kernels, arena, key, audit)
        self._here = HereRows()
        self._split = Split(geometry, kernels, self._link, arena, chunk_rows, staging_rows) if arena.split else None

    def execute(self, round_: frames.Round) -> frames.RoundResult:
        """Runs a round. Raises LinkError when the link fails, EpochError naming round and operation for anything else."""
        start = time.perf_counter()
        if round_.term != self._term:
            self._begin(round_.term)
        results = []
        with np.errstate(over="ignore", invalid="ignore"):  # kernels.numpy.elementwise says why
            for number, operation in enumerate(round_.operations):
                try:
                    results.append(self._run(operation))
                except (ValueError, IndexError) as error:
                    kind = type(operation).__name__.lower()
                    raise EpochError(f"round {round_.seq}, operation {number} ({kind}): {error}") from error
                self._tick()
        exchange = self._link.take_seconds()
        seconds = time.perf_counter() - start - exchange
        return frames.RoundResult(round_.seq, results, seconds, exchange, self._link.take_sent())

    def _begin(self, term: int) -> None:
        """Another router begins: it knows of no lane and of no kept state."""
        self._term = term
        self.inventory.states.clear()
        for number, lane in enumerate(self._lanes):
            if lane is not None:
                self._lanes[number] = None
                self.arena.clear(number)

    def _run(self, operation: frames.Operation) -> frames.OperationResult:
        digest = Digest(type(operation).__name__)
        tokens: list[int] = []
        scores: frames.Scores | None = None
        rows_digest = 0
        match operation:
            case frames.Bind():
                self._bind(operation)
                digest.integers(operation.lane, operation.conversation, operation.seed, operation.top_k, operation.owner)
            case frames.Table():
                self.arena.map(operation.lane, operation.first_slot, operation.pages)
                digest.integers(operation.lane, operation.first_slot, *operation.pages)
            case frames.Prompt():
                tokens, scores, rows_digest = self._prompt(operation, digest)
            case frames.Decode():
                tokens, scores = self._decode(operation, digest)
            case frames.Free():
                self._lane(operation.lane)
                self._lanes[operation.lane] = None
                self.arena.clear(operation.lane)
                digest.integers(operation.lane)
            case frames.Borrow():
                self._lane(operation.lane)
                self.arena.borrow(operation.lane, operation.first_slot, operation.pages)
                digest.integers(operation.lane, operation.first_slot, *operation.pages)
            case frames.Release():
                self._lane(operation.lane)
                self.arena.release(operation.lane)
                digest.integers(operation.lane)
            case frames.Carry():
                rows_digest = self._carry(operation, digest)
            case frames.Keep():
                self._keep(operation)
                digest.integers(operation.lane, operation.state, operation.at, *operation.pages)
            case frames.Resume():
                self._resume(operation)
                digest.integers(operation.lane, operation.state, operation.at)
            case frames.Forget():
                self.inventory.forget(operation)
                digest.integers(*operation.states)
            case frames.Ping():
                pass
        digest.integers(*tokens)
        return frames.OperationResult(digest.value(), tokens, scores, rows_digest)

    # ---- operations --------------------------------------------------------------------------------------------

    def _bind(self, operation: frames.Bind) -> None:
        if not 0 <= operation.lane < len(self._lanes):
            raise ValueError(f"lane {operation.lane}: the plan has {len(self._lanes)}")
        if self._lanes[operation.lane] is not None:
            raise ValueError(f"lane {operation.lane} is taken")
        self.arena.clear(operation.lane, operation.owner)
        self._lanes[operation.lane] = Lane(
            operation.conversation, operation.temperature, operation.top_k, operation.seed, operation.top_p, operation.min_p
        )

    def _prompt(self, operation: frames.Prompt, digest: Digest) -> tuple[list[int], frames.Scores | None, int]:
        lane = self._runs(operation.lane)
        count = len(operation.tokens)
        if operation.start != lane.position or operation.start % BLOCK:
            raise ValueError(f"start {operation.start}: the lane is at {lane.position}, chunks start at multiples of {BLOCK}")
        if not 0 < count <= self._chunk_rows or (count % BLOCK and not operation.last):
            raise ValueError(f"{count} tokens: 1 to {self._chunk_rows}, a multiple of {BLOCK} unless the last chunk")
        self._check_tokens(operation.tokens)
        digest.integers(operation.lane, operation.start, operation.mode, *operation.tokens)
        audit = Audit() if self._audit and self._split is not None else None
        latent_rows = self._chunk_rows_of(operation, count, audit)
        batch = prompt_batch(self.arena, operation.lane, operation.start, operation.tokens, lane.parity)
        hidden = self._forward(batch, latent_rows, digest)
        lane.position += count

        rows_digest = audit.value() if audit is not None else 0
        scores = None
        if operation.logits:
            following = [*operation.tokens[1:], operation.following]
            scores = self._score(Path.PROMPT, hidden, following, operation.logits)
        if not operation.last:
            return [], scores, rows_digest
        block = (count - 1) // BLOCK * BLOCK
        self._model.logits(Path.PROMPT, hidden[block : block + BLOCK], self._logits)
        logits = self._logits[count - 1 - block : count - block]
        lane.last_token = int(self._sampler.sample(logits, self._draws([lane], [lane.position]))[0])
        if operation.log_probs:
            scores = self._join([self._score_rows(logits, [lane.last_token], operation.log_probs - 1)])
        return [lane.last_token], scores, rows_digest

    def _chunk_rows_of(self, operation: frames.Prompt, count: int, audit: Audit | None) -> LatentRows:
        """Where a chunk's latent rows are. Raises ValueError for a mode that does not fit the group or the lane."""
        if self._split is None:
            if operation.mode != frames.LOCAL:
                raise ValueError(f"mode {operation.mode} in a group that is not split")
            return self._here
        return self._split.chunk(operation, count, audit)

    def _decode(self, operation: frames.Decode, digest: Digest) -> tuple[list[int], frames.Scores | None]:
        lanes = [self._runs(number) for number in operation.lanes]
        width = operation.rows
        if len(set(operation.lanes)) != len(lanes) or not lanes:
            raise ValueError(f"lanes {operation.lanes}: at least one, each once")
        if not 1 <= width <= R_MAX:
            raise ValueError(f"{width} rows: 1 to {R_MAX}")
        fed = operation.forced or [lane.last_token for lane in lanes]
        if len(fed) != len(lanes) * width:
            raise ValueError(f"{len(fed)} tokens for {len(lanes)} lanes of {width} rows")
        self._check_tokens(fed)
        digest.integers(width, *operation.lanes, *fed)
        starts = [lane.position for lane in lanes]
        batch = decode_batch(self.arena, operation.lanes, starts, fed, width, [lane.parity for lane in lanes])
        latent_rows = self._here if self._split is None else self._split.decode(operation.lanes)
        hidden = self._forward(batch, latent_rows, digest)

        scores = None
        if operation.logits:
            scores = self._score(Path.DECODE, hidden, self._following(fed, operation.following, width), operation.logits)
        row_lanes = [lane for lane in lanes for _ in range(width)]
        draws = self._draws(row_lanes, [int(position) + 1 for position in batch.positions])
        tokens: list[int] = []
        sampled: list[frames.Scores] = []
        for first in range(0, batch.total, BLOCK):
            piece = slice(first, min(first + BLOCK, batch.total))
            logits = self._logits[: piece.stop - first]
            self._model.logits(Path.DECODE, hidden[piece], logits)
            drawn = self._sampler.sample(logits, draws[piece]).tolist()
            tokens += drawn
            if operation.log_probs:
                sampled.append(self._score_rows(logits, drawn, operation.log_probs - 1))
        if sampled:
            scores = self._join(sampled)
        for number, lane in enumerate(lanes):
            lane.position += width
            lane.replied = True
            lane.parity ^= 1
            lane.last_token = tokens[(number + 1) * width - 1]
        return tokens, scores

    def _carry(self, operation: frames.Carry, digest: Digest) -> int:
        lane = self._lane(operation.lane)
        if self._split is None:
            raise ValueError("nothing is carried in a group that is not split")
        carrying = lane.carrying or Carrying(operation.owner)
        self._split.carrier.check(operation, carrying, lane.position)
        digest.integers(operation.lane, operation.owner, operation.first_slot, operation.last, *operation.pages)
        rows_digest = self._split.carrier.slice(operation, lane.position)
        carrying.pages += operation.pages
        lane.carrying = carrying
        if operation.last:
            self.arena.remap(operation.lane, carrying.owner, carrying.pages)
            lane.carrying = None
        return rows_digest

    def _keep(self, operation: frames.Keep) -> None:
        lane = self._runs(operation.lane)
        if operation.at != lane.position or not lane.position or lane.position % BLOCK or lane.replied:
            path = "decode" if lane.replied else "prompt"
            raise ValueError(
                f"kept at {operation.at} where the lane is at {lane.position} on the {path} path: states are kept at multiples "
                f"of {BLOCK} on the prompt path"
            )
        self.inventory.keep(operation, 2 * operation.lane + lane.parity)

    def _resume(self, operation: frames.Resume) -> None:
        lane = self._runs(operation.lane)
        if lane.position:
            raise ValueError(f"lane {operation.lane} is at {lane.position}: a lane resumes before it runs anything")
        self.inventory.resume(operation, 2 * operation.lane + lane.parity)
        lane.position = operation.at

    # ---- parts -------------------------------------------------------------------------------------------------

    def _lane(self, number: int) -> Lane:
        lane = self._lanes[number] if 0 <= number < len(self._lanes) else None
        if lane is None:
            raise ValueError(f"lane {number} runs nothing")
        return lane

    def _runs(self, number: int) -> Lane:
        lane = self._lane(number)
        if lane.carrying is not None:
            raise ValueError(f"lane {number} is being carried to rank {lane.carrying.owner}")
        return lane

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if min(tokens) < 0 or max(tokens) >= self.geometry.vocab:
            raise ValueError(f"a token id is outside 0..{self.geometry.vocab - 1}")

    def _forward(self, batch: Batch, latent_rows: LatentRows, digest: Digest) -> Array:
        p = Pass(self.geometry, self._kernels, self.arena, self._workspace, self._sums, batch, digest, latent_rows, self._tick)
        return self._model.forward(p)

    @staticmethod
    def _draws(lanes: Sequence[Lane], positions: Sequence[int]) -> Draws:
        return Draws(
            np.array([lane.temperature for lane in lanes], np.float64),
            np.array([lane.top_k for lane in lanes], np.int32),
            np.array([lane.top_p for lane in lanes], np.float64),
            np.array([lane.min_p for lane in lanes], np.float64),
            np.array([lane.seed for lane in lanes], np.uint64),
            np.array(positions, np.uint64),
        )

    @staticmethod
    def _following(fed: Sequence[int], after: Sequence[int], width: int) -> list[int]:
        """The token after each row of the windows, -1 where it is unknown."""
        lasts = after or [-1] * (len(fed) // width)
        return [fed[row + 1] if (row + 1) % width else lasts[row // width] for row in range(len(fed))]

    def _score(self, path: Path, hidden: Array, following: Sequence[int], wanted: int) -> frames.Scores:
        """This rank's part of the scores of the first len(following) rows, block by block."""
        parts = []
        for first in range(0, len(following), BLOCK):
            part = following[first : first + BLOCK]
            fed = BLOCK if path is Path.PROMPT else len(part)
            self._model.logits(path, hidden[first : first + fed], self._logits[:fed])
            scores = self._score_rows(self._logits[: len(part)], part, 0)
            if wanted == RAW_LOGITS:
                scores.raw = self._kernels.host(self._logits[: len(part)]).tobytes()
            parts.append(scores)
        return self._join(parts)

    def _score_rows(self, logits: Array, following: Sequence[int], top: int) -> frames.Scores:
        """This rank's part of the scores of logits [T, V_r], with the `top` likeliest of its columns."""
        k, rows = self._kernels, len(following)
        best, sums = k.empty((rows,), "i32"), k.empty((rows,), "f64")
        largest, next_ = k.empty((rows,), "f32"), k.empty((rows,), "f32")
        targets = np.array(following, np.int32)
        k.score_rows(logits, self._model.vocabulary.start, targets, largest, sums, best, next_)
        ids, tops = self._sampler.best(logits, top) if top else (np.empty(0), np.empty(0))
        return frames.Scores(
            max=k.host(largest).tobytes(), sum=k.host(sums).tobytes(), best=k.host(best).astype(np.uint32).tobytes(),
            next=k.host(next_).tobytes(), raw=b"", top_ids=ids.tobytes(), top_logits=tops.tobytes(),
        )  # fmt: skip

    @staticmethod
    def _join(parts: Sequence[frames.Scores]) -> frames.Scores:
        """Scores of consecutive rows as one."""
        names = frames.Scores.__struct_fields__
        return frames.Scores(**{name: b"".join(getattr(part, name) for part in parts) for name in names})
