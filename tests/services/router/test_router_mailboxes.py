"""Slow and absent readers: what is held for them is bounded, and slow ones get all that was meant for them."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentpool import net
from latentpool.v1 import pool_manager_pb2, router_pb2
from services.router.conversations import Conversation, Times
from services.router.delivery import LIMIT_BYTES, TOKEN_BYTES, Mailbox, Tokens
from services.router.handlers import Handlers
from services.router.requests import Accepted, Limits
from services.router.text import Texts

pytestmark = pytest.mark.timeout(60)

GRPC_BYTES = 128 << 10
"""What gRPC may hold of a stream that nobody reads, at the server and at the client together: HTTP/2's window of 64 KiB, and
messages on their way."""
PLAIN = [("grpc.http2.bdp_probe", 0)]
"""A client whose window stays at HTTP/2's 64 KiB."""
ENDLESS = 1 << 30
ABSENT = """
import asyncio, sys
import grpc.aio
from latentpool.v1 import router_pb2 as pb, router_pb2_grpc

async def main():
    stub = router_pb2_grpc.RouterStub(grpc.aio.insecure_channel(sys.argv[1]))
    call = stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])))
    await asyncio.sleep(60)

asyncio.run(main())
"""


def log_prob(token: int, top: int = 20) -> router_pb2.TokenLogProb:
    return router_pb2.TokenLogProb(log_prob=-token / 7, top_ids=range(top), top_log_probs=[-0.5 * i for i in range(top)])


# ---- the mailbox ------------------------------------------------------------------------------------------------------

events = st.lists(st.sampled_from(["token", "token", "log prob", "stop", "waiting", "filling", "read"]), max_size=60)


@settings(max_examples=300, deadline=None)
@given(events)
def test_joined_messages_say_what_single_ones_would(what: list[str]) -> None:
    """Every token once, at its index, with its own log-probability; the newest progress is never lost; bytes add up."""

    async def run() -> None:
        mailbox = Mailbox(asyncio.Event())
        index, put, got, told = itertools.count(), [], [], []
        bytes_, progress = 0, None
        scored = "log prob" in what
        for kind in [*what, *["read"] * len(what)]:
            if kind == "read":
                if not mailbox._events:
                    continue
                event = await mailbox.get()
                if isinstance(event, Tokens):
                    assert event.first_index == len(got)
                    assert len(event.log_probs) == (len(event.ids) if scored else 0)
                    bytes_ -= sum(TOKEN_BYTES + p.ByteSize() for p in event.log_probs) if scored else 4 * len(event.ids)
                    spoken = [i < event.spoken for i in range(len(event.ids))]
                    got += zip(event.ids, spoken, event.log_probs or [None] * len(event.ids), strict=True)
                else:
                    told.append(event)
            elif kind in ("waiting", "filling"):
                number = len(put) + len(told)
                progress = router_pb2.Waiting(ahead=number) if kind == "waiting" else router_pb2.Filling(tokens_done=number)
                mailbox.put(progress)
            else:
                i = next(index)
                score = log_prob(i) if scored else None
                put.append((i * 3, True, score))
                bytes_ += TOKEN_BYTES + (score.ByteSize() if score else 0)
                mailbox.put(Tokens(i, [i * 3], 1, [score] if score else []))
            assert mailbox.bytes == bytes_
        assert got == put
        assert mailbox.bytes == 0
        assert progress is None or progress in told

    asyncio.run(run())


async def test_a_stop_token_at_the_end_is_not_spoken_however_it_is_joined() -> None:
    mailbox = Mailbox(asyncio.Event())
    for i, spoken in enumerate([1, 1, 0]):
        mailbox.put(Tokens(i, [7 + i], spoken, [log_prob(i)]))
    event = await mailbox.get()
    assert (event.first_index, event.ids, event.spoken) == (0, [7, 8, 9], 2)
    assert event.log_probs == [log_prob(0), log_prob(1), log_prob(2)]


