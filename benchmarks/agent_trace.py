"""What agents send, as a recorded trace, and how much of it a group resumes: the part of benchmarks/resume.py that plays it.

Prompts are as long as those of the released model, so they are played to engines that compute nothing: router, pool manager,
books, fronts and the engines' tables are the product's, and so is every decision. A reply is then a row of zeros.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import services.pool_manager.service as pool_manager
from kernels.rows import Array
from latentpool.cli.group import LocalGroup
from latentpool.client import AdminClient, Client
from latentpool.geometry import BLOCK, Geometry
from latentpool.sampling import Sampling
from latentpool.v1 import pool_admin_pb2, pool_manager_pb2, router_pb2
from services.pool_manager.kept import Kept, State
from services.rank_worker.model.model import Model
from services.router.kept import APART

ROOT = Path(__file__).resolve().parent.parent
REAL = ROOT / "tests" / "data" / "glm-5.3-flash"
WORLD, PAGE_ROWS, CONTEXT, LANES, KEEP_FROM = 2, 512, 32768, 8, 4096

RATIO = 58
"""Prompt tokens for each generated one."""
AGENTS, MESSAGES, SUB_AGENTS = 4, 2, 3
SYSTEM, BRIEF = 5600, 500
"""Tokens of system prompt and tools, which all have in common, and of what sub-agents of one agent are told alike."""
MESSAGE, RESULT = 200, 400
"""Medians of a user's message and of a tool's result."""
EDITED = 0.3
"""Messages that are asked first in other words."""
VOCAB = 1024


# ---- the trace ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and its reply. rewind: tokens before the newest user message."""

    name: str
    prompt: list[int]
    rewind: int
    reply: list[int]


class Author:
    """Draws messages and names requests; equal seeds write equal traces."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self._names = 0

    def text(self, median: int, spread: float = 0.7) -> list[int]:
        """Log-normal many random tokens, 16 to ten times the median; spread 0: just the median."""
        length = int(np.clip(median * np.exp(spread * self.draw.standard_normal()), 16, 10 * median))
        return [int(token) for token in self.draw.integers(1, VOCAB, length)]

    def ask(self, prompt: list[int], rewind: int) -> Ask:
        self._names += 1
        reply = self.text(round(len(prompt) / RATIO * np.exp(-0.125)), 0.5)  # the median, so that RATIO is the mean
        return Ask(f"ask-{self._names}", list(prompt), rewind, [0] * len(reply))


def trace(seed: int = 0) -> list[list[Ask]]:
    """Steps in order; what is in one step is sent at once. Agents take turns by chance."""
    author = Author(seed)
    system = author.text(SYSTEM, 0.0)
    live = [_agent(author, system) for _ in range(AGENTS)]
    steps = []
    while live:
        agent = live[author.draw.integers(len(live))]
        step = next(agent, None)
        if step is None:
            live.remove(agent)
        else:
            steps.append(step)
    return steps


def _agent(author: Author, system: list[int]) -> Iterator[list[Ask]]:
    """A user's messages, and after one of them sub-agents whose reports come back."""
    history = list(system)
    for message in range(MESSAGES):
        rewind = len(history)
        if author.draw.random() < EDITED:
            yield [author.ask(history + author.text(MESSAGE), rewind)]
        history += author.text(MESSAGE)
        yield from _works(author, history, rewind, int(author.draw.integers(1, 5)))
        if message == 0:
            brief = system + author.text(BRIEF, 0.0)
            begun = [brief + author.text(MESSAGE) for _ in range(SUB_AGENTS)]
            turns = int(author.draw.integers(1, 3))
            subs = [_works(author, one, len(brief), turns) for one in begun]
            for steps in zip(*subs, strict=True):
                yield [ask for step in steps for ask in step]
            history += author.text(SUB_AGENTS * MESSAGE)


def _works(author: Author, history: list[int], rewind: int, calls: int) -> Iterator[list[Ask]]:
    """Calls tools, then answers; the history grows."""
    for call in range(calls + 1):
        ask = author.ask(history, rewind)
        yield [ask]
        history += ask.reply + (author.text(RESULT) if call < calls else [])


def chain(tokens: Sequence[int]) -> list[int]:
    """Hashes of the beginnings of 0, 64, 128, ... tokens."""
    hashes = [0]
    for start in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        hashes.append(hash((hashes[-1], tuple(tokens[start : start + BLOCK]))))
    return hashes


def longest(hashes: Sequence[int], seen: Container[int]) -> int:
    """Tokens of the longest beginning that was seen."""
    return next((at * BLOCK for at in range(len(hashes) - 1, 0, -1) if hashes[at] in seen), 0)


def ideal(steps: Sequence[Sequence[Ask]]) -> dict[str, int]:
    """Tokens of each prompt that were seen before, in whole blocks, prompts and replies of earlier steps: at least one token is
    left to run."""
    seen: set[int] = set()
    best: dict[str, int] = {}
    for step in steps:
        best |= {ask.name: longest(chain(ask.prompt[:-1]), seen) for ask in step}
        for ask in step:
            seen.update(chain(ask.prompt + ask.reply))
    return best


def summary(steps: Sequence[Sequence[Ask]]) -> dict[str, Any]:
    asks = [ask for step in steps for ask in step]
    prompts, replies = sum(len(ask.prompt) for ask in asks), sum(len(ask.reply) for ask in asks)
    return {
        "requests": len(asks),
        "prompt_tokens": prompts,
        "generated_tokens": replies,
        "ratio": prompts / replies,
        "longest": max(len(ask.prompt + ask.reply) for ask in asks),
        "distinct_tokens": BLOCK * len({one for ask in asks for one in chain(ask.prompt + ask.reply)}),
        "ideal_hit_rate": sum(ideal(steps).values()) / prompts,
    }


