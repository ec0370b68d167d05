"""gRPC channels and servers with the settings that a group needs (design section 11)."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from latentpool.errors import ConfigError

INTERNAL_RECEIVE_LIMIT = 64 << 20
PUBLIC_RECEIVE_LIMIT = 16 << 20
_KEEPALIVE_MS = 10_000

_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", INTERNAL_RECEIVE_LIMIT),
    ("grpc.max_send_message_length", INTERNAL_RECEIVE_LIMIT),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel(address: str) -> grpc.aio.Channel:
    """An asyncio channel to host:port."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def server(receive_limit: int = INTERNAL_RECEIVE_LIMIT) -> grpc.aio.Server:
    """An asyncio server that owns its port alone and tolerates the keepalive of `channel`."""
    return grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # the default lets a second server take the same port silently
            ("grpc.max_receive_message_length", receive_limit),
            ("grpc.max_send_message_length", INTERNAL_RECEIVE_LIMIT),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
        ]
    )


def bind(grpc_server: grpc.aio.Server, address: str, service: str) -> str:
    """Binds host:port (port 0: any free one) and returns the address with the real port. Raises ConfigError if taken."""
    host = address.rpartition(":")[0]
    try:
        port = grpc_server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(
            f"{service} cannot listen on {address}: the address is taken (another latentpool, perhaps?) or not this host's"
        )
    return f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether host:port names this machine's loopback."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name, which may begin with "127." too
        return False


def check_secret(secret: bytes, addresses: Sequence[str], service: str) -> None:
    """Raises ConfigError if a group without a secret would be reachable from other hosts."""
    for address in addresses:
        if not secret and not is_loopback(address):
            raise ConfigError(f"{service} uses {address}, which is not loopback: set --secret-file (the same on every node)")