async def test_progress_keeps_its_place_among_tokens() -> None:
    mailbox = Mailbox(asyncio.Event())
    for event in (
        router_pb2.Waiting(ahead=3),
        Tokens(0, [7], 1),
        router_pb2.Waiting(ahead=2),
        router_pb2.Filling(),
        router_pb2.Waiting(ahead=1),
    ):
        mailbox.put(event)
    got = [event async for event in _drained(mailbox)]
    assert got == [
        router_pb2.Waiting(ahead=3), Tokens(0, [7], 1), router_pb2.Filling(), router_pb2.Waiting(ahead=1)
    ]  # fmt: skip


async def test_a_reader_that_is_gone_holds_few_events_however_often_its_conversation_is_parked() -> None:
    mailbox, index = Mailbox(asyncio.Event()), 0
    for turn in range(10_000):  # waits, fills, says a token while there is room
        mailbox.put(router_pb2.Waiting(ahead=turn))
        for done in (64, 128):
            mailbox.put(router_pb2.Filling(tokens_done=done, tokens_total=turn))
        if not mailbox.full:
            mailbox.put(Tokens(index, [1], 1))
            index += 1
    assert mailbox.bytes == LIMIT_BYTES
    assert len(mailbox._events) <= 3 * LIMIT_BYTES // TOKEN_BYTES + 2
    last = [event async for event in _drained(mailbox)][-2:]
    assert [e.ahead if isinstance(e, router_pb2.Waiting) else e.tokens_total for e in last] == [9_999, 9_999]


async def _drained(mailbox: Mailbox) -> AsyncIterator:
    while mailbox._events:
        yield await mailbox.get()


@pytest.mark.parametrize("top", [0, 20])
async def test_log_probabilities_count_towards_the_limit(top: int) -> None:
    mailbox = Mailbox(asyncio.Event())
    one = Tokens(0, [1], 1, [log_prob(1, top)]).bytes
    count = 0
    while not mailbox.full:
        mailbox.put(Tokens(count, [1], 1, [log_prob(1, top)]))
        count += 1
    assert LIMIT_BYTES <= mailbox.bytes < LIMIT_BYTES + one
    assert count == -(-LIMIT_BYTES // one)


# ---- through gRPC -----------------------------------------------------------------------------------------------------


class Talkers:
    """Stands in for a group: every conversation talks as fast as its mailbox takes it, as the round loop lets it."""

    def __init__(self, tokens: int, top: int | None) -> None:
        self.limits = Limits(1 << 20, SimpleNamespace(vocab=1 << 20, image_ids=(), eos_ids=()))
        self.granted = pool_manager_pb2.Granted()
        self.wake = asyncio.Event()
        self.talking: dict[Conversation, asyncio.Task] = {}
        self.address = ""
        self._tokens, self._top = tokens, top

    def check_queue(self, reading: int = 0) -> None:
        pass

    def submit(self, accepted: Accepted) -> Conversation:
        c = Conversation(
            id=len(self.talking), request_id="", tokens=accepted.tokens, sampling=accepted.sampling, seed=0,
            stops=frozenset(), limit=1 << 20, mailbox=Mailbox(self.wake), times=Times(0.0),
        )  # fmt: skip
        self.talking[c] = asyncio.create_task(self._talk(c))
        return c

    def leave(self, conversation: Conversation) -> None:
        self.talking.pop(conversation).cancel()

    async def _talk(self, c: Conversation) -> None:
        while len(c.generated) < self._tokens:
            for _ in range(8):  # rounds between two turns of the event loop
                if not c.mailbox.full and len(c.generated) < self._tokens:
                    token = len(c.generated)
                    scores = [] if self._top is None else [log_prob(token, self._top)]
                    c.generated.append(token)
                    c.mailbox.put(Tokens(token, [token], 1, scores))
            await asyncio.sleep(0)
        usage = router_pb2.Usage(generated_tokens=len(c.generated))
        c.mailbox.put(router_pb2.Completion(usage=usage))


@asynccontextmanager
async def served(tokens: int, top: int | None) -> AsyncIterator[tuple[Talkers, Any]]:
    group, texts, server = Talkers(tokens, top), Texts(None), net.server()
    Handlers(group, texts, None).register(server)
    group.address = net.bind(server, "127.0.0.1:0", "a test")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(group.address, options=PLAIN) as channel:
            yield (
                group,
                channel.unary_stream(
                    "/latentpool.v1.Router/Generate",
                    request_serializer=router_pb2.GenerateRequest.SerializeToString,
                    response_deserializer=router_pb2.GenerateResponse.FromString,
                ),
            )
    finally:
        await server.stop(0)
        texts.close()


REQUEST = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[1, 2, 3]))


