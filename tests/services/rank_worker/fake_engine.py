"""An engine that computes nothing: the frames, the order and the ends of a real one, as a process or a thread.

`model` in its settings is a JSON file: {"at": STAGE, "do": FAULT, ...}. STAGE: prepare, load, lay_out, a round's seq as
"round 3". FAULT: exit (with "code"), raise, hang (never reads again; touches MODEL.hangs), fail (a Failed frame with
"setup", "peer"), garbage. Rounds answer with a digest of their seq; a Decode answers with one token a lane, 1000 + seq.
"""

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec

from services.rank_worker import frames


class EngineSettings(msgspec.Struct, frozen=True):
    model: str
    rank: int
    world: int
    dtype: str | None
    kv_cache: str | None
    memory_bytes: int | None
    page_rows: int
    chunk_rows: int
    transport: str
    net_devices: str
    dead_after: float
    staging_rows: int
    audit: bool


class Engine:
    def __init__(self, sock: socket.socket, settings: EngineSettings) -> None:
        self.sock = sock
        self.stream = sock.makefile("rb")
        self.settings = settings
        self.script = json.loads(Path(settings.model).read_text())
        self.released = threading.Event()

    def send(self, frame: object) -> None:
        self.sock.sendall(frames.encode(frame))

    def next(self) -> frames.ToEngine | None:
        head = self.stream.read(4)
        return frames.decode_to_engine(self.stream.read(frames.frame_length(head))) if len(head) == 4 else None

    def reach(self, stage: str) -> None:
        if self.script.get("at") != stage:
            return
        match self.script["do"]:
            case "exit":
                raise SystemExit(self.script["code"])
            case "raise":
                raise RuntimeError("the fake engine has a bug")
            case "hang":
                Path(self.settings.model + ".hangs").touch()
                while True:
                    time.sleep(1)
            case "fail":
                self.send(frames.Failed("the fake engine fails", self.script["setup"], self.script.get("peer", -1)))
                raise SystemExit(2)
            case "garbage":
                self.sock.sendall(b"\x04\x00\x00\x00junk")
                time.sleep(60)

    def run(self) -> int:
        self.reach("prepare")
        one_thread = all(os.environ.get(name) == "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"))
        self.send(frames.Prepared("digest", json.dumps({"one_thread": one_thread}), "f32", "f32", "numerics", 64, 4000))
        while (frame := self.next()) is not None:
            match frame:
                case frames.Load():
                    for loaded in (0, 2000, 4000):
                        self.send(frames.Loading(loaded, 4000))
                        self.reach("load")
                    self.send(frames.Loaded(room_bytes=123, resident_bytes=456, link_address=b"link"))
                case frames.LayOut():
                    self.reach("lay_out")
                    self.layout = frame
                    self.send(frames.Ready(789))
                case frames.Round():
                    self.execute(frame)
                case frames.Close():
                    return 0
        return 1

    def execute(self, frame: frames.Round) -> None:
        self.reach(f"round {frame.seq}")
        results = []
        for operation in frame.operations:
            match operation:
                case frames.Decode(lanes=lanes):
                    scores = frames.Scores(b"max", b"sum", b"best", b"next", b"raw") if operation.logits else None
                    results.append(frames.OperationResult(2**64 - frame.seq, [1000 + frame.seq] * len(lanes), scores))
                case frames.Bind(seed=seconds):  # takes as many seconds as the seed says
                    time.sleep(seconds)
                    results.append(frames.OperationResult(0, []))
                case _:
                    results.append(frames.OperationResult(frame.seq, []))
        if len(frame.operations) > 3:
            self.send(frames.Progress(len(frame.operations)))
        self.send(frames.RoundResult(frame.seq, results, 0.5, 0.25, frames.LinkBytes()))


def serve(sock: socket.socket, settings: EngineSettings, exchange: object) -> int:
    try:
        return Engine(sock, settings).run()
    except SystemExit as end:
        return int(end.code)


def main(arguments: list[str]) -> int:
    settings = msgspec.json.decode(arguments[0], type=EngineSettings)
    return serve(socket.socket(fileno=int(arguments[1])), settings, None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
