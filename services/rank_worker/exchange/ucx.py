"""The exchange over UCX: shared memory between processes of one host, TCP between hosts.

Low-level ucxx: one worker, owned by the one thread that calls; endpoints from worker addresses (no listener); receives by
tag, posted before sends. Nothing is sent, received or noticed outside of this module's calls. Requests do not hold their
buffers and cannot be cancelled, so both stay referenced until they are complete, and forever if they never are.

A send is complete when its bytes are copied, wherever the peer is. So a rank that gives a peer rows and gets none in return
waits for a receipt instead: a `wait` returns only when the peers have enqueued the slot too. That bounds what can pile up at
a receiver to the two parities of each channel, and makes every `wait` an acknowledgement.
Settings, figures and the behaviour that this relies on: docs/data_plane.md.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentpool.errors import LinkError
from services.rank_worker.exchange.base import Exchange, Slot
from services.rank_worker.exchange.buffers import Channels, LinkSlot
from services.rank_worker.exchange.greeting import GREETING_BYTES, PARTING_BYTES, Greeting, Parting, dropped
from services.rank_worker.exchange.ucx_library import open_worker

CLOSE_SECONDS = 2.0
"""How long `close` waits for what is in flight and for the peers' goodbyes."""

OVERTAKING_SECONDS = 0.2
"""How long after a peer's goodbye its earlier, larger messages may still arrive."""

_ABORT_SECONDS = 0.05
_ADDRESS = struct.Struct("<4sBBI")
_ADDRESS_MAGIC = b"LPa1"
_GREETING, _PARTING = 0, 1  # sequence numbers on channel 0 of epoch 0, which prepare never gives out
_RECEIPT = 0x8000  # on the channel's number: nothing but word from a peer that it has enqueued the slot too
_TURNS_A_CHECK = 32
_CACHED_PREFIXES = 256

_abandoned: list[Any] = []
"""Buffers that were in use at an abort, never freed: a peer may still be writing to them."""

_Posted = tuple[Any, int, NDArray[np.uint8]]  # request, peer, its buffer


def make(rank: int, world: int, net_devices: str) -> Exchange:
    """A UCX exchange whose TCP port is on `net_devices` only. Call it in the process and thread that will use it, never
    before a fork. Raises ConfigError if UCX cannot start there, ValueError for ranks that the tag has no room for."""
    if not 0 <= rank < world <= 256:
        raise ValueError(f"rank {rank} of a world of {world}: allowed are 0 to world - 1, and a world of at most 256")
    return _UcxExchange(rank, world, net_devices)


