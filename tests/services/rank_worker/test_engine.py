"""The engine behind its socket: frames in, frames out, and how it ends."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import oracle

from services.rank_worker import frames
from services.rank_worker.engine import EngineSettings, serve
from services.rank_worker.exchange.inproc import Hub

MODEL, EXPECTED = oracle("tiny")
PROMPT = EXPECTED["input_ids"].tolist()


def settings(model: Path = MODEL, **changes: Any) -> EngineSettings:
    values = {
        "model": str(model), "rank": 0, "world": 1, "dtype": "f32", "kv_cache": None, "memory_bytes": 4 << 30,
        "page_rows": 64, "chunk_rows": 256,
        "transport": "inproc", "net_devices": "lo", "dead_after": 5.0,
        "staging_rows": 256, "audit": True,
    }  # fmt: skip
    return EngineSettings(**(values | changes))  # type: ignore[arg-type]


class Front:
    """The other end of an engine's socket."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.stream = end.makefile("rb")
        end.settimeout(30.0)

    def send(self, frame: Any) -> None:
        self.end.sendall(frames.encode(frame))

    def expect(self, kind: type[Any]) -> Any:
        """The next frame of a kind; Loading and Progress on the way are skipped."""
        while True:
            head = self.stream.read(4)
            assert len(head) == 4, "the engine ended"
            frame = frames.decode_to_front(self.stream.read(frames.frame_length(head)))
            if isinstance(frame, kind):
                return frame
            assert isinstance(frame, frames.Loading | frames.Progress), frame

    def close(self) -> None:
        self.stream.close()
        self.end.close()


class Thread:
    """An engine in a thread."""

    def __init__(self, engine_settings: EngineSettings) -> None:
        ours, theirs = socket.socketpair()
        self.front = Front(ours)
        self.code: int | None = None
        exchange = Hub(engine_settings.world).member(engine_settings.rank)

        def run() -> None:
            self.code = serve(theirs, engine_settings, exchange)
            theirs.close()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def end(self) -> int | None:
        self.thread.join(10.0)
        assert not self.thread.is_alive()
        return self.code


@pytest.fixture
def engine() -> Iterator[Thread]:
    thread = Thread(settings())
    yield thread
    thread.front.close()
    thread.end()


def start(front: Front) -> frames.Loaded:
    front.expect(frames.Prepared)
    front.send(frames.Load())
    loaded = front.expect(frames.Loaded)
    front.send(frames.LayOut(8, 1, 256, False, 1, [loaded.link_address]))
    front.expect(frames.Ready)
    return loaded  # type: ignore[no-any-return]


def test_a_life_from_prepared_to_close(engine: Thread) -> None:
    loaded = start(engine.front)
    assert 0 < loaded.room_bytes < 4 << 30
    greedy = EXPECTED["greedy.ids"].tolist()
    engine.front.send(
        frames.Round(1, 1, 1, [frames.Bind(0, 1, 0.0, 0, 0), frames.Table(0, 0, [5, 2]), frames.Prompt(0, 0, PROMPT, True)])
    )
    first = engine.front.expect(frames.RoundResult)
    assert first.seq == 1
    assert [r.tokens for r in first.results] == [[], [], greedy[:1]]
    assert first.compute_seconds > 0
    for seq in (2, 3):  # queued together, answered in order
        engine.front.send(frames.Round(1, 1, seq, [frames.Decode([0], 1, [])]))
    assert [engine.front.expect(frames.RoundResult).results[0].tokens for _ in (2, 3)] == [[greedy[1]], [greedy[2]]]
    engine.front.send(frames.Close())
    assert engine.end() == 0


def test_it_ends_when_its_front_does(engine: Thread) -> None:
    start(engine.front)
    engine.front.close()
    assert engine.end() == 1


def test_a_broken_round_is_the_last(engine: Thread) -> None:
    start(engine.front)
    engine.front.send(frames.Round(1, 1, 1, [frames.Free(0)]))
    failed = engine.front.expect(frames.Failed)
    assert not failed.setup
    assert failed.message == "round 1, operation 0 (free): lane 0 runs nothing"
    assert engine.end() == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": 1 << 20}, "--memory 1.00 MiB is too little"),
        ({"memory_bytes": 1 << 50}, "--memory 1024.00 TiB is more than this host has"),
        ({"page_rows": 100}, "--page-rows 100: 64, 128, 256 or 512"),
        ({"chunk_rows": 100}, "--chunk-rows 100: a multiple of 64"),
        ({"world": 2, "staging_rows": 64}, "--staging-rows 64: the longest selections of this model need 128"),
        ({"world": 5}, "5 ranks is more than num_attention_heads = 4"),
    ],
)
def test_bad_settings_are_the_operators_fault(changes: dict[str, Any], message: str) -> None:
    thread = Thread(settings(**changes))
    if "memory_bytes" in changes:
        thread.front.expect(frames.Prepared)
        thread.front.send(frames.Load())
    failed = thread.front.expect(frames.Failed)
    assert failed.setup
    assert message in failed.message
    assert thread.end() == 2


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    thread = Thread(settings(tmp_path / "model"))
    failed = thread.front.expect(frames.Failed)
    assert failed.setup
    assert "model.safetensors" in failed.message
    assert thread.end() == 2


def test_the_child_process_speaks_the_same_frames_and_dies_with_its_front() -> None:
    ours, theirs = socket.socketpair()
    front = Front(ours)
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "services.rank_worker.engine",
            msgspec.json.encode(settings(transport="ucx")).decode(),
            str(theirs.fileno()),
        ],
        pass_fds=[theirs.fileno()],
    )
    try:
        theirs.close()
        start(front)
        front.send(frames.Round(1, 1, 1, [frames.Ping()]))
        assert front.expect(frames.RoundResult).seq == 1
        front.close()
        assert child.wait(10.0) == 1
    finally:
        child.kill()
        child.wait()


def test_a_network_device_that_is_not_there_is_told_to_the_front() -> None:
    ours, theirs = socket.socketpair()
    wrong = msgspec.json.encode(settings(net_devices="absent0", transport="ucx")).decode()
    module = "services.rank_worker.engine"
    with theirs:
        child = subprocess.Popen([sys.executable, "-m", module, wrong, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    front = Front(ours)
    failed = front.expect(frames.Failed)
    assert "network device 'absent0' for the link: this host has" in failed.message
    assert failed.setup
    assert child.wait(30) == 2
    front.close()
