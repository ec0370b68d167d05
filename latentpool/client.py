"""A thin typed asyncio client: the router's calls, and those of a pool manager that operators make."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from latentpool import net
from latentpool.errors import BusyError, EpochError, LatentPoolError, NotServedError, ReplayError, RequestError
from latentpool.sampling import Sampling
from latentpool.v1 import plan_pb2, pool_admin_pb2, pool_admin_pb2_grpc, router_pb2, router_pb2_grpc

GenerateEvent = router_pb2.Waiting | router_pb2.Filling | router_pb2.Chunk | router_pb2.Completion
ScoreEvent = router_pb2.Waiting | router_pb2.ScoredRows | router_pb2.Completion

_ERRORS: dict[grpc.StatusCode, type[LatentPoolError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: RequestError,
    grpc.StatusCode.FAILED_PRECONDITION: NotServedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: BusyError,
    grpc.StatusCode.UNAVAILABLE: EpochError,
    grpc.StatusCode.DATA_LOSS: ReplayError,
}

Message = tuple[str, str] | Mapping[str, str]
"""A chat's message: (role, content), or a mapping with these keys."""

T = TypeVar("T")
Self = TypeVar("Self", bound="_Caller")


class _Caller:
    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = net.channel(address)

    async def close(self) -> None:
        """Ends all calls and releases the channel."""
        await self._channel.close()

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    async def _stream(self, call: Any) -> AsyncGenerator[Any, None]:
        try:
            # a call whose iterator is not closed holds itself, and its connection, until garbage is collected
            async with aclosing(aiter(call)) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    def _error(self, error: grpc.aio.AioRpcError) -> LatentPoolError:
        details = error.details() or error.code().name
        if error.code() is grpc.StatusCode.UNAVAILABLE and not _particulars(error):
            details = f"{self.address}: {details}"  # words of the connection, which do not say whose
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return LatentPoolError(f"{self.address} did not answer in the time given")
        kind = _ERRORS.get(error.code(), LatentPoolError)
        return kind(details, **_particulars(error)) if issubclass(kind, RequestError) else kind(details)


