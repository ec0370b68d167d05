"""What commands that talk to a running group share: one call, and errors in words."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf import json_format
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from latentpool import net
from latentpool.errors import LatentPoolError
from latentpool.v1 import pool_admin_pb2_grpc

T = TypeVar("T")


def ask_manager(address: str, question: Callable[[pool_admin_pb2_grpc.PoolAdminAsyncStub], Awaitable[T]]) -> T:
    """The answer of the pool manager at `address`. Raises LatentPoolError in words."""

    async def ask() -> T:
        async with net.channel(address) as channel:
            return await question(admin(channel))

    try:
        return asyncio.run(ask())
    except grpc.aio.AioRpcError as error:
        raise in_words(error, "pool manager", address, "--manager") from None


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


def admin(channel: grpc.aio.Channel) -> pool_admin_pb2_grpc.PoolAdminAsyncStub:
    """The admin calls over a channel; the generated stub serves both kinds of channel, its types do not say so."""
    return pool_admin_pb2_grpc.PoolAdminStub(channel)  # type: ignore[return-value, arg-type, unused-ignore]


def in_words(error: grpc.aio.AioRpcError, service: str, address: str, flag: str) -> LatentPoolError:
    """A failed call as an error that a person can act on."""
    if error.code() == grpc.StatusCode.UNAVAILABLE and "connect" in (error.details() or "").lower():
        return LatentPoolError(
            f"no {service} answers at {address}: start a group with latentpool up, or name another with {flag}"
        )
    return LatentPoolError(error.details() or error.code().name)


def as_json(message: Message) -> str:
    """A reply as JSON, absent values included, under the proto's field names."""
    return json_format.MessageToJson(message, always_print_fields_with_no_presence=True, preserving_proto_field_name=True)
