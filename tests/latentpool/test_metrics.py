"""Metrics read over HTTP, as Prometheus reads them."""

import asyncio
import contextlib
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from latentpool import metrics
from latentpool.errors import ConfigError


async def get(address, path="/metrics", **headers):
    """(status, content type, body) of one request."""

    def read():
        request = urllib.request.Request(f"http://{address}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return reply.status, reply.headers["Content-Type"], reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["Content-Type"], error.read().decode()

    return await asyncio.to_thread(read)


async def test_numbers_are_those_of_the_moment():
    sent = {"sums": 3, "rows": 0}

    def collect():
        for kind, count in sent.items():
            yield metrics.counter("latentpool_link_sent_bytes_total", "Bytes.", count, kind=kind, rank=1)
        yield metrics.gauge("latentpool_resident_bytes", "Memory.", 5 << 40)

    async with metrics.serving(collect, "127.0.0.1:0") as address:
        sent["rows"] = 7
        status, content_type, body = await get(address)
        assert (status, content_type.split(";")[0]) == (200, "text/plain")
        found = {family.name: family for family in text_string_to_metric_families(body)}
        link = found["latentpool_link_sent_bytes"]
        assert (link.type, link.documentation) == ("counter", "Bytes.")
        assert {(sample.labels["kind"], sample.labels["rank"], sample.value) for sample in link.samples} == {
            ("sums", "1", 3),
            ("rows", "1", 7),
        }
        assert found["latentpool_resident_bytes"].type == "gauge"
        assert found["latentpool_resident_bytes"].samples[0].value == 5 << 40
        assert "latentpool_link_sent_bytes_total{" in body


async def test_openmetrics_where_it_is_asked_for():
    async with metrics.serving(lambda: [metrics.counter("a_total", "A.", 1)], "127.0.0.1:0") as address:
        _, content_type, body = await get(address, Accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")


async def test_services_of_one_process_do_not_mix():
    async with (
        metrics.serving(lambda: [metrics.gauge("here", "H.", 1)], "127.0.0.1:0") as here,
        metrics.serving(lambda: [metrics.gauge("there", "T.", 2)], "127.0.0.1:0") as there,
    ):
        assert "there" not in (await get(here))[2]
        assert "here" not in (await get(there))[2].replace("there", "")


async def test_what_is_not_served_says_so():
    def broken():
        raise ValueError("no number")

    async with metrics.serving(broken, "127.0.0.1:0") as address:
        assert (await get(address, "/elsewhere"))[0] == 404
        assert (await get(address))[0] == 500
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"POST /metrics HTTP/1.1\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 405 ")
        writer.close()
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"x" * (1 << 17))
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b"", "too much before it asked for anything"
        writer.close()
        assert (await get(address))[0] == 500, "others are served all the same"


@pytest.mark.timeout(20)
async def test_nothing_stays_when_it_is_left(monkeypatch):
    monkeypatch.setattr(metrics, "_PATIENCE", 3600.0)
    before = asyncio.all_tasks()
    async with metrics.serving(lambda: [], "127.0.0.1:0") as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, port)  # a client that says nothing
        await asyncio.sleep(0.05)
        assert len(asyncio.all_tasks() - before) == 1
    assert asyncio.all_tasks() == before
    assert await reader.read() == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, port)
    async with metrics.serving(lambda: [], address) as again:
        assert again == address


async def test_an_address_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"^metrics cannot be served at {address}: address already in use; "):
            async with metrics.serving(lambda: [], address):
                pass
