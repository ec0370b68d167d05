"""The exchange between threads of one process: bytes are copied from the sender's link buffer to the receiver's.

A send is complete when its receiver has posted the matching receive, as for large messages on a real link: nothing is
buffered in between, so an engine that relies on buffering stops here too. All members share one lock; each waits on a
condition of its own.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from latentpool.errors import LinkError
from services.rank_worker.exchange.base import Exchange, Slot
from services.rank_worker.exchange.buffers import Channels, LinkSlot
from services.rank_worker.exchange.greeting import Greeting, dropped

CLOSE_SECONDS = 2.0
"""How long `close` waits for what is in flight."""


class Hub:
    """Makes the members of one group; they find each other by the addresses that it has given out."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._lock = threading.Lock()
        self._members: dict[bytes, _Member] = {}
        self._latest: dict[int, _Member] = {}
        self._serials = itertools.count(1)

    def member(self, rank: int) -> Exchange:
        """A new exchange for `rank`; after an abort it is a fresh one with an address of its own."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} of a world of {self.world}")
        with self._lock:
            address = f"inproc {id(self):x} {rank} {next(self._serials)}".encode()
            member = _Member(self._lock, self._members, rank, self.world, address)
            self._members[address] = self._latest[rank] = member
        return member

    def kill(self, rank: int) -> None:
        """Reports that the thread of `rank` died without close: its peers' waits fail as for a killed process."""
        with self._lock:
            self._latest[rank].leave(f"rank {rank} is gone", rank)


