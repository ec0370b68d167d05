"""Engines that die or hang, operators that stop at any stage, fronts that are killed: always told, never a thing left."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import grpc
import psutil
import pytest
from front_harness import FOLDER, FakeManager, bind, ended, group, make_worker, opened, until

from latentpool.errors import EpochError, LinkError, SetupError
from services.rank_worker import front

KILLED = "engine of rank 0 was killed by SIGKILL"


@pytest.fixture(autouse=True)
def _children_find_the_fake(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", FOLDER)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    assert not set(psutil.Process().children(recursive=True)) - before


async def test_an_idle_engine_that_is_killed_ends_the_epoch(tmp_path):
    async with group(tmp_path, process=True) as (manager, worker):
        await manager.ready()
        os.kill(worker.engine_pid, signal.SIGKILL)
        error = await ended(worker)
        assert type(error) is EpochError
        assert KILLED in str(error)
        failed = (await manager.hear("failed")).failed
        assert KILLED in failed.message
        assert not failed.HasField("peer")


async def test_an_engine_that_is_frozen_in_a_round_ends_the_epoch_in_words(tmp_path):
    """It is alive, and no peer waits for it."""
    async with group(tmp_path, process=True, dead_after=0.5) as (manager, worker):
        await manager.ready()
        async with opened(worker, manager) as rounds:
            await rounds.send(1)
            assert (await rounds.result()).seq == 1
            os.kill(worker.engine_pid, signal.SIGSTOP)
            await asyncio.sleep(1.5)
            assert not worker._over, "an engine that owes nothing may be silent"
            await rounds.send(2)
            why = "engine of rank 0 does not answer: it has said nothing of round 2 for 1 s (twice --dead-after)"
            assert str(await ended(worker)) == why
            assert (await manager.hear("failed")).failed.message == why
            assert await rounds.refused() == (grpc.StatusCode.UNAVAILABLE, why)


async def test_an_engine_that_is_killed_while_it_loads(tmp_path):
    async with group(tmp_path, process=True, script={"at": "load", "do": "hang"}) as (manager, worker):
        await until(lambda: any(beat.state == "loading" for beat in manager.heartbeats))
        os.kill(worker.engine_pid, signal.SIGKILL)
        assert KILLED in str(await ended(worker))
        assert KILLED in (await manager.hear("failed")).failed.message


async def test_an_engine_that_is_killed_in_a_round_breaks_the_stream_with_the_reason(tmp_path):
    async with group(tmp_path, process=True) as (manager, worker):
        await manager.ready()
        async with opened(worker, manager) as rounds:
            await rounds.send(1)
            assert (await rounds.result()).seq == 1
            await rounds.send(2, operations=[bind(seconds=30)])
            await until(lambda: worker._rounds._last_seq == 2)
            os.kill(worker.engine_pid, signal.SIGKILL)
            code, words = await rounds.refused()
            assert code is grpc.StatusCode.UNAVAILABLE
            assert KILLED in words
            assert KILLED in str(await ended(worker))


async def test_an_engine_that_exits_before_the_manager_is_there(tmp_path):
    worker = make_worker(tmp_path, "127.0.0.1:1", script={"at": "prepare", "do": "exit", "code": 3})
    await worker.start()
    error = await ended(worker)
    await worker.stop()
    assert (type(error), str(error)) == (EpochError, "engine of rank 0 exited with 3")


async def test_an_engine_that_dies_while_the_manager_is_awaited(tmp_path):
    worker = make_worker(tmp_path, "127.0.0.1:1")
    await worker.start()
    await until(lambda: "pool manager" in worker._waiting_for)
    os.kill(worker.engine_pid, signal.SIGKILL)
    assert KILLED in str(await ended(worker))
    await worker.stop()


@pytest.mark.parametrize("process", [True, False], ids=["process", "thread"])
async def test_a_setup_failure_is_the_operators(tmp_path, process):
    script = {"at": "load", "do": "fail", "setup": True}
    async with group(tmp_path, process=process, script=script) as (manager, worker):
        error = await ended(worker)
        assert (type(error), str(error)) == (SetupError, "the fake engine fails")
        assert (await manager.hear("failed")).failed.message == "the fake engine fails"


async def test_a_failed_link_names_its_peer(tmp_path):
    script = {"at": "round 1", "do": "fail", "setup": False, "peer": 1}
    async with group(tmp_path, world=2, script=script) as (manager, worker):
        await manager.ready()
        async with opened(worker, manager) as rounds:
            await rounds.send(1)
            assert await rounds.refused() == (grpc.StatusCode.UNAVAILABLE, "the fake engine fails")
        error = await ended(worker)
        assert isinstance(error, LinkError)
        assert error.rank == 1
        assert (await manager.hear("failed")).failed.peer == 1


async def test_a_bug_in_a_thread_engine_is_told(tmp_path):
    async with group(tmp_path, script={"at": "lay_out", "do": "raise"}) as (_, worker):
        error = await ended(worker)
        assert str(error) == "engine of rank 0 failed: RuntimeError: the fake engine has a bug"


async def test_what_is_not_a_frame_ends_the_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(front, "_FLUSH", 0.1)
    async with group(tmp_path, process=True, script={"at": "lay_out", "do": "garbage"}) as (manager, worker):
        await manager.hear("loaded")
        error = await ended(worker)
        assert type(error) is EpochError
        assert "engine of rank 0 sent what is not a frame" in str(error)


async def test_a_terminals_ctrl_c_does_not_reach_the_engine(tmp_path):
    async with group(tmp_path, process=True) as (manager, worker):
        await manager.ready()
        os.kill(worker.engine_pid, signal.SIGINT)
        async with opened(worker, manager) as rounds:
            await rounds.send(1)
            assert (await rounds.result()).seq == 1


STAGES = {
    "engine prepares": {"at": "prepare", "do": "hang"},
    "manager absent": {},
    "engine loads": {"at": "load", "do": "hang"},
    "others load": {},
    "engine lays out": {"at": "lay_out", "do": "hang"},
    "serving": {},
    "in a round": {"at": "round 1", "do": "hang"},
}


async def reach(stage: str, manager: FakeManager, worker) -> None:
    match stage:
        case "engine prepares":
            await until(lambda: "headers" in worker._waiting_for)
        case "manager absent":
            await until(lambda: "pool manager" in worker._waiting_for)
        case "engine loads":
            await until(lambda: any(beat.state == "loading" for beat in manager.heartbeats))
        case "others load":
            await manager.hear("loaded")
        case "engine lays out":
            await until(lambda: any(beat.state == "laying out" for beat in manager.heartbeats))
        case _:
            await manager.ready()


@pytest.mark.parametrize("stage", STAGES)
async def test_a_stop_leaves_nothing_at_any_stage(tmp_path, stage, monkeypatch):
    monkeypatch.setattr(front, "_FLUSH", 0.3)
    process = psutil.Process()
    for turn in range(2):  # the first one pays for what gRPC keeps for ever
        manager = FakeManager(lay_out=stage != "others load")
        address = await manager.start()
        if stage == "manager absent":
            await manager.server.stop(0)
        worker = make_worker(tmp_path, address, script=STAGES[stage])
        await worker.start()
        await reach(stage, manager, worker)
        if stage == "in a round":
            async with opened(worker, manager) as rounds:
                await rounds.send(1)
                await until(lambda worker=worker: worker._rounds._last_seq == 1)
        await asyncio.gather(worker.stop(), worker.stop())
        await worker.stop()
        assert await ended(worker) is None
        assert not psutil.pid_exists(worker.engine_pid)
        await manager.server.stop(0)
        if turn == 0:
            files, tasks = process.num_fds(), len(asyncio.all_tasks())
    await until(lambda: process.num_fds() <= files, within=5)
    await until(lambda: len(asyncio.all_tasks()) <= tasks, within=5)


async def test_a_stop_before_a_start(tmp_path):
    worker = make_worker(tmp_path, "127.0.0.1:1")
    await worker.stop()
    assert await ended(worker) is None


FRONT = """
import asyncio, sys
from pathlib import Path
from front_harness import make_worker

async def main():
    worker = make_worker(Path(sys.argv[1]), "127.0.0.1:1", script={"at": "prepare", "do": "hang"})
    await worker.start()
    print(worker.engine_pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["at once", "once it hangs"])
def test_no_engine_outlives_a_killed_front(tmp_path, when):
    killed = subprocess.Popen([sys.executable, "-c", FRONT, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        engine = psutil.Process(int(killed.stdout.readline()))
        if when == "once it hangs":
            while not (tmp_path / "script.json.hangs").exists():
                time.sleep(0.01)
    finally:
        killed.kill()
        killed.wait()
        killed.stdout.close()
    try:
        engine.wait(timeout=10)
    except psutil.TimeoutExpired:
        engine.kill()
        raise
