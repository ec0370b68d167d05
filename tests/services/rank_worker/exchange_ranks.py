"""Ranks for the exchange's tests: each owns one exchange and obeys commands, in a thread (inproc) or a process (ucx).

What travels is a pattern that the receiver makes again from (source, target, channel, round), so nothing that a test compares
went through the exchange twice.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from services.rank_worker.exchange.base import Exchange, Slot
from services.rank_worker.exchange.inproc import Hub

UNTOUCHED = 0xA5
BROADCAST = 255


def pattern(source: int, target: int, channel: str, round_: int, size: int) -> np.ndarray:
    """uint8 [size]: different at every 4-byte word and for every argument."""
    salt = zlib.crc32(f"{source} {target} {channel} {round_}".encode())
    words = np.arange((size + 3) // 4, dtype=np.uint32)
    words *= np.uint32(2654435761)
    words += np.uint32(salt)
    return words.view(np.uint8)[:size]


def counts_of(seed: int, round_: int, channel: str, world: int, most: int) -> np.ndarray:
    """int [source, target]: what travels in a round; a third of the blocks are empty or full."""
    rng = np.random.default_rng([seed, round_, zlib.crc32(channel.encode())])
    counts = rng.integers(0, most + 1, (world, world))
    kind = rng.integers(0, 6, (world, world))
    counts[kind == 0] = 0
    counts[kind == 1] = most
    return counts


class Rank:
    """The commands. Everything that goes wrong in the data is told in words, an empty list meaning all is well."""

    def __init__(self, rank: int, make: Callable[[int, int], Exchange]) -> None:
        self._rank = rank
        self._make = make
        self._slots: dict[str, tuple[Slot, Slot]] = {}
        self._expected: dict[tuple[str, int], tuple[int, list[int]]] = {}

    def make(self, world: int) -> bytes:
        self._slots, self._expected = {}, {}
        self._exchange = self._make(self._rank, world)
        return self._exchange.address

    def prepare(self, name: str, shape: tuple[int, ...], dtype: str, each: bool) -> None:
        import ml_dtypes  # noqa: F401  (registers bfloat16)

        self._slots[name] = self._exchange.prepare(name, shape, np.dtype(dtype), each=each)

    def connect(self, addresses: list[bytes], epoch: int, deadline: float) -> None:
        self._exchange.connect(addresses, epoch, deadline)

    def enqueue(self, name: str, parity: int, round_: int, send: list[int], recv: list[int]) -> None:
        slot = self._slots[name][parity]
        recv_bytes = slot.recv.view(np.uint8) if slot.recv.size else slot.recv
        recv_bytes[...] = UNTOUCHED
        blocks = range(len(send)) if self._each(slot) else [BROADCAST]
        for target in blocks:
            block = slot.send if target == BROADCAST else slot.send[target]
            if block.size:
                flat = block.reshape(-1).view(np.uint8)
                flat[...] = pattern(self._rank, target, name, round_, flat.size)
        self._exchange.enqueue(slot, send, recv)
        self._expected[name, parity] = (round_, list(recv))

    def _each(self, slot: Slot) -> bool:
        return slot.send.ndim == slot.recv.ndim

    def wait(self, name: str, parity: int, deadline: float) -> list[str]:
        slot = self._slots[name][parity]
        self._exchange.wait(slot, deadline)
        round_, recv = self._expected[name, parity]
        target = self._rank if self._each(slot) else BROADCAST
        wrong = []
        for source, block in enumerate(slot.recv):
            if not block.size:
                continue
            flat = block.reshape(-1).view(np.uint8)
            travelled = 0 if source == self._rank else recv[source] * (flat.size // len(block))
            if not np.array_equal(flat[:travelled], pattern(source, target, name, round_, travelled)):
                wrong.append(f"{name}, round {round_}: bytes from {source} to {self._rank} differ")
            if not (flat[travelled:] == UNTOUCHED).all():
                wrong.append(f"{name}, round {round_}: bytes behind those from {source} were touched")
        return wrong

    def soak(self, world: int, rounds: int, seed: int) -> list[str]:
        """Rounds on all channels: enqueues in a fixed order, waits in an order of this rank's own, a round late."""
        names = list(self._slots)
        order = np.random.default_rng([seed, self._rank])
        wrong: list[str] = []
        flying: list[tuple[str, int]] = []
        for round_ in range(rounds):
            for name in names:
                counts = counts_of(seed, round_, name, world, len(self._slots[name][0].recv[0]))
                self.enqueue(name, round_ % 2, round_, counts[self._rank].tolist(), counts[:, self._rank].tolist())
            for at in order.permutation(len(flying)):
                wrong += self.wait(*flying[at], 20.0)
            flying = [(name, round_ % 2) for name in names]
        for at in order.permutation(len(flying)):
            wrong += self.wait(*flying[at], 20.0)
        return wrong

    def attempt(self, method: str, *arguments: Any) -> None:
        """Calls the exchange itself; slots are given as (name, parity)."""
        slots = [self._slots[a[0]][a[1]] if isinstance(a, tuple) and a and isinstance(a[0], str) else a for a in arguments]
        getattr(self._exchange, method)(*slots)

    def replace(self, name: str, buffer: str) -> None:
        slot = self._slots[name][0]
        setattr(slot, buffer, getattr(slot, buffer).copy())

    def freeze_recv(self, name: str) -> None:
        self._slots[name][0].recv.flags.writeable = False

    def close(self) -> None:
        self._exchange.close()

    def abort(self) -> None:
        self._exchange.abort()

    def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def threads(self) -> int:
        return len(os.listdir("/proc/self/task"))

    def abandoned(self, name: str) -> list[bool]:
        """Whether the receive buffer of each parity is kept for ever."""
        from services.rank_worker.exchange import ucx

        kept = [one for one in ucx._abandoned if isinstance(one, np.ndarray)]
        return [any(np.shares_memory(one, slot.recv) for one in kept) for slot in self._slots[name]]

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def leave(self) -> None:
        """Ends without a word to the peers."""
        os._exit(0)


