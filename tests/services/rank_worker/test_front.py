"""The front's life over a fake manager and a fake engine: join, load, lay out, serve, end."""

import asyncio

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from front_harness import EPOCH, FakeManager, Rounds, make_worker
from latentpool import net
from latentpool.v1 import pool_manager_pb2 as pb
from latentpool.v1 import rank_worker_pb2 as rw
from services.rank_worker.exchange.inproc import Hub


@pytest.fixture(autouse=True)
def _children_find_the_fake(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(__file__).rpartition("/")[0])


@pytest.fixture
async def manager():
    manager = FakeManager(secret=b"s")
    await manager.start()
    yield manager
    await manager.server.stop(0)


@pytest.mark.parametrize("kind", ["process", "thread"])
async def test_a_life_from_join_to_an_orderly_stop(manager, tmp_path, kind):
    progress = []
    worker = make_worker(
        tmp_path,
        manager.address,
        hub=Hub(1) if kind == "thread" else None,
        secret=b"s",
        on_progress=lambda done, total: progress.append((done, total)),
    )
    await worker.start()
    try:
        loaded = (await manager.hear("loaded")).loaded
        assert (loaded.room_bytes, loaded.resident_bytes, loaded.link_address) == (123, 456, b"link")
        await manager.hear("ready")
        identity = manager.hello.identity
        assert (identity.checkpoint_digest, identity.dtype, identity.numerics_digest) == ("digest", "f32", "numerics")
        assert (identity.world, identity.page_rows, identity.drafts) == (1, 64, False)
        if kind == "process":
            assert identity.config_json == '{"one_thread": true}'
        assert manager.hello.address == worker.address
        assert progress == [(0, 4000), (2000, 4000), (4000, 4000)]

        manager.say(term=pb.TermGranted(term=1, key=b"key"))
        async with net.channel(worker.address) as channel:
            status = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert status.status == health_pb2.HealthCheckResponse.SERVING
            rounds = Rounds(channel)
            assert await rounds.open(epoch=EPOCH) == 0
            decode = rw.Operation(decode=rw.Decode(lanes=[0, 1], rows=1, logits=rw.LOGITS_SCORES))
            await rounds.send(1, operations=[rw.Operation(ping=rw.Ping()), decode])
            result = await rounds.result()
            assert result.seq == 1
            assert [each.digest for each in result.results] == [1, 2**64 - 1]
            assert list(result.results[1].tokens) == [1001, 1001]
            assert result.results[1].scores.best == b"best"
            manager.say(stop=pb.Stop(reason="the operator stops the group", orderly=True))
            assert await asyncio.wait_for(worker.ended(), 10) is None
        assert {beat.state for beat in manager.heartbeats} >= {"serving"} or manager.heartbeats
    finally:
        await worker.stop()
