"""E2 of the exactness contract on whole groups: alone = in company, whatever happens around a conversation.

`long_kpool16` is the model: rows past position 79 drop tokens in selection, so most rows of the long prompts are sparse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from many import (
    CONTEXT,
    GEOMETRY,
    MODEL,
    PAGE_ROWS,
    Record,
    Reply,
    Script,
    cap_pages,
    park_any,
    play,
    play_all,
    same,
    scripts,
    settled,
    workers_of,
)

from latentpool.cli.group import LocalGroup
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2, router_pb2_grpc
from services.rank_worker.link import Channel
from services.rank_worker.round_stream import _RefusedError
from services.rank_worker.rounds import Rounds
from services.router import loop
from services.router.counters import Counters

pytestmark = pytest.mark.timeout(400)

WORLDS = [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)]


async def alone(world: int, conversations: list[Script]) -> tuple[dict[int, Reply], dict[tuple[int, int, int], bytes]]:
    """Every conversation to its end, one after another in one lane; and the rows they were drawn from."""
    with pytest.MonkeyPatch.context() as patch:
        record = Record(patch)
        async with LocalGroup(MODEL, world, context=CONTEXT, page_rows=PAGE_ROWS, dtype="f32") as group:
            replies = {}
            for script in conversations:
                unhurried = Script(script.prompt, script.sampling)
                replies[script.seed] = await play(group, unhurried)
    return replies, record.rows


async def company(
    world: int, conversations: list[Script], *, pages: int, disturb: Callable[[LocalGroup], Any] | None = None, **settings: Any
) -> tuple[dict[int, Reply], Record, Counters]:
    """All of them at once; `disturb(group)` is awaited again and again meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        record = Record(patch)
        cap_pages(patch, pages)
        base: dict[str, Any] = {"context": CONTEXT, "page_rows": PAGE_ROWS, "dtype": "f32", "kv_pages": "on", "split": "off"}
        async with LocalGroup(MODEL, world, **(base | settings)) as group:
            replies = await play_all(group, conversations, (lambda: disturb(group)) if disturb else None)
            await settled(group)
            counters = workers_of(group).counters
    return replies, record, counters


def compare(
    conversations: list[Script], replies: dict[int, Reply], rows: dict[tuple[int, int, int], bytes],
    reference: dict[int, Reply], reference_rows: dict[tuple[int, int, int], bytes],
) -> None:  # fmt: skip
    for script in conversations:
        same(replies[script.seed], reference[script.seed], script)
    wrong = [key for key, bits in rows.items() if key in reference_rows and reference_rows[key] != bits]
    assert wrong == []
    assert len(rows.keys() & reference_rows.keys()) > len(conversations)


async def break_streams(group: LocalGroup) -> None:
    """A front drops its round stream, one rank after another, as a network would: the router opens it again and sends
    unanswered rounds again."""
    rank = 0
    while True:
        await asyncio.sleep(0.1)
        rank = (rank + 1) % len(group.workers)
        group.workers[rank]._rounds._replace_stream(None, _RefusedError(grpc.StatusCode.UNAVAILABLE, "the test cut the line"))


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 3])
async def test_forty_conversations_each_as_if_alone(world: int) -> None:
    """Random arrivals, lanes and chunk limits, cancels, slow readers, parking, broken streams: equal bits for each."""
    conversations = scripts(40)
    reference, reference_rows = await alone(world, conversations)
    sparse = sum(position >= GEOMETRY.list_length for script in conversations for position in range(len(script.prompt)))
    assert sparse > 1000

    total = Counters()
    variants: list[dict[str, Any]] = [
        {"pages": 400, "parallel": 12, "chunk_rows": 128},
        {"pages": 36, "parallel": 5, "chunk_rows": 2048, "headroom": 16, "disturb": break_streams},
        {"pages": 29, "parallel": 12, "chunk_rows": 64, "headroom": 1, "disturb": park_any},
    ]
    for variant in variants:
        replies, record, counters = await company(world, conversations, **variant)
        compare(conversations, replies, record.rows, reference, reference_rows)
        for name in Counters.__slots__:
            setattr(total, name, getattr(total, name) + getattr(counters, name))
    assert total.run_ahead_rounds > total.rounds // 4
    assert total.late_stops > 0
    assert total.parked > 0
    assert total.resent_rounds > 0


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("dtype", "kv_cache"), [("bf16", "bf16"), ("f32", "bf16")])
async def test_the_other_dtypes(world: int, dtype: Any, kv_cache: Any) -> None:
    conversations = scripts(10, seed=11, spread=0.5, quick=True)
    settings: dict[str, Any] = {"dtype": dtype, "kv_cache": kv_cache}
    reference, reference_rows = await company_of_one(world, conversations, settings)
    replies, record, counters = await company(world, conversations, pages=40, parallel=5, headroom=4, **settings)
    compare(conversations, replies, record.rows, reference, reference_rows)
    assert counters.run_ahead_rounds > 0


