"""Fakes that speak the manager's protos over loopback: workers, routers, and a tiny model's identity."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from latentpool import handshake, net
from latentpool.geometry import Geometry
from latentpool.v1 import pool_admin_pb2_grpc, pool_manager_pb2_grpc
from latentpool.v1 import pool_manager_pb2 as pb
from services.pool_manager.service import PoolManager

CONFIG = (Path(__file__).parents[2] / "data" / "glm-5.3-flash" / "config.json").read_text()
GIB = 1 << 30
DEADLINE = 10.0


def room_for(pages: int, lanes: int) -> int:
    """Room of a rank at W = 2 in which exactly so many bf16 pages fit without a cache."""
    fixed = Geometry.from_config(json.loads(CONFIG)).lane_fixed_bytes(2, 0, "bf16")
    return pages * 512 * 13_056 + (lanes - 1) * fixed


def identity(**changes: Any) -> pb.Identity:
    """What a worker of the real geometry says, but for `changes`."""
    values: dict[str, Any] = {
        "build": "0.1.0",
        "checkpoint_digest": "c0ffee",
        "config_json": CONFIG,
        "dtype": "bf16",
        "kv_dtype": "bf16",
        "numerics_digest": "beef",
        "world": 2,
        "page_rows": 512,
        "drafts": True,
        "transport": "inproc",
    }
    return pb.Identity(**(values | changes))


def config(**changes: Any) -> str:
    """The real config.json with other values in text_config."""
    values = json.loads(CONFIG)
    values["text_config"] |= changes
    return json.dumps(values)


class Peer:
    """One stream to the manager. Reads are awaited with a deadline on a queue, as services do."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for message in self.call:
                self._inbox.put_nowait(message)
            self._inbox.put_nowait(None)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            self._inbox.put_nowait(error)

    async def get(self) -> Any:
        """The next message; None at an orderly end. Raises the AioRpcError the manager ended the stream with."""
        message = await asyncio.wait_for(self._inbox.get(), DEADLINE)
        if isinstance(message, BaseException):
            raise message
        return message

    @property
    def quiet(self) -> bool:
        """Whether nothing has arrived that `get` has not returned."""
        return self._inbox.empty()

    async def leave(self) -> None:
        """An orderly end of this side's messages."""
        await self.call.done_writing()

    def vanish(self) -> None:
        self.call.cancel()


class Worker(Peer):
    async def hello(self, rank: int, who: pb.Identity | None = None, secret: bytes = b"") -> pb.Welcome:
        challenge = (await self.get()).challenge
        nonce = handshake.nonce()
        mac = handshake.prove(secret, "worker", challenge.nonce, nonce, str(rank).encode())
        hello = pb.Hello(
            rank=rank, identity=who or identity(), nonce=nonce, mac=mac, address=f"127.0.0.1:{9000 + rank}", host=f"host{rank}"
        )
        await self.call.write(pb.JoinRequest(hello=hello))
        welcome = (await self.get()).welcome
        assert handshake.proven(secret, "manager", nonce, challenge.nonce, welcome.mac)
        return welcome  # type: ignore[no-any-return]

    async def say(self, **message: Any) -> None:
        await self.call.write(pb.JoinRequest(**message))

    async def loaded(self, room: int) -> None:
        await self.say(loaded=pb.Loaded(room_bytes=room, resident_bytes=1, link_address=b"link"))


class Router(Peer):
    key = 0

    async def open(self, name: str = "r1", secret: bytes = b"", take_over: bool = False) -> None:
        """Opens the session; the answer is for `get`."""
        challenge = (await self.get()).challenge
        nonce = handshake.nonce()
        mac = handshake.prove(secret, "router", challenge.nonce, nonce)
        self.proof = lambda granted: handshake.proven(secret, "manager", nonce, challenge.nonce, granted.mac)
        await self.say(open=pb.OpenSession(nonce=nonce, mac=mac, name=name, take_over=take_over))

    async def say(self, key: int | None = None, **message: Any) -> int:
        if key is None:
            self.key += 1
            key = self.key
        await self.call.write(pb.SessionRequest(key=key, **message))
        return key

    async def ask(self, key: int | None = None, **message: Any) -> pb.SessionResponse:
        key = await self.say(key, **message)
        answer = await self.get()
        assert answer.key == key
        return answer  # type: ignore[no-any-return]

    async def admit(
        self, conversation: int, lane: int, prompt: int, most: int | None = None, **more: bool
    ) -> pb.SessionResponse:
        name = f"q{conversation}"
        admit = pb.Admit(conversation=conversation, lane=lane, prompt_tokens=prompt, max_tokens=most, request_id=name, **more)
        return await self.ask(admit=admit)

    async def finish(self, conversation: int, fence: int = 0) -> pb.SessionResponse:
        return await self.ask(finish=pb.Finish(conversation=conversation, fence_seq=fence))


class Place:
    """A manager and what talks to it."""

    def __init__(self, manager: PoolManager, stack: AsyncExitStack) -> None:
        self.manager = manager
        self._stack = stack

    async def channel(self) -> grpc.aio.Channel:
        return await self._stack.enter_async_context(net.channel(self.manager.address))

    async def worker(self) -> Worker:
        return Worker(pool_manager_pb2_grpc.PoolManagerStub(await self.channel()).Join())

    async def router(self) -> Router:
        return Router(pool_manager_pb2_grpc.PoolManagerStub(await self.channel()).Session())

    async def admin(self) -> Any:
        return pool_admin_pb2_grpc.PoolAdminStub(await self.channel())

    async def join(self, *ranks: int, room: int = 16 * GIB, who: pb.Identity | None = None) -> list[Worker]:
        """Workers that have joined and loaded."""
        workers = []
        for rank in ranks:
            worker = await self.worker()
            await worker.hello(rank, who)
            await worker.loaded(room)
            workers.append(worker)
        return workers

    async def ready(self, ranks: tuple[int, ...] = (0, 1), **more: Any) -> list[Worker]:
        """A group that is ready; every worker has read its layout."""
        workers = await self.join(*ranks, **more)
        for worker in workers:
            assert (await worker.get()).HasField("lay_out")
        for worker in workers:
            await worker.say(ready=pb.Ready())
        return workers

    async def serving(self, **more: Any) -> tuple[list[Worker], Router]:
        """A group that is ready, with a router that has its term."""
        workers = await self.ready(**more)
        router = await self.router()
        await router.open()
        assert (await router.get()).HasField("granted")
        for worker in workers:
            assert (await worker.get()).HasField("term")
        return workers, router

    async def ended(self) -> Any:
        return await asyncio.wait_for(self.manager.ended(), DEADLINE)


MakePlace = Callable[..., Awaitable[Place]]
