"""Many conversations at once, each exactly as if alone: run-ahead, late stops, parking and replay, resent rounds, classes. The
fakes predict every reply, and see every rule that a round breaks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest
from router_fake_model import fold, logits, reply
from router_fakes import Rig
from test_router_ends import chunks, start

from latentpool.client import Client
from latentpool.errors import LatentPoolError, ReplayError
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2

pytestmark = pytest.mark.timeout(60)

PROMPT = list(range(100))


def longer(count: int, **options: Any) -> Sampling:
    return Sampling(max_tokens=count, ignore_eos=True, **options)


# ---- run-ahead ------------------------------------------------------------------------------------------------------


async def test_rounds_run_ahead_of_answers_and_late_stops_are_discarded() -> None:
    said = reply(PROMPT, 40)
    stop = next(token for i, token in enumerate(said) if i >= 12 and token not in said[:i])
    count = said.index(stop) + 1
    async with Rig(2) as rig:
        for worker in rig.workers:
            worker.pause = 0.004
        await rig.client.wait_ready(10)
        task, events = start(rig, PROMPT, longer(40, stop_token_ids=(stop,)))
        await task
        assert chunks(events) == said[:count]
        assert events[-1].finish_reason == router_pb2.FINISH_REASON_STOP
        assert events[-1].usage.generated_tokens == count
        counters = rig.loop.counters
        assert counters.late_stops == 1
        assert counters.run_ahead_rounds >= count - 1
        await rig.until(rig.at_rest, "not freed")
        assert counters.decode_rows == count  # one more than the reply needed


async def test_a_reply_that_ends_by_its_length_is_not_run_past_it() -> None:
    async with Rig(1) as rig:
        rig.workers[0].pause = 0.004
        await rig.client.wait_ready(10)
        task, events = start(rig, PROMPT, longer(12))
        await task
        await rig.until(rig.at_rest, "not freed")
        assert chunks(events) == reply(PROMPT, 12)
        counters = rig.loop.counters
        assert (counters.decode_rows, counters.late_stops) == (11, 0)
        assert counters.run_ahead_rounds >= 10


async def test_log_probs_are_of_each_replys_own_rows() -> None:
    async with Rig(3, lanes=4) as rig:
        await rig.client.wait_ready(10)
        tops = (None, 0, 3, 5)
        runs = [start(rig, PROMPT[i:], longer(20, log_probs=top)) for i, top in enumerate(tops)]
        await asyncio.gather(*(task for task, _ in runs))
        for i, (top, (_, events)) in enumerate(zip(tops, runs, strict=True)):
            told = [p for e in events if isinstance(e, router_pb2.Chunk) for p in e.log_probs]
            said = reply(PROMPT[i:], 20)
            assert chunks(events) == said
            if top is None:
                assert told == []
                continue
            state = fold(0, PROMPT[i:])
            for token, log_prob in zip(said, told, strict=True):
                row = logits(state).astype(np.float64)
                row -= np.log(np.exp(row).sum())
                assert log_prob.log_prob == pytest.approx(row[token], abs=1e-6)
                assert list(log_prob.top_ids) == np.argsort(-row, kind="stable")[:top].tolist()
                state = fold(state, [token])


async def says(rig: Rig, prompt: list[int], sampling: Sampling, tokens: int = 0) -> tuple[asyncio.Task[None], list[Any]]:
    """The first conversation. Rounds stand still from when it has said more than so many tokens: whoever comes next meets it
    there, however slow clients are."""
    old = start(rig, prompt, sampling)
    await every_turn(rig, lambda: any(c.id == 1 and len(c.generated) > tokens for c in rig.loop.book))
    return old


async def comes(rig: Rig) -> None:
    """The second conversation is there, and rounds go on."""
    await rig.until(lambda: any(c.id == 2 for c in rig.loop.book), "the second does not come")
    rig.gates(True)


# ---- parking --------------------------------------------------------------------------------------------------------


async def test_the_youngest_is_parked_and_both_finish_as_if_alone() -> None:
    async with Rig(2, lanes=2, context=1024, pages=12) as rig:
        await rig.client.wait_ready(10)
        old, old_events = await says(rig, PROMPT, longer(600))
        young, young_events = start(rig, PROMPT[:70], longer(600))
        await comes(rig)
        await asyncio.gather(old, young)
        assert chunks(old_events) == reply(PROMPT, 600)
        assert chunks(young_events) == reply(PROMPT[:70], 600)
        assert old_events[-1].usage.parked == 0
        assert young_events[-1].usage.parked == rig.loop.counters.parked > 0
        assert rig.loop.counters.replayed_tokens > 0
        index = 0  # nothing is sent again
        for event in young_events:
            if isinstance(event, router_pb2.Chunk):
                assert event.first_index == index
                index += len(event.token_ids)
        returns = [admit for admit in rig.manager.admits if admit.returning]
        assert len(returns) == rig.loop.counters.parked
        assert all(admit.prompt_tokens + admit.max_tokens == 670 for admit in returns)


async def test_a_score_that_is_parked_goes_on_without_telling_a_row_again() -> None:
    async with Rig(2, lanes=2, context=1024, pages=16, chunk_rows=64) as rig:
        for worker in rig.workers:
            worker.pause = 0.002
        await rig.client.wait_ready(10)
        old, events = await says(rig, PROMPT, longer(800), 100)
        prompt = [i * 5 % 240 for i in range(400)]
        coming = asyncio.create_task(comes(rig))
        scored = [event async for event in rig.client.score(prompt, decode_from=150)]
        await coming
        best, at = [], 0
        for event in scored:
            if isinstance(event, router_pb2.ScoredRows):
                assert event.first_position == at
                best += event.best_ids
                at += len(event.best_ids)
        assert best == [reply(prompt[: n + 1], 1)[0] for n in range(len(prompt))]
        assert scored[-1].usage.parked > 0
        await old
        assert chunks(events) == reply(PROMPT, 800)


async def test_a_replay_that_differs_ends_with_data_loss() -> None:
    async with Rig(2, lanes=2, context=1024, pages=12) as rig:
        for worker in rig.workers:
            worker.forget = True
        await rig.client.wait_ready(10)
        old, old_events = await says(rig, PROMPT, longer(400))
        young, young_events = start(rig, PROMPT[:70], longer(600))
        await comes(rig)
        with pytest.raises(ReplayError, match=r"token \d+ of the reply is \d+ when it is computed again after parking"):
            await young
        said = chunks(young_events)
        assert said == reply(PROMPT[:70], len(said))  # and nothing wrong was told
        await old
        assert chunks(old_events) == reply(PROMPT, 400)
        for worker in rig.workers:
            worker.violations.clear()  # the forgetful lane saw that it was fed what it did not sample


@pytest.mark.parametrize("how", ["cancel", pytest.param("deadline", marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", ["leaving", "parked", "waiting for pages", "replaying"])
async def test_a_client_that_goes_away_while_parked_frees_everything(stage: str, how: str) -> None:
    async with Rig(2, lanes=2, context=1024, pages=12) as rig:
        for worker in rig.workers:
            worker.pause = 0.001
        await rig.client.wait_ready(10)
        old, old_events = await says(rig, PROMPT, longer(600))
        client = Client(rig.router.address)
        book = rig.loop.book
        count = 0

        async def consume() -> None:
            nonlocal count
            async for event in client.generate(PROMPT[:70], longer(600), timeout=1.5 if how == "deadline" else None):
                count += len(chunks([event]))

        task = asyncio.create_task(consume())
        await comes(rig)
        await rig.until(lambda: count, "the second does not run")
        (young,) = [c for c in book if c.id == 2]
        other = None
        if stage == "parked":  # its lane is taken by another when it comes free
            other, _ = start(rig, PROMPT[:30], longer(300))
        reached = {
            "leaving": lambda: young.leaving and young.phase.value == "parked",
            "parked": lambda: young.lane < 0 and young.parked,
            "waiting for pages": lambda: young.parked and young.lane >= 0 and not young.runs,
            "replaying": lambda: young.runs and 0 < young.sent < young.replay_rows,
        }[stage]
        if stage in ("leaving", "replaying"):
            await every_turn(rig, reached)
        else:
            await rig.until(lambda: reached() or young.phase.value == "ended", f"not {stage}")
        if how == "cancel":
            task.cancel()
        await rig.until(lambda: young not in list(book), "the router keeps it", 3.0)
        rig.gates(True)
        with contextlib.suppress(asyncio.CancelledError, LatentPoolError):
            await task
        await client.close()
        await old
        assert chunks(old_events) == reply(PROMPT, 600)
        if other is not None:
            await other


async def every_turn(rig: Rig, reached: Any) -> None:
    """Stops all rounds in the very turn of the event loop in which a stage is reached."""
    async with asyncio.timeout(10):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0)
    rig.gates(False)


# ---- resent rounds -----------------------------------------------------------------------------------------------------


async def test_broken_streams_are_opened_again_and_rounds_run_once() -> None:
    async with Rig(3, lanes=3) as rig:
        await rig.client.wait_ready(10)
        for worker in rig.workers:
            worker.breaks = 0.1
        runs = [start(rig, PROMPT[i:], longer(80)) for i in range(3)]
        await asyncio.gather(*(task for task, _ in runs))
        for i, (_, events) in enumerate(runs):
            assert chunks(events) == reply(PROMPT[i:], 80)
        assert all(worker.broken > 3 for worker in rig.workers)
        assert rig.loop.counters.resent_rounds >= sum(worker.repeats for worker in rig.workers) > 0
        for worker in rig.workers:
            worker.breaks = 0.0


async def test_a_cancelled_call_is_one_more_broken_stream() -> None:
    async with Rig(2) as rig:
        for worker in rig.workers:
            worker.pause = 0.001
        await rig.client.wait_ready(10)
        task, events = start(rig, PROMPT, longer(200))
        streams = rig.loop._workers._streams
        for i in range(12):
            count = len(chunks(events))
            await rig.until(lambda count=count: len(chunks(events)) > count, "it does not go on")
            if (call := streams[i % 2]._call) is not None:
                call.cancel()
        await task
        assert chunks(events) == reply(PROMPT, 200)
        assert rig.loop.counters.resent_rounds > 0


# ---- classes -----------------------------------------------------------------------------------------------------------


async def test_the_foreground_is_served_before_the_background() -> None:
    async with Rig(1, lanes=1) as rig:
        rig.workers[0].pause = 0.002
        await rig.client.wait_ready(10)
        first, events = start(rig, PROMPT, longer(60))
        await rig.until(lambda: chunks(events), "the first does not run")
        runs: list[asyncio.Task[Any]] = []
        for name, priority in (("b1", "background"), ("f1", "foreground"), ("b2", "background"), ("f2", "foreground")):
            value = getattr(router_pb2, f"PRIORITY_{priority.upper()}")
            request = router_pb2.GenerateRequest(
                request_id=name, token_ids=router_pb2.TokenIds(ids=PROMPT), sampling=longer(5).to_proto(), priority=value
            )
            call = rig.client._stub.Generate(request)
            runs.append(asyncio.create_task(_all(call)))
            await rig.until(lambda: len(rig.loop.book.queue) == len(runs), "not queued")
        await asyncio.gather(first, *runs)
        assert [admit.request_id for admit in rig.manager.admits][1:] == ["f1", "f2", "b1", "b2"]
        assert [admit.background for admit in rig.manager.admits][1:] == [False, False, True, True]


async def _all(call: Any) -> list[Any]:
    return [event async for event in call]


# ---- all of it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))])
async def test_a_crowd_under_every_disturbance_gets_the_replies_it_would_get_alone(seed: int) -> None:
    random = np.random.default_rng(seed)
    lanes = int(random.integers(3, 7))
    async with Rig(2, lanes=lanes, context=1024, pages=12, chunk_rows=int(random.choice([64, 128, 512]))) as rig:
        for worker in rig.workers:
            worker.pause = 0.001
            worker.breaks = 0.01
        rig.manager.late = 0.003
        await rig.client.wait_ready(10)

        async def one(i: int) -> None:
            prompt = random.integers(0, 240, random.integers(2, 400)).tolist()
            count = int(random.integers(1, 200))
            leaves = float(random.random()) * 1.5 if i % 5 == 1 else None
            await asyncio.sleep(random.random() * 0.5)
            if i % 6 == 0:
                events = [e async for e in rig.client.score(prompt, decode_from=1 + len(prompt) // 2)]
                best = [b for part in events if isinstance(part, router_pb2.ScoredRows) for b in part.best_ids]
                assert best == [reply(prompt[: n + 1], 1)[0] for n in range(len(prompt))]
                return
            said = reply(prompt, count)
            stop = said[-1] if i % 4 == 0 and said[-1] not in said[:-1] else None
            sampling = longer(count + 50 if stop is not None else count, stop_token_ids=() if stop is None else (stop,))
            got: list[int] = []
            try:
                async with asyncio.timeout(leaves):
                    async for event in rig.client.generate(prompt, sampling):
                        got += chunks([event])
            except TimeoutError:
                assert got == said[: len(got)]
                return
            assert got == said

        await asyncio.gather(*(one(i) for i in range(40)))
        for worker in rig.workers:
            worker.breaks = 0.0
        counters = rig.loop.counters
        assert counters.parked > 0
        assert counters.replayed_tokens > 0
        assert counters.late_stops > 0
        assert counters.resent_rounds > 0
        assert counters.run_ahead_rounds > counters.rounds / 2