class Client(_Caller):
    """Calls of a router at host:port. Every call raises RequestError, NotServedError (this group never can), BusyError (not
    now; `numbers` has retry_seconds) or EpochError (the group is not ready, ended, or nothing answers there), in the router's
    words and with its field and numbers; `timeout` is in seconds. `token` is sent as the caller's bearer token: what is kept of
    a prompt is resumed only by calls with the same one."""

    def __init__(self, address: str, token: str = "") -> None:
        super().__init__(address)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else None
        self._stub: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(self._channel)

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        sampling: Sampling | None = None,
        *,
        chat: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        rewind: int | None = None,
        background: bool = False,
        request_id: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 (the call's deadline)
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Streams the reply to a text, to token ids, or to a `chat`, which the checkpoint's template makes a prompt of, with
        `tools` as the template takes them: Waiting, Filling and Chunk events, then one Completion. `rewind`: tokens of the
        prompt before its newest user message, if the caller knows; a chat knows it itself. A background request yields to
        those that are not. Closing the iterator cancels the request. Raises ReplayError if the reply could not be continued
        as it began."""
        request = router_pb2.GenerateRequest(
            request_id=request_id,
            sampling=(sampling or Sampling()).to_proto(),
            priority=router_pb2.PRIORITY_BACKGROUND if background else router_pb2.PRIORITY_FOREGROUND,
            rewind=rewind,
        )
        if (prompt is None) == (chat is None):
            raise RequestError("give a prompt or a chat, and not both", field="prompt")
        if chat is None:
            assert prompt is not None
            _set_prompt(request, prompt)
        else:
            _set_chat(request, chat, tools)
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
        async with aclosing(self._stream(call)) as responses:
            async for response in responses:
                yield getattr(response, response.WhichOneof("event"))

    async def score(
        self,
        prompt: str | Sequence[int],
        *,
        decode_from: int | None = None,
        raw_logits: bool = False,
        request_id: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 (the call's deadline)
    ) -> AsyncGenerator[ScoreEvent, None]:
        """Streams ScoredRows in order of position, then one Completion. Tokens from `decode_from` on are computed on the
        decode path."""
        request = router_pb2.ScoreRequest(request_id=request_id, decode_from=decode_from, raw_logits=raw_logits)
        _set_prompt(request, prompt)
        async with aclosing(self._stream(self._stub.Score(request, timeout=timeout, metadata=self._metadata))) as responses:
            async for response in responses:
                yield getattr(response, response.WhichOneof("event"))

    async def tokenize(self, text: str, timeout: float | None = None) -> list[int]:  # noqa: ASYNC109
        response = await self._call(self._stub.Tokenize(router_pb2.TokenizeRequest(text=text), timeout=timeout))
        return list(response.token_ids)

    async def get_model(self, timeout: float | None = None) -> router_pb2.GetModelResponse:  # noqa: ASYNC109
        return await self._call(self._stub.GetModel(router_pb2.GetModelRequest(), timeout=timeout))

    async def wait_ready(self, seconds: float) -> router_pb2.GetModelResponse:
        """Waits until the group serves. Raises EpochError with what it still waits for after that many seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            try:
                return await self.get_model(timeout=5.0)
            except LatentPoolError as error:
                if loop.time() >= until:
                    raise EpochError(f"{self.address} is not ready after {seconds:g} s: {error}") from None
            await asyncio.sleep(0.05)


class AdminClient(_Caller):
    """What operators ask of a pool manager at host:port. Errors as Client's."""

    def __init__(self, address: str, timeout: float = 10.0) -> None:
        super().__init__(address)
        self._timeout = timeout
        self._stub: pool_admin_pb2_grpc.PoolAdminAsyncStub = pool_admin_pb2_grpc.PoolAdminStub(self._channel)

    async def get_plan(self) -> plan_pb2.Plan:
        response = await self._call(self._stub.GetPlan(pool_admin_pb2.GetPlanRequest(), timeout=self._timeout))
        return response.plan

    async def list_pages(self) -> pool_admin_pb2.ListPagesResponse:
        return await self._call(self._stub.ListPages(pool_admin_pb2.ListPagesRequest(), timeout=self._timeout))

    async def list_conversations(self) -> list[pool_admin_pb2.ConversationInfo]:
        request = pool_admin_pb2.ListConversationsRequest()
        return list((await self._call(self._stub.ListConversations(request, timeout=self._timeout))).conversations)

    async def get_ranks(self) -> pool_admin_pb2.GetRanksResponse:
        return await self._call(self._stub.GetRanks(pool_admin_pb2.GetRanksRequest(), timeout=self._timeout))

    async def check_integrity(self) -> list[str]:
        """What is wrong with the books; empty where they are whole."""
        request = pool_admin_pb2.CheckIntegrityRequest()
        return list((await self._call(self._stub.CheckIntegrity(request, timeout=self._timeout))).violations)

    async def carry(self, conversation: int, owner: int | None = None) -> pool_admin_pb2.CarryResponse:
        """Moves a running conversation to another owner (None: the rank with most free pages) and waits until it is there,
        however long; cancelling the wait does not stop the move. Raises NotServedError where it cannot be moved now,
        LatentPoolError where nobody knows it or it ended on its way."""
        return await self._call(self._stub.Carry(pool_admin_pb2.CarryRequest(conversation=conversation, owner=owner)))

    async def list_kept(self) -> pool_admin_pb2.ListKeptResponse:
        return await self._call(self._stub.ListKept(pool_admin_pb2.ListKeptRequest(), timeout=self._timeout))

    async def evict(self, states: Sequence[int] = ()) -> list[int]:
        """Evicts these kept states, or all that are not in use, and gives those that went. Their pages are on the way back."""
        request = pool_admin_pb2.EvictRequest(states=states)
        return list((await self._call(self._stub.Evict(request, timeout=self._timeout))).evicted)

    async def watch(self, interval: float | None = None) -> AsyncGenerator[pool_admin_pb2.WatchResponse, None]:
        """Pages, conversations, kept states and ranks: now, then every `interval` seconds (None: 1; at least 0.2)."""
        request = pool_admin_pb2.WatchRequest(interval_seconds=interval)
        async with aclosing(self._stream(self._stub.Watch(request))) as responses:
            async for response in responses:
                yield response


def _particulars(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Field and numbers of a refusal, from the status details; empty where it has none."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # asks for no more than it has
    except ValueError:  # details that contradict the status
        return {}
    found: dict[str, Any] = {}
    for packed in status.details if status is not None else ():
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            message = kind()
            if not packed.Unpack(message):
                continue
            if isinstance(message, error_details_pb2.ErrorInfo):
                found |= {name: _number(text) for name, text in message.metadata.items()}
            elif isinstance(message, error_details_pb2.RetryInfo):
                found["retry_seconds"] = message.retry_delay.ToTimedelta().total_seconds()
            elif message.field_violations:
                found["field"] = message.field_violations[0].field
    return found


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _set_prompt(request: router_pb2.GenerateRequest | router_pb2.ScoreRequest, prompt: str | Sequence[int]) -> None:
    try:
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
            request.token_ids.SetInParent()
    except (ValueError, TypeError) as error:
        raise RequestError(f"prompt: {error}", field="prompt") from None


def _set_chat(request: router_pb2.GenerateRequest, chat: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    try:
        request.chat.SetInParent()
        for message in chat:
            role, content = (message["role"], message["content"]) if isinstance(message, Mapping) else message
            request.chat.messages.add(role=role, content=content)
        request.chat.tools = json.dumps(list(tools), ensure_ascii=False) if tools else ""
    except KeyError as error:
        raise RequestError(f"chat: a message has no {error.args[0]}", field="chat") from None
    except (ValueError, TypeError) as error:
        raise RequestError(f"chat: {error}", field="chat") from None