async def settled(group: Talkers, streams: int) -> list[int]:
    """Tokens said by each conversation once all are full and none says any more."""
    said: list[int] = []
    while True:
        await asyncio.sleep(0.1)
        now = [len(c.generated) for c in group.talking]
        if now == said and len(now) == streams and all(c.mailbox.full for c in group.talking):
            return now
        said = now


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def _path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize("top", [None, 20])
async def test_clients_that_never_read_stop_their_conversations(top: int | None, caplog: pytest.LogCaptureFixture) -> None:
    """All that was ever said for them fits in the mailbox, in HTTP/2's window, which is the client's to grant, and in messages
    on their way: so it is the bound of what the router, and gRPC on both sides, hold."""
    async with served(ENDLESS, top) as (group, generate):
        calls = [generate(REQUEST) for _ in range(4)]
        said = await settled(group, len(calls))
        payload = [sum(Tokens(0, [t], 1, [] if top is None else [log_prob(t, top)]).bytes for t in range(n)) for n in said]
        assert max(payload) <= LIMIT_BYTES + GRPC_BYTES
        for c in group.talking:
            assert LIMIT_BYTES <= c.mailbox.bytes < LIMIT_BYTES + 1024
        for _ in range(300):
            await asyncio.sleep(0)  # they would talk on
        assert [len(c.generated) for c in group.talking] == said
        for call in calls:
            call.cancel()  # while the handlers are blocked in a write
        await until(lambda: not group.talking)
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_the_routers_memory_is_flat_though_a_client_grants_megabytes_and_never_reads() -> None:
    """gRPC's own options let the window grow with the link, to some 4 MiB on loopback: the client's memory, in its process."""
    process = psutil.Process(os.getpid())
    async with served(ENDLESS, 20) as (group, _):
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", ABSENT, group.address, env=_path())
        try:
            await until(lambda: any(len(c.generated) > 1_000 for c in group.talking))
            before = process.memory_info().rss
            (c,) = group.talking
            while not c.mailbox.full and len(c.generated) < 15_000:
                await asyncio.sleep(0.01)
                assert c.mailbox.bytes < LIMIT_BYTES + 1024
            payload = sum(Tokens(0, [t], 1, [log_prob(t)]).bytes for t in range(1_000, len(c.generated)))
            assert process.memory_info().rss - before < 2 << 20
            assert payload > 2 << 20 or c.mailbox.full
        finally:
            client.kill()
            await client.wait()
        await until(lambda: not group.talking)


@pytest.mark.parametrize("top", [None, 3])
async def test_a_reader_that_sleeps_gets_every_token_once_in_fewer_messages(top: int | None) -> None:
    total = 60_000 if top is None else 6_000
    async with served(total, top) as (group, generate):
        call = generate(REQUEST)
        await settled(group, 1)
        messages, got = 0, 0
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.HasField("completion"):
                continue
            chunk = message.chunk
            assert chunk.first_index == got
            assert list(chunk.token_ids) == list(range(got, got + len(chunk.token_ids)))
            assert list(chunk.log_probs) == ([] if top is None else [log_prob(t, top) for t in chunk.token_ids])
            got, messages = got + len(chunk.token_ids), messages + 1
            if got % 7 == 0:
                await asyncio.sleep(0)
        assert got == total
        assert messages < total
        assert not group.talking
