"""The front's life over a fake manager and a fake engine: join, load, lay out, serve, end."""

import asyncio

import grpc
import pytest
from front_harness import EPOCH, FOLDER, FakeManager, Rounds, bind, ended, group, make_worker, opened, until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from latentpool import net
from latentpool.errors import ConfigError, EpochError, HandshakeError
from latentpool.v1 import pool_manager_pb2 as pb
from latentpool.v1 import rank_worker_pb2 as rw
from services.rank_worker.exchange.inproc import Hub


@pytest.fixture(autouse=True)
def _children_find_the_fake(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", FOLDER)


@pytest.mark.parametrize("kind", ["process", "thread"])
async def test_a_life_from_join_to_an_orderly_stop(tmp_path, kind):
    manager = FakeManager(secret=b"s")
    await manager.start()
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
            assert await ended(worker) is None
    finally:
        await worker.stop()
        await manager.server.stop(0)


async def test_a_wrong_secret_is_refused_in_the_managers_words_and_not_retried(tmp_path):
    async with group(tmp_path, FakeManager(secret=b"right"), secret=b"wrong") as (manager, worker):
        error = await ended(worker)
        assert isinstance(error, HandshakeError)
        assert manager.address in str(error)
        assert "the secret is another one" in str(error)
        await asyncio.sleep(0.3)
        assert manager.joins == 1


async def test_a_manager_that_does_not_know_the_secret_is_not_followed(tmp_path):
    manager = FakeManager(secret=b"right")
    manager.proves_with = b"guessed"
    async with group(tmp_path, manager, secret=b"right") as (_, worker):
        error = await ended(worker)
        assert isinstance(error, HandshakeError)
        assert "does not know this group's secret" in str(error)
        assert manager.heard.empty()


async def test_a_refused_join_ends_the_worker_with_the_reason(tmp_path):
    refusal = (grpc.StatusCode.FAILED_PRECONDITION, "rank 0 has joined already")
    async with group(tmp_path, FakeManager(refuse=refusal)) as (manager, worker):
        error = await ended(worker)
        assert isinstance(error, HandshakeError)
        assert "refuses rank 0: rank 0 has joined already" in str(error)
        assert manager.joins == 1


async def test_an_address_that_is_no_pool_manager_is_named(tmp_path):
    server = net.server()
    address = net.bind(server, "127.0.0.1:0", "nothing")
    await server.start()
    worker = make_worker(tmp_path, address, Hub(1))
    await worker.start()
    error = await ended(worker)
    await worker.stop()
    await server.stop(0)
    assert isinstance(error, HandshakeError)
    assert f"{address} is not a pool manager" in str(error)


async def test_a_worker_waits_for_its_manager(tmp_path):
    probe = FakeManager()
    address = await probe.start()
    await probe.server.stop(0)
    worker = make_worker(tmp_path, address, Hub(1))
    await worker.start()
    await asyncio.sleep(0.5)
    manager = FakeManager()
    await manager.start(address)
    try:
        await manager.ready()
    finally:
        await worker.stop()
        await manager.server.stop(0)


async def test_a_lost_manager_ends_the_epoch(tmp_path):
    async with group(tmp_path) as (manager, worker):
        await manager.ready()
        await manager.server.stop(0)
        error = await ended(worker)
        assert isinstance(error, EpochError)
        assert f"lost the pool manager at {manager.address}" in str(error)


async def test_a_stop_that_is_not_orderly_says_why(tmp_path):
    async with group(tmp_path) as (manager, worker):
        await manager.ready()
        async with opened(worker, manager) as rounds:
            manager.say(stop=pb.Stop(reason="rank 1 was lost", orderly=False))
            error = await ended(worker)
            assert (type(error), str(error)) == (EpochError, "rank 1 was lost")
            assert await rounds.refused() == (grpc.StatusCode.UNAVAILABLE, "rank 1 was lost")


async def test_the_operators_stop_is_told_to_the_manager_and_answers_what_was_taken(tmp_path):
    async with group(tmp_path) as (manager, worker):
        await manager.ready()
        async with opened(worker, manager) as rounds:
            await rounds.send(1, operations=[bind(seconds=1)])
            await rounds.send(2)
            await until(lambda: worker._rounds._last_seq == 2)
            await worker.stop()
            assert [(await rounds.result()).seq for _ in range(2)] == [1, 2]
            assert await rounds.refused() == (grpc.StatusCode.UNAVAILABLE, "rank 0 was stopped by its operator")
        assert (await manager.hear("failed")).failed.message == "stopped by its operator"
        assert await ended(worker) is None


async def test_heartbeats_carry_state_bytes_and_growing_progress(tmp_path):
    async with group(tmp_path) as (manager, worker):
        await manager.ready()
        await until(lambda: any(beat.state == "serving" for beat in manager.heartbeats))
        beat = manager.heartbeats[-1]
        assert (beat.loaded_bytes, beat.total_bytes, beat.resident_bytes) == (4000, 4000, 789)
        async with opened(worker, manager) as rounds:
            for seq in (1, 2):
                await rounds.send(seq, operations=[rw.Operation(ping=rw.Ping())] * 5)
                await rounds.result()
            # ten operations, and one sign of life within each round
            await until(lambda: manager.heartbeats[-1].engine_progress == 12)
        progress = [beat.engine_progress for beat in manager.heartbeats]
        assert progress == sorted(progress)


async def test_the_advertised_address_is_what_the_router_dials(tmp_path):
    async with group(tmp_path, advertise="node7") as (manager, worker):
        await manager.ready()
        assert manager.hello.address == "node7:" + worker.address.rpartition(":")[2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 2, "world": 2}, "rank 2 of world 2"),
        ({"bind": "0.0.0.0:0", "secret": b"s"}, "bind an address of this host, or --advertise it"),
        ({"manager": "10.0.0.1:7000"}, "10.0.0.1:7000, which is not loopback"),
    ],
)
async def test_settings_that_are_not_allowed_are_named(tmp_path, settings, words):
    worker = make_worker(tmp_path, **({"manager": "127.0.0.1:1"} | settings))
    with pytest.raises(ConfigError, match=words):
        await worker.start()
    await worker.stop()


async def test_a_taken_port_is_named_and_leaves_nothing(tmp_path):
    async with group(tmp_path) as (manager, worker):
        second = make_worker(tmp_path, manager.address, bind=worker.address)
        with pytest.raises(ConfigError, match=f"rank worker 0 cannot listen on {worker.address}"):
            await second.start()
        await second.stop()
        assert second.engine_pid is None
