"""The engine: owns the device, the arena and the data plane of one rank, and speaks frames with its front.

Run by the front as a child process, `python -m services.rank_worker.engine SETTINGS_JSON FD`, or as a thread for the
in-process data plane. One thread reads the socket, the calling thread computes. It never sees protobuf or gRPC, and it ends
when its front's end of the socket does. Order of a start: design section 4.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kernels.numpy import NumpyKernels
from latentpool.errors import LatentPoolError, LinkError, SetupError
from latentpool.geometry import BLOCK, DTYPE_BYTES, Dtype, Geometry
from services.rank_worker import frames, memory
from services.rank_worker.arena import Arena
from services.rank_worker.exchange.base import Exchange
from services.rank_worker.limits import check_rows
from services.rank_worker.model.checkpoint import load_shard, open_checkpoint
from services.rank_worker.model.model import Model
from services.rank_worker.model.workspace import workspace_bytes, workspace_rows
from services.rank_worker.numerics import numerics_digest
from services.rank_worker.rounds import Rounds
from services.rank_worker.split.fetch import least_staging_rows
from services.rank_worker.split.split import split_bytes

_PROGRESS_SECONDS = 0.5
_ORPHAN_SECONDS = 2.0
_CONNECT_SECONDS = 30.0


class EngineSettings(msgspec.Struct, frozen=True):
    """What a front tells its engine. dtype and kv_cache None: the checkpoint's dtype, and the compute dtype. memory_bytes
    None: half of what the host has available. staging_rows: history rows that a fetching chunk holds at a time; audit:
    whether ranks hash the rows that prompt chunks read; both of split groups."""

    model: str
    rank: int
    world: int
    dtype: Dtype | None
    kv_cache: Dtype | None
    memory_bytes: int | None
    page_rows: int
    chunk_rows: int
    transport: str
    net_devices: str
    dead_after: float
    staging_rows: int
    audit: bool


class _Front:
    """The socket to the front: frames in through one reader thread, frames out from the computing thread."""

    def __init__(self, sock: socket.socket, orphaned: threading.Event) -> None:
        self._sock = sock
        self._frames: queue.SimpleQueue[frames.ToEngine | None] = queue.SimpleQueue()
        self._orphaned = orphaned
        threading.Thread(target=self._read, name="front reader", daemon=True).start()

    def next(self) -> frames.ToEngine | None:
        """The next frame; blocks. None: the front is gone."""
        return self._frames.get()

    def send(self, frame: frames.ToFront) -> None:
        """Raises OSError if the front is gone."""
        self._sock.sendall(frames.encode(frame))

    def _read(self) -> None:
        try:
            with self._sock.makefile("rb") as stream:
                while len(head := stream.read(4)) == 4:
                    body = stream.read(frames.frame_length(head))
                    self._frames.put(frames.decode_to_engine(body))
        except (OSError, ValueError):
            pass  # the same as the end of the stream: nothing more can be understood
        finally:
            self._orphaned.set()
            self._frames.put(None)


class Engine:
    """One rank's engine through its life: prepare, load, lay out, execute rounds."""

    def __init__(self, settings: EngineSettings, exchange: Exchange, front: _Front) -> None:
        self._settings = settings
        self._exchange = exchange
        self._front = front
        self._operations = 0
        self._told = time.monotonic()

    # ---- start -----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Reads config and headers, probes the numerics, and tells the front who this is. Raises SetupError."""
        settings = self._settings
        # The draft layer is loaded once drafts are built; until then a group serves without it.
        self._geometry = geometry = Geometry.from_file(settings.model).without_drafts()
        geometry.check_world(settings.world)
        check_rows(geometry, settings.world, settings.page_rows, settings.chunk_rows, settings.staging_rows)
        dtype = settings.dtype or geometry.dtype
        self._kv_dtype = settings.kv_cache or dtype
        self._kernels = NumpyKernels(dtype)
        self._checkpoint = open_checkpoint(Path(settings.model), geometry)
        self._numerics = numerics_digest(geometry, self._kernels, self._kv_dtype, settings.world)
        self._total_bytes = self._checkpoint.shard_bytes(settings.world, settings.rank)
        self._front.send(
            frames.Prepared(
                checkpoint_digest=self._checkpoint.digest,
                config_json=(Path(settings.model) / "config.json").read_text(encoding="utf-8"),
                dtype=dtype,
                kv_dtype=self._kv_dtype,
                numerics_digest=self._numerics,
                page_rows=settings.page_rows,
                total_bytes=self._total_bytes,
            )
        )

    def load(self) -> None:
        """Reads this rank's shard and tells the front what room is left. Raises SetupError."""
        settings, geometry = self._settings, self._geometry
        before = memory.resident_bytes()
        assumed = 0 if settings.memory_bytes is not None else memory.default_budget()
        self._model = self._load_model()
        # Engines that are threads of one process each count what they added to it; another may have freed more meanwhile.
        resident = max(0, memory.resident_bytes() - (before if settings.transport == "inproc" else 0))
        spare = 2 * settings.page_rows * geometry.row_bytes(self._kv_dtype)
        first_lane = geometry.lane_fixed_bytes(settings.world, settings.rank, self._kernels.dtype)
        room = memory.room(settings.memory_bytes or assumed, resident, self._work_bytes(), first_lane, spare)
        self._front.send(frames.Loaded(room, resident, self._exchange.address, assumed))

    def _load_model(self) -> Model:
        def progress(done: int, total: int) -> None:
            self._front.send(frames.Loading(done, total))

        shard = load_shard(self._checkpoint, self._settings.world, self._settings.rank, self._kernels, progress)
        return Model(self._geometry, self._kernels, shard, self._settings.world, self._settings.rank)

    def _work_bytes(self) -> int:
        """Scratch of the largest pass, the link buffers of its sums (own and W received blocks, two parities), and what a
        split needs: the plan, which decides about it, is made of what is left."""
        g, settings, world = self._geometry, self._settings, self._settings.world
        scratch = workspace_bytes(g, world, settings.rank, workspace_rows(g, settings.chunk_rows, 1))
        sums = 2 * (1 + world) * settings.chunk_rows * g.hidden * DTYPE_BYTES["f32"]
        if world == 1:
            return scratch + sums
        element = DTYPE_BYTES[self._kernels.dtype]
        staging = self._staging_rows(g.max_context)
        return scratch + sums + split_bytes(g, self._kv_dtype, element, world, settings.chunk_rows, staging)

    def _staging_rows(self, context: int) -> int:
        """Rows of the staging buffer: as set, but no more than a conversation can have."""
        most = max(least_staging_rows(self._geometry), -(-context // BLOCK) * BLOCK)
        return min(self._settings.staging_rows, most)

    def lay_out(self, frame: frames.LayOut) -> None:
        """Allocates the arena of the plan and connects the links. Raises LinkError."""
        settings = self._settings
        arena = Arena(
            self._geometry, self._kernels, self._kv_dtype, world=settings.world, rank=settings.rank,
            pages=frame.pages, lanes=frame.lanes, context=frame.context, page_rows=settings.page_rows, split=frame.split,
        )  # fmt: skip
        self._rounds = Rounds(
            self._geometry, self._kernels, self._model, arena, self._exchange,
            chunk_rows=settings.chunk_rows, deadline=settings.dead_after, tick=self._tick,
            staging_rows=self._staging_rows(frame.context), audit=settings.audit,
            key=f"{self._numerics} {self._kernels.dtype} {self._kv_dtype}",
        )  # fmt: skip
        self._exchange.connect(frame.link_addresses, frame.epoch, _CONNECT_SECONDS)
        self._front.send(frames.Ready(memory.resident_bytes()))

    # ---- work ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Counts finished work and, in a long round, shows the front that it goes on."""
        self._operations += 1
        now = time.monotonic()
        if now - self._told >= _PROGRESS_SECONDS:
            self._told = now
            self._front.send(frames.Progress(self._operations))

    def run(self) -> int:
        """Serves frames until Close (0) or the front is gone (1). Raises LatentPoolError."""
        self.prepare()
        while True:
            match self._front.next():
                case frames.Load():
                    self.load()
                case frames.LayOut() as frame:
                    self.lay_out(frame)
                case frames.Round() as frame:
                    self._front.send(self._rounds.execute(frame))
                case frames.Close():
                    self._exchange.close()
                    return 0
                case None:
                    self._exchange.abort()
                    return 1


def serve(sock: socket.socket, settings: EngineSettings, exchange: Exchange) -> int:
    """Runs an engine on `sock` until it ends; returns its exit code: 0 closed, 1 the front went away, 2 failed."""
    return _serve(_Front(sock, threading.Event()), settings, lambda: exchange)


def _serve(front: _Front, settings: EngineSettings, make_exchange: Callable[[], Exchange]) -> int:
    exchange: Exchange | None = None
    try:
        exchange = make_exchange()
        return Engine(settings, exchange, front).run()
    except LatentPoolError as error:
        peer = error.rank if isinstance(error, LinkError) else None
        failed = frames.Failed(str(error), isinstance(error, SetupError), -1 if peer is None else peer)
    except OSError as error:
        failed = frames.Failed(f"the engine lost its front or a file: {error}", False)
    except MemoryError as error:
        failed = frames.Failed(f"out of memory: {error}; lower --memory", True)
    if exchange is not None:
        exchange.abort()
    try:
        front.send(failed)
    except OSError:
        return 1
    return 2


def main(arguments: list[str]) -> int:
    """The child process: SETTINGS_JSON FD."""
    settings = msgspec.json.decode(arguments[0], type=EngineSettings)
    orphaned = threading.Event()
    front = _Front(socket.socket(fileno=int(arguments[1])), orphaned)
    threading.Thread(target=_end_with_front, args=(orphaned,), daemon=True).start()

    def make_exchange() -> Exchange:
        from services.rank_worker.exchange import ucx

        return ucx.make(settings.rank, settings.world, settings.net_devices)

    return _serve(front, settings, make_exchange)


def _end_with_front(orphaned: threading.Event) -> None:
    """An engine in the middle of a long product or a wait does not read frames: when its front is gone it has this long to
    end by itself."""
    orphaned.wait()
    time.sleep(_ORPHAN_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