async def company_of_one(
    world: int, conversations: list[Script], settings: dict[str, Any]
) -> tuple[dict[int, Reply], dict[tuple[int, int, int], bytes]]:
    with pytest.MonkeyPatch.context() as patch:
        record = Record(patch)
        async with LocalGroup(MODEL, world, context=CONTEXT, page_rows=PAGE_ROWS, **settings) as group:
            replies = {s.seed: await play(group, Script(s.prompt, s.sampling)) for s in conversations}
    return replies, record.rows


@pytest.mark.full
@pytest.mark.parametrize("world", WORLDS)
async def test_eight_lanes_outgrow_their_quota_together_and_all_finish(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight replies of 160 tokens after prompts with sparse rows, in a pool that holds four of them: some are parked in the
    middle of their reply, replayed, and all are done in the end, each as if alone."""
    monkeypatch.setattr(loop, "AHEAD_ROWS", 16)  # pages are asked for late, so that pages run out in mid-reply
    conversations = [
        Script(tuple((7 * i + 3 * j) % 240 for j in range(100 + i)), Sampling(seed=i, max_tokens=160, ignore_eos=True))
        for i in range(8)
    ]
    reference, rows = await alone(world, conversations)
    replies, record, counters = await company(world, conversations, pages=24, parallel=8, headroom=1, context=448)
    compare(conversations, replies, record.rows, reference, rows)
    assert counters.parked >= 3
    assert counters.replayed_tokens > 30
    assert record.again >= world * counters.replayed_tokens  # drawn from again, and equal; rows in flight when parked too
    assert sum(reply.completion.usage.parked for reply in replies.values() if reply.completion) == counters.parked


@pytest.mark.full
@pytest.mark.parametrize("split", ["off", "on"])
async def test_whoever_comes_back_is_not_parked_for_what_it_does_not_need_yet(split: Any) -> None:
    """Small headroom and small pages: an admission covers less than pages are asked ahead for. Parking stays rare."""
    conversations = [
        Script(tuple((7 * i + 3 * j) % 240 for j in range(100 + i)), Sampling(seed=i, max_tokens=200, ignore_eos=True))
        for i in range(12)
    ]
    replies, _, counters = await company(
        2, conversations, pages=24, parallel=12, headroom=64, context=640, split=split, borrow=False
    )
    assert all(reply.completion for reply in replies.values())
    assert 0 < counters.parked <= 2 * len(conversations)


@pytest.mark.parametrize("split", ["off", "on"])
async def test_calls_of_a_round_do_not_grow_with_the_number_of_conversations(
    split: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchanges of a decode round with 12 lanes, of all owners, are those of one lane."""
    calls: dict[int, set[int]] = {}
    count = [0]
    exchange, execute = Channel.exchange, Rounds.execute

    def counted(channel: Channel, *args: Any) -> Any:
        count[0] += channel.link.rank == 0
        return exchange(channel, *args)

    def watched(rounds: Rounds, round_: Any) -> Any:
        decodes = [len(op.lanes) for op in round_.operations if type(op).__name__ == "Decode"]
        before = count[0]
        result = execute(rounds, round_)
        if rounds._link.rank == 0 and len(round_.operations) == 1 and decodes:
            calls.setdefault(decodes[0], set()).add(count[0] - before)
        return result

    monkeypatch.setattr(Channel, "exchange", counted)
    monkeypatch.setattr(Rounds, "execute", watched)
    conversations = [Script((1, 2, 3, i + 1), Sampling(seed=i, max_tokens=8 + 3 * i, ignore_eos=True)) for i in range(12)]
    async with LocalGroup(MODEL, 2, context=256, page_rows=64, parallel=12, dtype="f32", split=split) as group:
        await play_all(group, conversations)
    assert {1, 12} <= calls.keys()
    assert len(set.union(*calls.values())) == 1


async def test_a_client_that_never_reads_stops_alone() -> None:
    """Its conversation stops decoding with bounded memory; another one's reply is whole meanwhile. gRPC keeps some of what was
    not read: its window is held small here, so that a few hundred tokens fill it."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    request = router_pb2.GenerateRequest(
        token_ids=router_pb2.TokenIds(ids=[5, 6, 7]),
        sampling=Sampling(max_tokens=4000, ignore_eos=True, log_probs=20).to_proto(),
    )
    async with LocalGroup(MODEL, 1, context=4096, page_rows=64, parallel=2, dtype="f32", memory_bytes=2 << 30) as group:
        counters = workers_of(group).counters
        async with grpc.aio.insecure_channel(group.router.address, options=options) as channel:
            deaf = router_pb2_grpc.RouterStub(channel).Generate(request)
            await deaf.read()
            for _ in range(300):
                if counters.mailbox_stalls:
                    break
                await asyncio.sleep(0.1)
            assert counters.mailbox_stalls == 1
            assert counters.decode_rows < 3000
            rows = counters.decode_rows
            other = await play(group, Script((9, 8, 7), Sampling(seed=1, max_tokens=50, ignore_eos=True)))
            assert len(other.ids) == 50
            assert counters.decode_rows - rows <= 52  # the other's alone
            deaf.cancel()
        await settled(group)