class _Member:
    """One rank. Everything that peers touch is guarded by the hub's lock."""

    def __init__(self, lock: threading.Lock, members: dict[bytes, _Member], rank: int, world: int, address: bytes) -> None:
        self.rank = rank
        self.world = world
        self.address = address
        self.changed = threading.Condition(lock)
        self.greetings: dict[int, Greeting] = {}
        self.posted: dict[tuple[bool, int, int, int], tuple[LinkSlot, NDArray[np.uint8]]] = {}
        self.left = False
        self.reason: tuple[str, int] | None = None
        self._lock = lock
        self._members = members
        self._channels = Channels(world)
        self._peers: dict[int, _Member] = {}
        self._sequence: dict[int, int] = {}
        self._waiting: dict[LinkSlot, set[tuple[bool, int]]] = {}
        self._broken: LinkError | None = None

    def prepare(self, name: str, shape: Sequence[int], dtype: np.dtype[np.generic], *, each: bool = False) -> tuple[Slot, Slot]:
        return self._channels.prepare(name, shape, dtype, each)

    def connect(self, addresses: Sequence[bytes], epoch: int, deadline: float) -> None:
        if self._peers or len(addresses) != self.world:
            raise ValueError(f"connect, once, with {self.world} addresses; these are {len(addresses)}")
        with self._lock:
            self._raise_if_broken()
            for peer, address in enumerate(addresses):
                if address not in self._members or self._members[address].rank != peer:
                    raise self._fail(f"the link address of rank {peer} is not one of this process's rank {peer}", peer)
            self._peers = {peer: self._members[address] for peer, address in enumerate(addresses) if peer != self.rank}
            mine = Greeting(self.rank, self.world, epoch)
            for other in self._peers.values():
                other.greetings[self.rank] = mine
                other.changed.notify()
            self._wait_until(
                lambda: self._peers.keys() <= self.greetings.keys(),
                deadline,
                self._ungreeted,
                f"did not answer the greeting within {deadline:g} s",
            )
            for peer in self._peers:
                refusal = mine.refusal(peer, self.greetings[peer])
                if refusal:
                    raise self._fail(refusal, peer)

    def enqueue(self, slot: Slot, send: Sequence[int], recv: Sequence[int]) -> None:
        assert isinstance(slot, LinkSlot)
        slot.check(self.rank, send, recv)
        with self._lock:
            self._raise_if_broken()
            if len(self._peers) != self.world - 1:
                raise ValueError(f"channel {slot.name}: connect before the first enqueue")
            self._raise_if_left({peer for peer in self._peers if send[peer] or recv[peer]})
            sequence = self._sequence[slot.channel] = self._sequence.get(slot.channel, 0) + 1
            slot.in_flight = True
            self._waiting[slot] = set()
            for peer, other in self._peers.items():
                if recv[peer] * slot.row_bytes:
                    mine = slot.recv_bytes[peer][: recv[peer] * slot.row_bytes]
                    self._post(other, False, peer, slot, sequence, mine)
                if send[peer] * slot.row_bytes:
                    mine = slot.send_bytes[peer][: send[peer] * slot.row_bytes]
                    self._post(other, True, peer, slot, sequence, mine)

    def _post(self, other: _Member, sends: bool, peer: int, slot: LinkSlot, sequence: int, mine: NDArray[np.uint8]) -> None:
        match = other.posted.pop((not sends, self.rank, slot.channel, sequence), None)
        if match is None:
            self.posted[sends, peer, slot.channel, sequence] = (slot, mine)
            self._waiting[slot].add((sends, peer))
            return
        their_slot, theirs = match
        source, target = (mine, theirs) if sends else (theirs, mine)
        if source.size != target.size:
            raise self._fail(
                f"channel {slot.name}: ranks {self.rank} and {peer} disagree: {source.size} bytes sent, {target.size} expected",
                peer,
            )
        target[:] = source
        other._waiting[their_slot].discard((not sends, self.rank))
        other.changed.notify()

    def wait(self, slot: Slot, deadline: float) -> None:
        assert isinstance(slot, LinkSlot)
        if not slot.in_flight:
            raise ValueError(f"channel {slot.name}: this parity is not in flight")
        with self._lock:
            waiting = self._waiting[slot]
            if waiting:
                self._raise_if_broken()
            self._wait_until(
                lambda: not waiting,
                deadline,
                lambda: {peer for _, peer in waiting},
                f"was silent on channel {slot.name} for {deadline:g} s",
            )
            del self._waiting[slot]
            slot.in_flight = False

    def close(self) -> None:
        if self.left:
            return
        limit = time.monotonic() + CLOSE_SECONDS
        try:
            for slot in list(self._waiting):
                self.wait(slot, max(0.0, limit - time.monotonic()))
        except LinkError:
            self.abort()
            return
        with self._lock:
            self.leave(None, self.rank)

    def abort(self) -> None:
        if self.left:
            return
        failed = self.rank if self._broken is None or self._broken.rank is None else self._broken.rank
        with self._lock:
            self.leave(dropped(self.rank, failed), failed)

    def leave(self, reason: str | None, failed: int) -> None:
        """Ends this member, the lock held: after an orderly close (reason None) or with the rank that failed."""
        self.left = True
        self.reason = None if reason is None else (reason, failed)
        self.posted.clear()
        self._members.pop(self.address, None)
        self._broken = self._broken or LinkError(reason or f"rank {self.rank} has closed its links", failed)
        self.changed.notify()
        for other in self._peers.values():
            other.changed.notify()

    def _ungreeted(self) -> set[int]:
        return self._peers.keys() - self.greetings.keys()

    def _wait_until(self, done: Callable[[], bool], deadline: float, silent: Callable[[], set[int]], what: str) -> None:
        limit = time.monotonic() + deadline
        while not done():
            self._raise_if_left(silent())
            if self.left:
                self._raise_if_broken()
            rest = limit - time.monotonic()
            if rest <= 0:
                ranks = sorted(silent())
                raise self._fail(f"rank {', '.join(map(str, ranks))} {what}", ranks[0])
            self.changed.wait(rest)

    def _raise_if_left(self, needed: set[int]) -> None:
        for peer, other in self._peers.items():
            if other.left and other.reason:
                raise self._fail(*other.reason)
            if other.left and peer in needed:
                raise self._fail(f"rank {peer} has closed its links", peer)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise LinkError(str(self._broken), self._broken.rank)

    def _fail(self, message: str, rank: int) -> LinkError:
        self._broken = self._broken or LinkError(message, rank)
        return LinkError(message, rank)