class _UcxExchange:
    def __init__(self, rank: int, world: int, net_devices: str) -> None:
        self.rank = rank
        self.world = world
        self._ucx, self._array, self._worker = open_worker(net_devices)
        blob: bytes = self._ucx.UCXAddress.create_from_worker(self._worker).tobytes()
        self._address: bytes = _ADDRESS.pack(_ADDRESS_MAGIC, rank, world, zlib.crc32(blob)) + blob
        self._channels = Channels(world)
        self._nothing = self._array(np.zeros(1, np.uint8)[:0])
        self._sequence: dict[int, int] = {}
        self._epoch = 0
        self._endpoints: dict[int, Any] = {}
        self._greetings: list[_Posted] = []
        self._partings: list[_Posted] = []
        self._flying: dict[LinkSlot, list[_Posted]] = {}
        self._prefixes: dict[LinkSlot, dict[tuple[bool, int, int], Any]] = {}
        self._lost: set[int] = set()  # peers whose endpoint failed; UCX's callbacks add to it inside progress
        self._parted: dict[int, tuple[Parting, float]] = {}  # and when it was heard
        self._broken: LinkError | None = None
        self._ended = False

    @property
    def address(self) -> bytes:
        return self._address

    def prepare(self, name: str, shape: Sequence[int], dtype: np.dtype[np.generic], *, each: bool = False) -> tuple[Slot, Slot]:
        return self._channels.prepare(name, shape, dtype, each)

    # ---- connecting --------------------------------------------------------------------------------------------

    def connect(self, addresses: Sequence[bytes], epoch: int, deadline: float) -> None:
        self._raise_if_broken()
        if self._endpoints or len(addresses) != self.world:
            raise ValueError(f"connect, once, with {self.world} addresses; these are {len(addresses)}")
        limit = time.monotonic() + deadline
        blobs = {peer: self._blob(peer, address) for peer, address in enumerate(addresses) if peer != self.rank}
        self._epoch = epoch & 0xFFFF
        mine = Greeting(self.rank, self.world, epoch)
        said = np.frombuffer(bytearray(mine.pack()), np.uint8)
        heard = np.zeros((self.world, GREETING_BYTES), np.uint8)
        parting = np.zeros((self.world, PARTING_BYTES), np.uint8)
        for peer, blob in blobs.items():
            self._endpoints[peer] = self._endpoint(peer, blob)
            self._greetings.append(self._receive(peer, _tag(peer, 0, 0, _GREETING), heard[peer]))
            self._partings.append(self._receive(peer, _tag(peer, 0, 0, _PARTING), parting[peer]))
        self._greetings += [self._send(peer, _tag(self.rank, 0, 0, _GREETING), said) for peer in self._endpoints]
        self._finish(self._greetings, limit, f"did not answer the greeting within {deadline:g} s")
        for peer in self._endpoints:
            refusal = mine.refusal(peer, Greeting.unpack(heard[peer].tobytes()))
            if refusal:
                raise self._fail(refusal, peer)

    def _blob(self, peer: int, address: bytes) -> bytes:
        # UCX takes an address apart without checks of its own.
        if len(address) <= _ADDRESS.size or not address.startswith(_ADDRESS_MAGIC):
            raise self._fail(f"the link address of rank {peer} is not a UCX link address", peer)
        _, rank, world, checksum = _ADDRESS.unpack_from(address)
        blob = address[_ADDRESS.size :]
        if checksum != zlib.crc32(blob):
            raise self._fail(f"the link address of rank {peer} is damaged", peer)
        if (rank, world) != (peer, self.world):
            raise self._fail(f"the link address of rank {peer} of {self.world} was made by rank {rank} of {world}", peer)
        return blob

    def _endpoint(self, peer: int, blob: bytes) -> Any:
        remote = self._ucx.UCXAddress.create_from_buffer(blob)
        try:
            endpoint = self._ucx.UCXEndpoint.create_from_worker_address(self._worker, remote, True)
        except self._ucx.UCXError as error:
            raise self._fail(f"rank {peer} cannot be reached from this host's network device: {error}", peer) from error
        endpoint.set_close_callback(self._lost.add, (peer,))
        return endpoint

    def _send(self, peer: int, tag: int, data: NDArray[np.uint8]) -> _Posted:
        return self._endpoints[peer].tag_send(self._array(data), self._ucx.UCXXTag(tag)), peer, data

    def _receive(self, peer: int, tag: int, data: NDArray[np.uint8]) -> _Posted:
        return self._endpoints[peer].tag_recv(self._array(data), self._ucx.UCXXTag(tag)), peer, data

    # ---- channels ----------------------------------------------------------------------------------------------

    def enqueue(self, slot: Slot, send: Sequence[int], recv: Sequence[int]) -> None:
        assert isinstance(slot, LinkSlot)
        slot.check(self.rank, send, recv)
        self._raise_if_broken()
        if len(self._endpoints) != self.world - 1:
            raise ValueError(f"channel {slot.name}: connect before the first enqueue")
        if self._lost or self._parted:
            self._raise_if_gone({peer for peer in self._endpoints if send[peer] or recv[peer]}, time.monotonic())
        sequence = self._sequence[slot.channel] = (self._sequence.get(slot.channel, 0) + 1) & 0xFFFFFF
        make_tag = self._ucx.UCXXTag
        slot.in_flight = True
        posted = self._flying[slot] = []
        try:
            for peer, endpoint in self._endpoints.items():
                if recv[peer] * slot.row_bytes:
                    tag = make_tag(_tag(peer, self._epoch, slot.channel, sequence))
                    into = self._prefix(slot, False, peer, recv[peer])
                elif send[peer] * slot.row_bytes:
                    tag = make_tag(_tag(peer, self._epoch, slot.channel | _RECEIPT, sequence))
                    into = self._nothing
                else:
                    continue
                posted.append((endpoint.tag_recv(into, tag), peer, slot.recv_bytes[peer]))
            tag = make_tag(_tag(self.rank, self._epoch, slot.channel, sequence))
            receipt = make_tag(_tag(self.rank, self._epoch, slot.channel | _RECEIPT, sequence))
            for peer, endpoint in self._endpoints.items():
                if send[peer] * slot.row_bytes:
                    request = endpoint.tag_send(self._prefix(slot, True, peer, send[peer]), tag)
                elif recv[peer] * slot.row_bytes:
                    request = endpoint.tag_send(self._nothing, receipt)
                else:
                    continue
                posted.append((request, peer, slot.send_bytes[peer]))
        except self._ucx.UCXError as error:
            raise self._fail(f"rank {peer} is gone ({error})", peer) from error

    def _prefix(self, slot: LinkSlot, sends: bool, peer: int, rows: int) -> Any:
        made = self._prefixes.setdefault(slot, {})
        array = made.get((sends, peer, rows))
        if array is None:
            if len(made) == _CACHED_PREFIXES:
                made.clear()
            block = (slot.send_bytes if sends else slot.recv_bytes)[peer]
            array = made[sends, peer, rows] = self._array(block[: rows * slot.row_bytes])
        return array

    def wait(self, slot: Slot, deadline: float) -> None:
        assert isinstance(slot, LinkSlot)
        if not slot.in_flight:
            raise ValueError(f"channel {slot.name}: this parity is not in flight")
        if self._ended:
            self._raise_if_broken()
        self._finish(self._flying[slot], time.monotonic() + deadline, f"was silent on channel {slot.name} for {deadline:g} s")
        del self._flying[slot]
        slot.in_flight = False

    def _finish(self, posted: Sequence[_Posted], limit: float, silent: str) -> None:
        """Progress until all requests are complete and good."""
        progress, sched_yield = self._worker.progress, os.sched_yield
        turns = 0
        for request, _, _ in posted:
            while not request.completed:
                progress()
                sched_yield()
                turns += 1
                if turns % _TURNS_A_CHECK == 0:
                    self._check(posted, limit, silent)
        for request, peer, _ in posted:
            self._check_error(request, peer)

    def _check(self, posted: Sequence[_Posted], limit: float, silent: str) -> None:
        self._hear()
        waiting = {peer for request, peer, _ in posted if not request.completed}
        if not waiting:
            return
        self._raise_if_broken()
        now = time.monotonic()
        self._raise_if_gone(waiting, now)
        if now >= limit:
            for request, peer, _ in posted:
                if request.completed:
                    self._check_error(request, peer)
            raise self._fail(f"rank {', '.join(map(str, sorted(waiting)))} {silent}", min(waiting))

    def _check_error(self, request: Any, peer: int) -> None:
        try:
            request.check_error()
        except self._ucx.UCXMessageTruncatedError as error:
            raise self._fail(f"rank {peer} sent more bytes than were expected: ranks disagree on the counts", peer) from error
        except self._ucx.UCXError as error:
            self._hear()
            self._raise_if_gone({peer}, float("inf"))
            raise self._fail(f"rank {peer} is gone ({error})", peer) from error

    # ---- failures and the end ----------------------------------------------------------------------------------

    def _hear(self) -> None:
        for posted in list(self._partings):
            request, peer, heard = posted
            if request.completed:
                self._partings.remove(posted)
                try:
                    request.check_error()
                    self._parted[peer] = (Parting.unpack(heard.tobytes()), time.monotonic())
                except self._ucx.UCXError:
                    self._lost.add(peer)

    def _raise_if_gone(self, needed: set[int], now: float) -> None:
        for peer, (parting, heard_at) in self._parted.items():
            if parting.failed is not None:
                raise self._fail(dropped(peer, parting.failed), parting.failed)
            # Its earlier, larger messages may arrive after its goodbye.
            if peer in needed and now > heard_at + OVERTAKING_SECONDS:
                raise self._fail(f"rank {peer} has closed its links", peer)
        for peer in sorted(self._lost - self._parted.keys()):
            raise self._fail(f"rank {peer} is gone", peer)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise LinkError(str(self._broken), self._broken.rank)

    def _fail(self, message: str, rank: int) -> LinkError:
        self._broken = self._broken or LinkError(message, rank)
        return LinkError(message, rank)

    def close(self) -> None:
        if self._ended:
            return
        limit = time.monotonic() + CLOSE_SECONDS
        try:
            self._raise_if_broken()
            for posted in self._flying.values():
                self._finish(posted, limit, "was silent at the close")
            self._flying.clear()
        except LinkError:
            self.abort()
            return
        self._release(Parting(None), limit)

    def abort(self) -> None:
        if not self._ended:
            failed = self.rank if self._broken is None or self._broken.rank is None else self._broken.rank
            self._release(Parting(failed), time.monotonic() + _ABORT_SECONDS)

    def _release(self, parting: Parting, limit: float) -> None:
        self._ended = True
        told = self._part(parting, limit)
        self._broken = self._broken or LinkError(f"rank {self.rank} has closed its links", self.rank)
        flying = [one for posted in self._flying.values() for one in posted]
        posted = [one for one in (*flying, *self._greetings, *self._partings, *told) if not one[0].completed]
        _abandoned.extend(buffer for _, _, buffer in posted)
        for endpoint in self._endpoints.values():
            endpoint.remove_close_callback()
            with contextlib.suppress(self._ucx.UCXError):
                endpoint.close_blocking()
        stuck = [request for request, _, _ in posted if not request.completed]
        if stuck:
            _abandoned.append((stuck, self._endpoints, self._worker))
        self._flying, self._greetings, self._partings, self._prefixes, self._endpoints = {}, [], [], {}, {}
        self._worker = None

    def _part(self, parting: Parting, limit: float) -> list[_Posted]:
        """Tells the peers that this is the end. After a close it waits for their goodbyes, which say that they have
        received everything: only then may endpoints be torn down."""
        told: list[_Posted] = []
        data = np.frombuffer(bytearray(parting.pack()), np.uint8)
        for peer in self._endpoints.keys() - self._lost:
            with contextlib.suppress(self._ucx.UCXError):
                told.append(self._send(peer, _tag(self.rank, 0, 0, _PARTING), data))
        while time.monotonic() < limit:
            hearing = parting.failed is None and not self._endpoints.keys() <= self._parted.keys() | self._lost
            if not hearing and all(request.completed for request, _, _ in told):
                break
            self._worker.progress()
            os.sched_yield()
            self._hear()
        return told


def _tag(source: int, epoch: int, channel: int, sequence: int) -> int:
    """source 8 | epoch 16 | channel 16 | sequence 24 bits."""
    return source << 56 | epoch << 40 | channel << 24 | sequence
