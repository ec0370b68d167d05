"""The round stream's rules: order, gaps, repeats, terms, reopening (design section 7)."""

import asyncio

import grpc
import pytest
from front_harness import EPOCH, FakeManager, Rounds, bind, group, make_worker, opened, until

from latentpool import net
from latentpool.v1 import pool_manager_pb2 as pb
from latentpool.v1 import rank_worker_pb2 as rw
from services.rank_worker import convert, frames
from services.rank_worker.exchange.inproc import Hub

FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture
async def serving(tmp_path):
    async with group(tmp_path) as (manager, worker):
        await manager.ready()
        yield manager, worker


async def dial(worker) -> Rounds:
    return Rounds(net.channel(worker.address))


async def refusal(rounds: Rounds, **opening) -> tuple[grpc.StatusCode, str]:
    await rounds.call.write(rw.RoundsRequest(open=rw.OpenRounds(**{"term": 1, "epoch": EPOCH, "key": b"key"} | opening)))
    return await rounds.refused()


async def test_rounds_are_answered_in_order_with_what_the_engine_said(serving):
    manager, worker = serving
    async with opened(worker, manager) as rounds:
        for seq in range(1, 6):
            await rounds.send(seq)
        results = [await rounds.result() for _ in range(5)]
        assert [result.seq for result in results] == [1, 2, 3, 4, 5]
        assert [result.results[0].digest for result in results] == [2**64 - seq for seq in range(1, 6)]
        assert (results[0].compute_seconds, results[0].exchange_seconds) == (0.5, 0.25)


async def test_only_rank_0_sends_tokens_but_every_rank_its_scores(tmp_path):
    async with group(tmp_path, rank=1, world=2) as (manager, worker):
        await manager.ready()
        async with opened(worker, manager) as rounds:
            decode = rw.Decode(lanes=[0], rows=1, logits=rw.LOGITS_RAW)
            await rounds.send(1, operations=[rw.Operation(decode=decode)])
            (result,) = (await rounds.result()).results
            assert list(result.tokens) == []
            assert result.scores.raw == b"raw"


async def test_a_gap_is_refused_with_numbers(serving):
    manager, worker = serving
    async with opened(worker, manager) as rounds:
        await rounds.send(1)
        await rounds.send(3)
        code, words = await rounds.refused()
        assert code is FAILED_PRECONDITION
        assert words == "round 3 leaves a gap: rank 0 has taken rounds up to 1"


async def test_a_repeat_is_answered_again_until_it_is_acknowledged(serving):
    manager, worker = serving
    async with opened(worker, manager) as rounds:
        await rounds.send(1)
        first = await rounds.result()
        await rounds.send(1)
        assert await rounds.result() == first
        await rounds.send(2, acknowledged=1)
        assert (await rounds.result()).seq == 2
        await rounds.send(1)
        await rounds.send(3)
        assert (await rounds.result()).seq == 3


async def test_a_repeat_of_a_running_round_is_run_and_answered_once(serving):
    manager, worker = serving
    async with opened(worker, manager) as rounds:
        await rounds.send(1, operations=[bind(seconds=1)])
        await rounds.send(1, operations=[bind(seconds=1)])
        await rounds.send(2)
        assert [(await rounds.result()).seq for _ in range(2)] == [1, 2]
        await rounds.call.done_writing()
        assert await rounds.call.read() is grpc.aio.EOF


async def test_a_router_that_closes_its_side_still_gets_what_it_is_owed(serving):
    manager, worker = serving
    async with opened(worker, manager) as rounds:
        await rounds.send(1, operations=[bind(seconds=1)])
        await rounds.call.done_writing()
        assert (await rounds.result()).seq == 1
        assert await rounds.call.read() is grpc.aio.EOF
        assert await rounds.call.code() is grpc.StatusCode.OK


async def test_a_reopened_stream_says_where_it_stands_and_answers_each_round_once_in_order(serving):
    manager, worker = serving
    async with opened(worker, manager) as broken:
        await broken.send(1)
        await broken.send(2)
        await broken.send(3, operations=[bind(seconds=1)])
        await until(lambda: worker._rounds._last_seq == 3)
        broken.call.cancel()
    for last_seq in (3, 4):  # first while round 3 runs, then with all results kept
        rounds = await dial(worker)
        assert await rounds.open() == last_seq
        for seq in (2, 3, 4):
            await rounds.send(seq)
        assert [(await rounds.result()).seq for _ in range(3)] == [2, 3, 4]
        await rounds.call.done_writing()
        assert await rounds.call.read() is grpc.aio.EOF


async def test_a_stream_is_given_nothing_before_it_asks(serving):
    manager, worker = serving
    async with opened(worker, manager) as broken:
        await broken.send(1)
        await broken.send(2, operations=[bind(seconds=1)])
        assert (await broken.result()).seq == 1
        broken.call.cancel()
    rounds = await dial(worker)
    assert await rounds.open() == 2
    await until(lambda: 2 in worker._rounds._kept)  # what an engine answers meanwhile is kept for whoever asks
    for seq in (2, 3):
        await rounds.send(seq)
    assert [(await rounds.result()).seq for _ in range(2)] == [2, 3]
    await rounds.call.done_writing()
    assert await rounds.call.read() is grpc.aio.EOF


