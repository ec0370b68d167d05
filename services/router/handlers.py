"""The calls of latentpool.v1.Router: read a request, pass events on, free everything whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from latentpool.errors import BusyError, LatentPoolError, RequestError
from latentpool.receipts import receipt
from latentpool.v1 import router_pb2 as pb
from services.router.conversations import Conversation
from services.router.delivery import Event, Tokens
from services.router.group import Group
from services.router.kept import scope
from services.router.requests import Accepted, Limits, read_generate, read_score
from services.router.statuses import status
from services.router.stops import SpokenText
from services.router.text import Texts
from services.router.turnover import Turnover

SERVICE = pb.DESCRIPTOR.services_by_name["Router"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are not the request they should be; answered with a status instead of gRPC's UNKNOWN."""

    reason: str


class Handlers:
    """Stream handlers write instead of yielding: a write that a vanished client breaks raises here, so `finally` runs."""

    def __init__(self, group: Group, texts: Texts, model: Path | None) -> None:
        self._group = group
        self._texts = texts
        self._name = model.resolve().name if model is not None else ""
        self._turnover = Turnover()
        self._reading = 0

    def register(self, server: grpc.aio.Server) -> None:
        streams, calls = grpc.unary_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        handlers = {
            "Generate": self._handler(streams, self.generate, pb.GenerateRequest),
            "Score": self._handler(streams, self.score, pb.ScoreRequest),
            "Tokenize": self._handler(calls, self.tokenize, pb.TokenizeRequest),
            "GetModel": self._handler(calls, self.get_model, pb.GetModelRequest),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    # ---- calls ----------------------------------------------------------------------------------------------------

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        with self._place() as limits:
            accepted = await read_generate(request, limits, self._texts, _caller(context))
        text = SpokenText(accepted.stops, self._texts.detokenizer())
        async with self._conversation(accepted) as conversation:
            while True:
                event = await conversation.mailbox.get()
                for message in await self._reply(event, conversation, text):
                    await context.write(message)
                if isinstance(event, pb.Completion):
                    return

    async def score(self, request: pb.ScoreRequest, context: Context) -> None:
        with self._place() as limits:
            accepted = await read_score(request, limits, self._texts)
        async with self._conversation(accepted) as conversation:
            while True:
                event = await conversation.mailbox.get()
                if isinstance(event, pb.Waiting):
                    await context.write(pb.ScoreResponse(waiting=event))
                elif isinstance(event, pb.ScoredRows):
                    await context.write(pb.ScoreResponse(rows=event))
                elif isinstance(event, pb.Completion):
                    await self._sign(event, conversation)
                    await context.write(pb.ScoreResponse(completion=event))
                    return

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=await self._texts.encode(request.text))

    async def get_model(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        limits, granted = self._group.limits, self._group.granted
        identity, plan = granted.identity, granted.plan
        return pb.GetModelResponse(
            name=self._name or "glm5_next",
            vocab_size=limits.geometry.vocab,
            context=plan.context,
            world=identity.world,
            lanes=plan.lanes,
            dtype=identity.dtype,
            kv_dtype=identity.kv_dtype,
            has_tokenizer=self._texts.present,
            checkpoint_digest=identity.checkpoint_digest,
            numerics_digest=identity.numerics_digest,
            eos_token_ids=limits.geometry.eos_ids,
            build=identity.build,
        )

    # ---- parts ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _place(self) -> Iterator[Limits]:
        """Where a request is read: it counts as waiting, and costs nothing where there is no place for it. Raises EpochError,
        BusyError."""
        limits = self._group.limits
        self._group.check_queue(self._reading)
        self._reading += 1
        try:
            yield limits
        finally:
            self._reading -= 1

    @asynccontextmanager
    async def _conversation(self, accepted: Accepted) -> AsyncIterator[Conversation]:
        conversation = self._group.submit(accepted)
        try:
            yield conversation
        finally:
            self._group.leave(conversation)

    async def _reply(self, event: Event, conversation: Conversation, text: SpokenText) -> list[pb.GenerateResponse]:
        if isinstance(event, Tokens):
            told = text.push(event.ids[: event.spoken])
            chunk = pb.Chunk(first_index=event.first_index, token_ids=event.ids, text=told, log_probs=event.log_probs)
            return [pb.GenerateResponse(chunk=chunk)]
        if isinstance(event, pb.Completion):
            messages = []
            if rest := text.flush():
                chunk = pb.Chunk(first_index=event.usage.generated_tokens, text=rest)
                messages.append(pb.GenerateResponse(chunk=chunk))
            await self._sign(event, conversation)
            return [*messages, pb.GenerateResponse(completion=event)]
        if isinstance(event, pb.Waiting):
            return [pb.GenerateResponse(waiting=event)]
        assert isinstance(event, pb.Filling)
        return [pb.GenerateResponse(filling=event)]

    async def _sign(self, completion: pb.Completion, conversation: Conversation) -> None:
        """Adds the receipt. Tokens of a Score's decode path count as generated: its receipt is that of such a reply."""
        prompt = conversation.tokens[: conversation.prompt_rows]
        generated = [*conversation.tokens[conversation.prompt_rows :].tolist(), *conversation.generated]
        completion.receipt.sha256 = await self._texts.work(lambda: receipt(prompt, generated))
        completion.receipt.numerics_digest = self._group.granted.identity.numerics_digest
        self._turnover.learn(completion.timings.total_seconds - completion.timings.queued_seconds)

    def _status(self, error: LatentPoolError) -> grpc.Status:
        if isinstance(error, BusyError) and "waiting" in error.numbers:
            lanes = self._group.granted.plan.lanes
            return status(error, self._turnover.delay(int(error.numbers["waiting"]), lanes))
        return status(error)

    def _handler(self, make: Callable[..., Any], call: Callable[[Any, Context], Awaitable[Any]], kind: type[Message]) -> Any:
        """A method handler whose errors become statuses with details, malformed requests included."""

        def read(data: bytes) -> Message | Malformed:
            try:
                return kind.FromString(data)
            except DecodeError as error:
                return Malformed(str(error))

        async def run(request: Message | Malformed, context: Context) -> Any:
            try:
                if isinstance(request, Malformed):
                    raise RequestError(_explained(kind, request.reason))
                return await call(request, context)
            except LatentPoolError as error:
                refusal = self._status(error)
                await context.abort(refusal.code, refusal.details, refusal.trailing_metadata)
            except grpc.aio.InternalError:  # the client is gone, and with it the write that it blocked
                return None

        return make(run, request_deserializer=read, response_serializer=lambda message: message.SerializeToString())


def _caller(context: Context) -> bytes:
    """The scope of the caller's kept states."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return scope(metadata.get("authorization", ""))


def _explained(kind: type[Message], reason: str) -> str:
    name = kind.DESCRIPTOR.name
    if "UTF-8" in reason:
        return f"a string of the {name} is not valid UTF-8: send text as UTF-8, or token_ids"
    return f"the bytes sent are not a {name}: {reason}"
