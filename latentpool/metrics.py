"""Prometheus metrics of one service over HTTP: GET /metrics at an address of its own.

A service gives plain numbers (`Sample`) when it is asked, on its own event loop, so they are of one moment; nothing is
counted twice for Prometheus' sake. Each endpoint has a registry of its own: several services can live in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from latentpool.errors import ConfigError

log = structlog.get_logger()

_PATHS = ("/", "/metrics")
_HEAD_LIMIT = 16 << 10
"""Bytes of a request's head at most."""
_PATIENCE = 10.0
"""Seconds that a client has to send its request and to take the answer."""


class Sample(NamedTuple):
    """One number. Samples of one `name` differ in `labels` and agree in the rest; names of counters end in _total."""

    name: str
    labels: Mapping[str, str]
    value: float
    kind: Literal["counter", "gauge"]
    help: str


def counter(name: str, help: str, value: float, **labels: object) -> Sample:
    """What only grows while the service lives."""
    return Sample(name, {key: str(label) for key, label in labels.items()}, value, "counter", help)


def gauge(name: str, help: str, value: float, **labels: object) -> Sample:
    """What is so now."""
    return Sample(name, {key: str(label) for key, label in labels.items()}, value, "gauge", help)


def families(samples: Iterable[Sample]) -> Iterator[Metric]:
    """The samples by name, as prometheus-client takes them."""
    found: dict[str, Metric] = {}
    for sample in samples:
        family = found.get(sample.name)
        if family is None:
            kind = CounterMetricFamily if sample.kind == "counter" else GaugeMetricFamily
            family = found[sample.name] = kind(sample.name, sample.help)
        family.add_sample(sample.name, dict(sample.labels), sample.value)
    yield from found.values()


class _Asked(Collector):
    def __init__(self, collect: Callable[[], Iterable[Sample]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return families(self._collect())


@contextlib.asynccontextmanager
async def serving(collect: Callable[[], Iterable[Sample]], address: str) -> AsyncIterator[str]:
    """Serves at host:port (port 0: any free one) and gives the real address; left, no socket or task stays. Raises ConfigError
    if the address is taken."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Asked(collect))
    answering: set[asyncio.Task[None]] = set()

    def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_answer(registry, reader, writer))
        answering.add(task)
        task.add_done_callback(answering.discard)

    host, _, port = address.rpartition(":")
    try:
        server = await asyncio.start_server(on_connection, host.strip("[]"), int(port), limit=_HEAD_LIMIT)
    except OSError as error:
        why = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)  # not asyncio's own words
        raise ConfigError(f"metrics cannot be served at {address}: {why}; choose another with --metrics-bind") from None
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)
        await server.wait_closed()


async def _answer(registry: CollectorRegistry, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads one request, answers it and closes the connection."""
    try:
        async with asyncio.timeout(_PATIENCE):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            writer.write(_response(registry, head))
            await writer.drain()
    except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
        pass  # a client that is gone, or does not speak HTTP
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _response(registry: CollectorRegistry, head: str) -> bytes:
    request, *lines = head.split("\r\n")
    method, target, *_ = [*request.split(" "), "", ""]
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    kind, body = "text/plain; charset=utf-8", b""
    if target.partition("?")[0] not in _PATHS:
        status, body = "404 Not Found", b"metrics are at /metrics\n"
    elif method not in ("GET", "HEAD"):
        status, body = "405 Method Not Allowed", b"use GET\n"
    else:
        encode, kind = choose_encoder(headers.get("accept", ""))
        try:
            status, body = "200 OK", encode(registry)
        except Exception:  # a fault of the numbers must not end the service
            log.exception("metrics failed")
            status, body = "500 Internal Server Error", b"the service's log says why\n"
    answer = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return answer.encode("latin-1") + (b"" if method == "HEAD" else body)