async def test_a_second_stream_of_a_term_takes_over(serving):
    manager, worker = serving
    async with opened(worker, manager) as first:
        second = await dial(worker)
        assert await second.open() == 0
        assert (await first.refused())[0] is grpc.StatusCode.ABORTED
        await second.send(1)
        assert (await second.result()).seq == 1


async def test_a_newer_term_ends_the_older_stream_and_starts_at_1(serving):
    manager, worker = serving
    async with opened(worker, manager, term=3) as old:
        await old.send(1, term=3, operations=[bind(seconds=1), bind(seconds=0)])
        await until(lambda: worker._rounds._last_seq == 1)
        async with opened(worker, manager, term=4) as new:
            assert await old.refused() == (FAILED_PRECONDITION, "term 3 is over: term 4 was granted since")
            await new.send(1, term=4)
            # The old round of the same seq ends first; its two results are nobody's.
            assert len((await new.result()).results) == 1
            assert await refusal(await dial(worker), term=3) == (
                FAILED_PRECONDITION,
                "term 3 is over: term 4 was granted since",
            )
            await new.send(2, term=3)
            code, words = await new.refused()
            assert code is FAILED_PRECONDITION
            assert "round 2 is of term 3, epoch 7: this stream is of term 4, epoch 7" in words


async def test_a_stream_waits_for_the_managers_word_of_its_term(serving):
    manager, worker = serving
    rounds = await dial(worker)
    opening = asyncio.create_task(rounds.open(term=1))
    await asyncio.sleep(0.3)
    assert not opening.done()
    manager.say(term=pb.TermGranted(term=1, key=b"key"))
    assert await asyncio.wait_for(opening, 10) == 0


async def test_openings_that_are_refused(serving, monkeypatch):
    monkeypatch.setattr("services.rank_worker.round_stream._GRANT_PATIENCE", 0.1)
    manager, worker = serving
    denied = grpc.StatusCode.PERMISSION_DENIED
    assert await refusal(await dial(worker)) == (denied, "term 1 was not granted: the highest that rank 0 knows is 0")
    manager.say(term=pb.TermGranted(term=1, key=b"key"))
    await until(lambda: worker._rounds._granted.term == 1)
    assert await refusal(await dial(worker), key=b"guess") == (denied, "the key is not the one granted for term 1")
    assert await refusal(await dial(worker), epoch=6) == (FAILED_PRECONDITION, "rank 0 is in epoch 7, not 6")
    rounds = await dial(worker)
    await rounds.send(1)
    assert (await rounds.refused())[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_term_without_a_key_opens_nothing(serving):
    _, worker = serving
    assert (await refusal(await dial(worker), term=0, key=b""))[0] is grpc.StatusCode.PERMISSION_DENIED


async def test_before_ready_the_stream_is_refused_as_unavailable(tmp_path):
    async with group(tmp_path, FakeManager(lay_out=False)) as (manager, worker):
        await manager.hear("loaded")
        code, words = await refusal(await dial(worker))
        assert (code, words) == (grpc.StatusCode.UNAVAILABLE, "rank 0 is not ready yet")


async def test_an_operation_that_holds_nothing_is_named(serving):
    manager, worker = serving
    async with opened(worker, manager) as rounds:
        await rounds.send(1, operations=[rw.Operation(ping=rw.Ping()), rw.Operation()])
        code, words = await rounds.refused()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "round 1, operation 2 is empty" in words


def test_every_operation_reaches_the_engine_whole():
    operations = [
        rw.Operation(
            bind=rw.Bind(lane=1, conversation=2**63, temperature=0.5, top_k=9, seed=2**64 - 1, top_p=0.75, min_p=0.25)
        ),
        rw.Operation(table=rw.Table(lane=1, first_slot=4, pages=[7, 9])),
        rw.Operation(prompt=rw.Prompt(lane=1, start=64, tokens=[5, 6], last=True, logits=rw.LOGITS_SCORES)),
        rw.Operation(decode=rw.Decode(lanes=[1, 0], rows=2, forced=[1, 2, 3, 4], logits=rw.LOGITS_RAW)),
        rw.Operation(free=rw.Free(lane=1)),
        rw.Operation(ping=rw.Ping()),
    ]
    frame = convert.round_to_frame(rw.Round(term=3, epoch=4, seq=5, acknowledged_seq=2, operations=operations))
    assert frames.decode_to_engine(frames.encode(frame)[4:]) == frames.Round(
        term=3,
        epoch=4,
        seq=5,
        operations=[
            frames.Bind(1, 2**63, 0.5, 9, 2**64 - 1, top_p=0.75, min_p=0.25),
            frames.Table(1, 4, [7, 9]),
            frames.Prompt(1, 64, [5, 6], True, 1),
            frames.Decode([1, 0], 2, [1, 2, 3, 4], 2),
            frames.Free(1),
            frames.Ping(),
        ],
    )


async def test_a_thread_engine_needs_a_hub_and_only_it(tmp_path):
    with pytest.raises(ValueError, match="hub"):
        make_worker(tmp_path, "127.0.0.1:1", Hub(1), transport="ucx")