# ---- playing it --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stand_in(pages: int, states: list[State]) -> Iterator[None]:
    """Groups that are made inside compute nothing, have so many pages on all ranks together, and give a state the pages that
    the released model's needs in bf16. `states`: gets every one that is granted."""
    manager: Any = pool_manager
    kept: Any = Kept
    model: Any = Model
    choose, fixed, add = manager.choose, manager.fixed_pages, kept.add
    forward, logits = model.forward, model.logits
    needed = fixed(Geometry.from_file(REAL).without_drafts(), WORLD, "bf16", "bf16", PAGE_ROWS)

    def capped(*arguments: Any, **named: Any) -> Any:
        return dataclasses.replace(choose(*arguments, **named), pages=pages, stream_pages=pages)

    def noted(self: Kept, state: State) -> None:
        states.append(state)
        add(self, state)

    def nothing(_self: Model, p: Any) -> Array:
        hidden: Array = p.take("hidden")
        hidden[...] = 0
        return hidden

    def level(_self: Model, _path: Any, _hidden: Array, out: Array) -> None:
        out[...] = 0

    manager.choose, manager.fixed_pages, kept.add = capped, lambda *_: needed, noted
    model.forward, model.logits = nothing, level
    try:
        yield
    finally:
        manager.choose, manager.fixed_pages, kept.add = choose, fixed, add
        model.forward, model.logits = forward, logits


async def play(model: Path, steps: Sequence[Sequence[Ask]], pages: int, keep_replies: bool) -> dict[str, Any]:
    """Step by step; the next one comes when nothing runs, idle work included, as if tools and users took long enough."""
    states: list[State] = []
    cached: dict[str, int] = {}
    ever: dict[str, int] = {}
    marks: dict[str, str] = {}
    asks = {ask.name: ask for step in steps for ask in step}
    kept: dict[int, str] = {}
    begun = time.perf_counter()
    with stand_in(pages, states):
        group = LocalGroup(
            model, WORLD, dtype="f32", context=CONTEXT, parallel=LANES, page_rows=PAGE_ROWS, memory_bytes=16 << 30, split="on",
            keep_from=KEEP_FROM, keep_replies=keep_replies,
        )  # fmt: skip
        async with group, AdminClient(group.manager.address) as admin:
            for step in steps:
                for state in states:
                    ask = asks[state.request_id]
                    kept.setdefault(chain((ask.prompt + ask.reply)[: state.at])[-1], mark(state))
                states.clear()
                for ask in step:
                    hashes = chain(ask.prompt[:-1])
                    ever[ask.name] = at = longest(hashes, kept)
                    marks[ask.name] = kept.get(hashes[at // BLOCK], "")
                found = await asyncio.gather(*(_send(group.client, ask) for ask in step))
                cached |= {ask.name: one for ask, one in zip(step, found, strict=True)}
                await _quiet(admin)
            listed = await admin.list_kept()
            counters = group.router._group._loop.counters  # type: ignore[union-attr]
    counts = {field.name: int(value) for field, value in listed.counts.ListFields()}
    idle = {"idle_fills": counters.idle_fills, "idle_dropped": counters.idle_dropped}
    return {"pages": pages, "keep_replies": keep_replies, "seconds": time.perf_counter() - begun, "counts": counts | idle} | {
        "hit_rate": sum(cached.values()) / sum(len(ask.prompt) for ask in asks.values()),
        "lost_tokens": losses(asks, ideal(steps), ever, marks, cached),
        "states": dict(Counter(map(mark, listed.kept))),
    }


async def _send(client: Client, ask: Ask) -> int:
    """Prompt tokens that were resumed."""
    reply: list[int] = []
    cached = 0
    sampling = Sampling(max_tokens=len(ask.reply), ignore_eos=True)
    async for event in client.generate(ask.prompt, sampling, rewind=ask.rewind, request_id=ask.name):
        if isinstance(event, router_pb2.Chunk):
            reply += event.token_ids
        elif isinstance(event, router_pb2.Completion):
            cached = event.usage.cached_tokens
    if reply != ask.reply:
        raise SystemExit(f"{ask.name}: the reply is not that of the trace")
    return cached


async def _quiet(admin: AdminClient) -> None:
    await asyncio.sleep(0.02)
    while await admin.list_conversations():  # noqa: ASYNC110 - the manager's state
        await asyncio.sleep(0.01)


def mark(state: State | pool_admin_pb2.KeptInfo) -> str:
    return pool_manager_pb2.Mark.Name(state.mark).removeprefix("MARK_").lower()


def losses(
    asks: dict[str, Ask], best: dict[str, int], ever: dict[str, int], marks: dict[str, str], cached: dict[str, int]
) -> dict[str, int]:
    """Tokens that were seen before and yet computed, by reason. short: nothing so short is kept; near: a state ended less than
    the distance of two marks (and a block) before; unmarked: none was kept there; gone: one was, and is not any more, by its
    mark."""
    lost: Counter[str] = Counter()
    for name in asks:
        missing = best[name] - ever[name]
        why = "short" if best[name] < KEEP_FROM else "near" if ever[name] and missing < APART + BLOCK else "unmarked"
        lost[why] += max(missing, 0)
        lost[f"gone {marks[name]}"] += max(ever[name] - cached[name], 0)
    return {why: count for why, count in sorted(lost.items()) if count}
