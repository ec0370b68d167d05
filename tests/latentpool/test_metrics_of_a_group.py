"""All services of a small split group in one process, read over HTTP while they serve."""

import asyncio
import contextlib
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from latentpool import metrics
from latentpool.cli.group import LocalGroup
from latentpool.client import AdminClient
from latentpool.sampling import Sampling

DEMO = Path(__file__).parents[2] / "latentpool" / "checkpoints" / "demo"


def read(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}


async def test_what_a_group_did_can_be_read():
    async with contextlib.AsyncExitStack() as stack:
        group = await stack.enter_async_context(LocalGroup(DEMO, 2, page_rows=64, context=1024, parallel=2))
        services = [group.router, group.manager, *group.workers]
        addresses = [await stack.enter_async_context(metrics.serving(one.metrics, "127.0.0.1:0")) for one in services]

        async def told():
            return [await asyncio.to_thread(read, address) for address in addresses]

        router, manager, *_ = await told()
        assert manager["latentpool_ranks_ready",] == 2
        assert router["latentpool_router_prompt_rows_total",] == 0

        reply = group.client.generate(list(range(1, 101)), Sampling(max_tokens=200, ignore_eos=True))
        while type(await anext(reply)).__name__ != "Chunk":
            pass
        router, manager, *_ = await told()
        assert router["latentpool_router_conversations", "decoding"] == 1
        assert manager["latentpool_conversations", "running"] == 1
        assert manager["latentpool_pages", "0", "live"] >= 2
        assert manager["latentpool_pages", "1", "live"] == 0
        await reply.aclose()
        for _ in range(500):
            if (await told())[1]["latentpool_pages", "0", "free"] == manager["latentpool_pages", "1", "free"]:
                break
            await asyncio.sleep(0.01)

        [_ async for _ in group.client.generate(list(range(1, 101)), Sampling(max_tokens=5, ignore_eos=True))]
        router, manager, *workers = await told()
        assert router["latentpool_router_prompt_rows_total",] == 200
        assert router["latentpool_router_borrowed_chunks_total",] == 2, "an empty pool lends"
        for rank, worker in enumerate(workers):
            assert worker["latentpool_worker_rounds_total", str(rank)] > 0
            assert worker["latentpool_worker_compute_seconds_total", str(rank)] > 0
            sent = {key[-1 if key[-1].isalpha() else -2]: value for key, value in worker.items() if "link" in key[0]}
            assert set(sent) == {"sums", "queries", "outputs", "rows", "carries", "samples"}
            assert sent["sums"] > 0
            assert sent["rows"] == sent["carries"] == 0
            assert (sent["queries"] > 0, sent["outputs"] > 0) == ((False, True), (True, False))[rank], "rank 0 owned both"
        async with AdminClient(group.manager.address) as admin:
            for _ in range(100):
                if all(entry.sent.sums == worker_sums(workers, entry.rank) for entry in (await admin.get_ranks()).ranks):
                    break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError("the heartbeats do not say what the workers say")


def worker_sums(workers, rank):
    return workers[rank]["latentpool_link_sent_bytes_total", str(rank), "sums"]
