"""What commands that talk to a running group share: one call from synchronous code, readiness, JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf import json_format
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from latentpool import net
from latentpool.client import AdminClient, Client
from latentpool.config import Settings
from latentpool.errors import EpochError, LatentPoolError

T = TypeVar("T")


def ask_manager(settings: Settings, question: Callable[[AdminClient], Awaitable[T]]) -> T:
    """The pool manager's answer. Raises LatentPoolError in words."""

    async def ask() -> T:
        async with AdminClient(settings.manager) as client:
            return await question(client)

    with in_words("pool manager", settings.manager, "--manager"):
        return asyncio.run(ask())


def ask_router(settings: Settings, question: Callable[[Client], Awaitable[T]]) -> T:
    """The router's answer. Raises LatentPoolError in words."""

    async def ask() -> T:
        async with Client(settings.address) as client:
            return await question(client)

    with in_words("router", settings.address, "--address"):
        return asyncio.run(ask())


@contextlib.contextmanager
def in_words(service: str, address: str, flag: str) -> Any:
    """Says what to do where nothing listens; other errors have words of their own."""
    try:
        yield
    except EpochError as error:
        if "failed to connect" not in str(error).lower():
            raise
        advice = f"start a group with latentpool up, or name another address with {flag}"
        raise LatentPoolError(f"no {service} answers at {address}: {advice}") from None


async def until_serving(address: str) -> None:
    """Waits until the service at `address` says that it serves; while nobody answers, it waits on."""
    async with net.channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(0.05)


def as_dict(message: Message) -> dict[str, Any]:
    """A reply under the proto's field names, fields at their default included."""
    return json_format.MessageToDict(message, always_print_fields_with_no_presence=True, preserving_proto_field_name=True)


def as_json(value: Message | Iterable[Message] | dict[str, Any]) -> str:
    """A reply, or a list of them, as JSON text."""
    if isinstance(value, Message):
        value = as_dict(value)
    elif not isinstance(value, dict):
        return json.dumps([as_dict(message) for message in value], indent=2)
    return json.dumps(value, indent=2, ensure_ascii=False)