def obey(rank: Rank, take: Callable[[], Any], give: Callable[[Any], None]) -> None:
    """Commands until None."""
    while (command := take()) is not None:
        name, arguments = command
        try:
            give(("done", getattr(rank, name)(*arguments)))
        except Exception as error:
            give((type(error).__name__, str(error), getattr(error, "rank", None)))


class ProcessRank:
    """A rank in a process of its own, over UCX."""

    def __init__(self, rank: int, settings: dict[str, str] | None = None, net_devices: str = "lo") -> None:
        ours, theirs = Pipe()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
        path = os.pathsep.join([str(Path(__file__).parents[3]), clean.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(rank), str(theirs.fileno()), net_devices],
            pass_fds=[theirs.fileno()],
            env={**clean, **(settings or {}), "PYTHONPATH": path},
        )
        theirs.close()
        self._pipe = ours

    def post(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def reset(self) -> None:
        """Ready for the next test, or killed."""
        self.go_on()
        try:
            while self._pipe.poll(0):
                self._pipe.recv()
            self.post("abort")
            if self.get(10) != ("done", None):
                self.kill()
        except (TimeoutError, OSError, EOFError):
            self.kill()

    def get(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"no answer within {seconds} s")
        return self._pipe.recv()

    def vanish(self) -> None:
        self.post("leave")
        self.process.wait(10)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class ThreadRank:
    """A rank in a thread, over a hub."""

    def __init__(self, rank: int, hub: Hub) -> None:
        self._rank, self._hub = rank, hub
        self._commands: queue.Queue[Any] = queue.Queue()
        self._answers: queue.Queue[Any] = queue.Queue()
        worker = Rank(rank, lambda rank, world: hub.member(rank))
        self._thread = threading.Thread(target=obey, args=(worker, self._commands.get, self._answers.put), daemon=True)
        self._thread.start()

    def post(self, name: str, *arguments: Any) -> None:
        self._commands.put((name, arguments))

    def get(self, seconds: float) -> Any:
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no answer within {seconds} s") from None

    def vanish(self) -> None:
        self._hub.kill(self._rank)

    kill = vanish

    def stop(self) -> None:
        """A thread that is given no command is as silent as a stopped process."""

    def go_on(self) -> None:
        pass

    def end(self) -> None:
        self._commands.put(None)
        self._thread.join(10)


class Group:
    """Ranks 0 to world - 1 of one exchange."""

    def __init__(self, ranks: list[Any]) -> None:
        self.ranks = ranks
        self.world = len(ranks)

    def one(self, rank: int, name: str, *arguments: Any, seconds: float = 30.0) -> Any:
        """The command's result on one rank; an error as (class name, message, rank that it names)."""
        self.ranks[rank].post(name, *arguments)
        return self.answer(rank, seconds)

    def answer(self, rank: int, seconds: float = 30.0) -> Any:
        answer = self.ranks[rank].get(seconds)
        return answer[1] if answer[0] == "done" else answer

    def all(self, name: str, *arguments: Any, seconds: float = 30.0) -> list[Any]:
        """The command on all ranks at once."""
        for rank in self.ranks:
            rank.post(name, *arguments)
        return [self.answer(rank, seconds) for rank in range(self.world)]

    def make(self) -> list[bytes]:
        return self.all("make", self.world)

    def connect(self, epoch: int = 1) -> None:
        """A fresh exchange on all ranks, without channels."""
        addresses = self.make()
        assert self.all("connect", addresses, epoch, 10.0) == [None] * self.world

    def prepare(self, name: str, shape: tuple[int, ...], dtype: str = "uint8", each: bool = False) -> None:
        assert self.all("prepare", name, shape, dtype, each) == [None] * self.world

    def exchange(self, name: str, parity: int, round_: int, rows: int) -> list[str]:
        """The same rows to and from every peer; what is wrong."""
        counts = [rows] * self.world
        assert self.all("enqueue", name, parity, round_, counts, counts) == [None] * self.world
        return [one for wrong in self.all("wait", name, parity, 20.0) for one in wrong]


def main() -> None:
    from services.rank_worker.exchange.ucx import make

    rank, fd, net_devices = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    with Connection(fd) as pipe:

        def take() -> Any:
            try:
                return pipe.recv()
            except EOFError:
                return None

        obey(Rank(rank, lambda rank, world: make(rank, world, net_devices)), take, pipe.send)


if __name__ == "__main__":
    main()
