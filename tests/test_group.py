"""A whole group: router, pool manager and rank workers, over the in-process exchange and over UCX."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import oracle
from many import settled

from latentpool.cli.group import LocalGroup
from latentpool.client import AdminClient
from latentpool.errors import EpochError
from latentpool.sampling import Sampling
from latentpool.v1 import rank_worker_pb2, router_pb2
from services.router import digests

MODEL, EXPECTED = oracle("tiny")
PROMPT = EXPECTED["input_ids"].tolist()
GREEDY = EXPECTED["greedy.ids"].tolist()


async def reply(
    group: LocalGroup, prompt: list[int] = PROMPT, heard: list[int] | None = None, **sampling: Any
) -> tuple[list[int], router_pb2.Completion]:
    """Token ids of a reply (appended to `heard` as they come) and its completion."""
    ids = [] if heard is None else heard
    async for event in group.client.generate(prompt, Sampling(**({"max_tokens": 32, "ignore_eos": True} | sampling))):
        if isinstance(event, router_pb2.Chunk):
            assert event.first_index == len(ids)
            ids += event.token_ids
        elif isinstance(event, router_pb2.Completion):
            return ids, event
    raise AssertionError("a stream without completion")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kv_pages", ["on", "off"])
async def test_replies_are_the_references_and_everything_comes_back(world: int, kv_pages: Any) -> None:
    async with LocalGroup(MODEL, world, kv_pages=kv_pages, context=512, parallel=3, page_rows=64, dtype="f32") as group:
        alone, completion = await reply(group)
        assert alone == GREEDY
        assert completion.usage.prompt_tokens == len(PROMPT)
        assert completion.usage.generated_tokens == 32
        crowd = await asyncio.gather(*(reply(group, PROMPT[i:] if i else PROMPT) for i in range(7)))
        assert crowd[0][0] == GREEDY
        assert crowd[0][1].receipt == completion.receipt
        await settled(group)


async def _round_digests(monkeypatch: pytest.MonkeyPatch, transport: Any) -> tuple[list[int], list[int], list[int | None]]:
    """Digests of all operations of a reply, the reply, and the engines' process ids."""
    seen: list[int] = []
    compare = digests.compare

    def watch(round_: rank_worker_pb2.Round, results: Any) -> None:
        for operation, result in zip(round_.operations, results[0].results, strict=True):
            if operation.WhichOneof("operation") in ("bind", "table", "prompt", "decode"):
                seen.append(result.digest)  # when a lane is freed, and whether that is still seen here, is a matter of time
        compare(round_, results)

    monkeypatch.setattr(digests, "compare", watch)
    async with LocalGroup(MODEL, 2, transport=transport, context=512, page_rows=64, dtype="f32") as group:
        ids, _ = await reply(group, seed=1)
        pids = [worker.engine_pid for worker in group.workers]
    monkeypatch.undo()
    return seen, ids, pids


async def test_digests_over_ucx_equal_the_in_process_ones_and_no_engine_shares_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inproc, ids, threads = await _round_digests(monkeypatch, "inproc")
    ucx, ids_ucx, children = await _round_digests(monkeypatch, "ucx")
    assert ids == ids_ucx == GREEDY
    assert len(inproc) >= 32
    assert inproc == ucx
    assert threads == [None, None]
    assert None not in children
    assert len(set(children)) == 2  # processes of their own: no array is shared


@pytest.mark.parametrize(
    ("world", "split", "faulty"),
    [
        pytest.param(2, "off", 1, marks=pytest.mark.full),
        (3, "off", 2),
        (2, "on", 0),
        pytest.param(3, "on", 0, marks=pytest.mark.full),
    ],
)
async def test_one_flipped_bit_is_caught_at_run_time_and_named(
    monkeypatch: pytest.MonkeyPatch, world: int, split: Any, faulty: int
) -> None:
    """One engine flips one bit of one row that it keeps, once (rank 0 owns the only conversation of a split group): the stream
    ends before the token of that round is delivered."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    settings: dict[str, Any] = {"transport": "ucx", "context": 2048, "page_rows": 64, "dtype": "f32", "split": split}
    async with LocalGroup(MODEL, world, engines={faulty: "flipping_engine"}, **settings) as group:
        ids: list[int] = []
        with pytest.raises(EpochError) as caught:
            await reply(group, heard=ids)
        others = ", ".join(str(rank) for rank in range(world) if rank != faulty)
        assert "(decode)" in str(caught.value)
        assert f"rank {faulty} " in str(caught.value) or str(caught.value).endswith(f"rank {faulty}")
        assert others in str(caught.value)
        assert ids == GREEDY[: len(ids)]
        assert len(ids) == 5  # the prompt's token and four clean decodes; the fifth decode wrote the wrong row
        failure = await group.failed()
        assert f"rank {faulty}" in str(failure)


async def test_resident_memory_is_what_the_ledger_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that touch every page of their arena: what they keep in memory then is what they kept after loading, and the
    ledger's streams, lanes and cache; the budget holds."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    budget = 400 << 20
    settings: dict[str, Any] = {"transport": "ucx", "context": 4096, "parallel": 8, "memory_bytes": budget, "split": "on"}
    group = LocalGroup(MODEL, 2, engines=dict.fromkeys(range(2), "touching_engine"), **settings)
    async with group, AdminClient(group.manager.address) as admin:
        plan = await admin.get_plan()
        assert plan.split
        for _ in range(100):
            ranks = (await admin.get_ranks()).ranks
            if min(rank.resident_bytes for rank in ranks) > budget // 4:
                break
            await asyncio.sleep(0.1)  # a heartbeat brings the number
        for ledger, rank in zip(plan.ledgers, ranks, strict=True):
            charged = ledger.stream_bytes + ledger.cache_bytes + ledger.lane_bytes
            assert charged + ledger.unused_bytes == ledger.room_bytes
            assert charged > budget // 4
            loaded = budget - ledger.room_bytes  # what was resident after loading, and the charges for work
            assert charged - (4 << 20) <= rank.resident_bytes <= min(charged + loaded, budget)


async def test_sampled_replies_repeat_with_their_reported_seed() -> None:
    async with LocalGroup(MODEL, 2, context=512, page_rows=64, dtype="f32") as group:
        first, completion = await reply(group, temperature=1.5, top_k=40)
        again, repeated = await reply(group, temperature=1.5, top_k=40, seed=completion.seed)
        assert again == first
        assert repeated.receipt == completion.receipt
        other, _ = await reply(group, temperature=1.5, top_k=40, seed=completion.seed ^ 1)
        assert other != first


async def test_scores_without_raw_logits_are_those_of_the_logits() -> None:
    """Log-probabilities against the reference's logits, across chunk and window borders."""
    logits = EXPECTED["logits"].astype(np.float64)
    log_probs = (
        logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(1, keepdims=True)
    )
    expected = [log_probs[i, token] for i, token in enumerate(PROMPT[1:])]
    async with LocalGroup(MODEL, 2, context=512, page_rows=64, chunk_rows=64, dtype="f32") as group:
        for decode_from in (None, 20):
            scored: list[float] = []
            async for event in group.client.score(PROMPT, decode_from=decode_from):
                scored += event.next_log_probs if isinstance(event, router_pb2.ScoredRows) else []
            assert np.isnan(scored[-1])
            np.testing.assert_allclose(scored[:-1], expected, atol=2e-3)
