"""The client against a server that answers as it is told: statuses become errors, with their words."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import psutil
import pytest

from latentpool import net
from latentpool.client import AdminClient, Client
from latentpool.errors import BusyError, EpochError, LatentPoolError, NotServedError, ReplayError, RequestError
from latentpool.sampling import Sampling
from latentpool.v1 import plan_pb2, pool_admin_pb2, pool_admin_pb2_grpc, router_pb2, router_pb2_grpc
from services.router.statuses import status

pytestmark = pytest.mark.timeout(30)


class Service(router_pb2_grpc.RouterServicer, pool_admin_pb2_grpc.PoolAdminServicer):
    code: grpc.StatusCode | None = None
    request: Any = None
    hang = False
    error: LatentPoolError | None = None

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.callers: list[Any] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.request = request
        self.callers.append(dict(context.invocation_metadata()).get("authorization"))
        yield router_pb2.GenerateResponse(waiting=router_pb2.Waiting(ahead=1))
        try:
            if self.error:
                refusal = status(self.error, retry_seconds=7)
                await context.abort(refusal.code, refusal.details, refusal.trailing_metadata)
            if self.code:
                await context.abort(self.code, "in these words")
            if self.hang:
                await asyncio.sleep(60)
            for i in range(1000):
                yield router_pb2.GenerateResponse(chunk=router_pb2.Chunk(first_index=i, token_ids=[i]))
            yield router_pb2.GenerateResponse(completion=router_pb2.Completion(seed=4))
        finally:
            self.ended.set()

    async def Score(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.request = request
        yield router_pb2.ScoreResponse(rows=router_pb2.ScoredRows(best_ids=[3]))

    async def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.code:
            await context.abort(self.code, "in these words")
        return router_pb2.GetModelResponse(name="m")

    async def GetPlan(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pool_admin_pb2.GetPlanResponse(plan=plan_pb2.Plan(pages=7))

    async def CheckIntegrity(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pool_admin_pb2.CheckIntegrityResponse(violations=["page 3"], pages=7)

    async def ListKept(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pool_admin_pb2.ListKeptResponse(budget_bytes=9)

    async def Evict(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pool_admin_pb2.EvictResponse(evicted=request.states or [1, 2])

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.request = request
        try:
            for epoch in range(3):
                yield pool_admin_pb2.WatchResponse(ranks=pool_admin_pb2.GetRanksResponse(epoch=epoch))
            if self.code:
                await context.abort(self.code, "in these words")
            await asyncio.sleep(60)
        finally:
            self.ended.set()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Service, str]]:
    service, server = Service(), net.server()
    router_pb2_grpc.add_RouterServicer_to_server(service, server)
    pool_admin_pb2_grpc.add_PoolAdminServicer_to_server(service, server)
    address = net.bind(server, "127.0.0.1:0", "a test")
    await server.start()
    yield service, address
    await server.stop(0)


async def test_events_come_typed_and_in_order(served: tuple[Service, str]) -> None:
    service, address = served
    async with Client(address) as client:
        events = [e async for e in client.generate("héllo", Sampling(top_k=3), request_id="r")]
        assert [type(e).__name__ for e in (events[0], events[1], events[-1])] == ["Waiting", "Chunk", "Completion"]
        assert (service.request.text, service.request.sampling.top_k, service.request.request_id) == ("héllo", 3, "r")
        rows = [e async for e in client.score([1, 2], decode_from=1, raw_logits=True)]
        assert rows[0].best_ids == [3]
        assert (service.request.token_ids.ids, service.request.decode_from, service.request.raw_logits) == ([1, 2], 1, True)
        [_ async for _ in client.score([1])]
        assert not service.request.HasField("decode_from")


async def test_a_chat_is_sent_as_its_messages(served: tuple[Service, str]) -> None:
    service, address = served
    tools = [{"type": "function", "function": {"name": "größe"}}]
    async with Client(address) as client:
        [_ async for _ in client.generate(chat=[("system", "be brief"), {"role": "user", "content": "hé"}], tools=tools)]
        assert service.request.WhichOneof("prompt") == "chat"
        told = [(message.role, message.content) for message in service.request.chat.messages]
        assert told == [("system", "be brief"), ("user", "hé")]
        assert json.loads(service.request.chat.tools) == tools
        assert not service.request.HasField("rewind")
        [_ async for _ in client.generate(chat=[])]
        assert (service.request.WhichOneof("prompt"), service.request.chat.tools) == ("chat", "")
        [_ async for _ in client.generate([1, 2], rewind=0)]
        assert service.request.HasField("rewind")


@pytest.mark.parametrize(
    ("prompt", "chat", "words"),
    [
        (None, None, "give a prompt or a chat"),
        ("a", [("user", "b")], "give a prompt or a chat"),
        (None, [{"role": "user"}], "chat: a message has no content"),
        (None, [("user", "\ud800")], "chat: "),
        (None, [("user", 3)], "chat: "),
    ],
)
async def test_what_is_no_chat_is_a_request_error(served: tuple[Service, str], prompt: Any, chat: Any, words: str) -> None:
    async with Client(served[1]) as client:
        with pytest.raises(RequestError, match=words):
            await anext(client.generate(prompt, chat=chat))
    assert served[0].request is None


async def test_the_caller_s_token_goes_with_each_call(served: tuple[Service, str]) -> None:
    service, address = served
    for client in (Client(address), Client(address, token="me")):
        async with client:
            [_ async for _ in client.generate([1])]
    assert service.callers == [None, "Bearer me"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, RequestError),
        (grpc.StatusCode.FAILED_PRECONDITION, NotServedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, BusyError),
        (grpc.StatusCode.UNAVAILABLE, EpochError),
        (grpc.StatusCode.DATA_LOSS, ReplayError),
        (grpc.StatusCode.INTERNAL, LatentPoolError),
    ],
)
async def test_statuses_become_errors_with_their_words(served: tuple[Service, str], code: Any, kind: type) -> None:
    service, address = served
    service.code = code
    async with Client(address) as client:
        with pytest.raises(kind, match="in these words") as raised:
            [_ async for _ in client.generate([1])]
        assert type(raised.value) is kind
        with pytest.raises(kind, match="in these words"):
            await client.get_model()


async def test_refusals_keep_their_field_and_numbers(served: tuple[Service, str]) -> None:
    service, address = served
    async with Client(address) as client:
        service.error = BusyError("full", waiting=3, max_waiting=3)
        with pytest.raises(BusyError) as busy:
            [_ async for _ in client.generate([1])]
        assert busy.value.numbers == {"waiting": 3, "max_waiting": 3, "retry_seconds": 7.0}
        service.error = NotServedError("too long", field="prompt", context=-1, share=0.5)
        with pytest.raises(NotServedError) as never:
            [_ async for _ in client.generate([1])]
        assert (never.value.field, never.value.numbers) == ("prompt", {"context": -1, "share": 0.5})


async def test_a_class_is_stated(served: tuple[Service, str]) -> None:
    service, address = served
    async with Client(address) as client:
        for background, priority in ((False, router_pb2.PRIORITY_FOREGROUND), (True, router_pb2.PRIORITY_BACKGROUND)):
            [_ async for _ in client.generate([1], background=background)]
            assert service.request.priority == priority


async def test_leaving_the_iterator_cancels_the_call(served: tuple[Service, str]) -> None:
    service, address = served
    service.hang = True
    async with Client(address) as client:
        events = client.generate([1])
        await anext(events)
        await events.aclose()
        await asyncio.wait_for(service.ended.wait(), 5)


async def test_prompts_that_no_message_holds_are_request_errors(served: tuple[Service, str]) -> None:
    async with Client(served[1]) as client:
        for prompt in ([-1], [2**32], "\ud800"):
            with pytest.raises(RequestError, match="prompt: "):
                await anext(client.generate(prompt))


async def test_nobody_there_is_said_with_the_address() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(EpochError, match=r"127\.0\.0\.1:1"):
            await client.get_model()
        with pytest.raises(EpochError, match=r"127\.0\.0\.1:1 is not ready after 0.1 s: "):
            await client.wait_ready(0.1)


async def test_the_admin_client_reads_the_managers_calls(served: tuple[Service, str]) -> None:
    async with AdminClient(served[1]) as admin:
        assert (await admin.get_plan()).pages == 7
        assert await admin.check_integrity() == ["page 3"]
        with pytest.raises(LatentPoolError, match="not implemented"):
            await admin.get_ranks()
        assert (await admin.list_kept()).budget_bytes == 9
        assert (await admin.evict([7]), await admin.evict()) == ([7], [1, 2])


async def test_a_watch_goes_on_until_it_is_closed(served: tuple[Service, str]) -> None:
    service, address = served
    async with AdminClient(address) as admin:
        async with aclosing(admin.watch(0.5)) as watch:
            assert [(await anext(watch)).ranks.epoch for _ in range(3)] == [0, 1, 2]
        assert service.request.interval_seconds == 0.5
        await asyncio.wait_for(service.ended.wait(), 5)
        service.code = grpc.StatusCode.UNAVAILABLE
        with pytest.raises(EpochError, match="in these words"):
            [_ async for _ in admin.watch()]
        assert not service.request.HasField("interval_seconds")


async def test_a_stream_left_in_its_middle_keeps_no_connection(served: tuple[Service, str]) -> None:
    """Closing the client closes its connection at once, not when garbage is collected."""
    service, address = served
    process = psutil.Process()
    service.hang = True

    async def leave() -> None:
        async with Client(address) as client, aclosing(client.generate([1])) as stream:
            await anext(stream)

    await leave()  # what gRPC makes once
    gc.collect()
    before = process.num_fds()
    gc.disable()
    try:
        for _ in range(5):
            await leave()
        for _ in range(100):
            if process.num_fds() <= before:
                break
            await asyncio.sleep(0.02)
        assert process.num_fds() <= before
    finally:
        gc.enable()
