"""A pool manager for one worker, and a front wired to the fake engine."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio

from latentpool import handshake, net
from latentpool.errors import LatentPoolError
from latentpool.v1 import plan_pb2, pool_manager_pb2_grpc, rank_worker_pb2_grpc
from latentpool.v1 import pool_manager_pb2 as pb
from latentpool.v1 import rank_worker_pb2 as rw
from services.rank_worker.exchange.inproc import Hub
from services.rank_worker.front import RankWorker, RankWorkerSettings

EPOCH = 7
FOLDER = str(Path(__file__).parent)


class FakeManager(pool_manager_pb2_grpc.PoolManagerServicer):
    """Follows the order of Join; keeps what it was told; `say` adds messages; `refuse` aborts instead of a Welcome."""

    def __init__(self, secret: bytes = b"", refuse: tuple[grpc.StatusCode, str] | None = None, lay_out: bool = True) -> None:
        self.secret = secret
        self.proves_with = secret
        self.refuse = refuse
        self.lay_out = lay_out
        self.hello = pb.Hello()
        self.heartbeats: list[pb.Heartbeat] = []
        self.heard: asyncio.Queue[pb.JoinRequest] = asyncio.Queue()
        self.outgoing: asyncio.Queue[pb.JoinResponse] = asyncio.Queue()
        self.joins = 0
        self.closed = asyncio.Event()
        self.address = ""

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self.server = net.server()
        pool_manager_pb2_grpc.add_PoolManagerServicer_to_server(self, self.server)
        self.address = net.bind(self.server, address, "fake manager")
        await self.server.start()
        return self.address

    def say(self, **message: object) -> None:
        self.outgoing.put_nowait(pb.JoinResponse(**message))

    async def hear(self, kind: str) -> pb.JoinRequest:
        """The next message that is no heartbeat."""
        message = await asyncio.wait_for(self.heard.get(), 20)
        assert message.WhichOneof("message") == kind, message
        return message

    async def Join(self, requests, context) -> None:  # noqa: N802
        self.joins += 1
        challenge = handshake.nonce()
        await context.write(pb.JoinResponse(challenge=pb.Challenge(nonce=challenge)))
        requests = aiter(requests)
        self.hello = hello = (await anext(requests)).hello
        if not handshake.proven(self.secret, "worker", challenge, hello.nonce, hello.mac, str(hello.rank).encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the secret is another one")
        if self.refuse is not None:
            await context.abort(*self.refuse)
        mac = handshake.prove(self.proves_with, "manager", hello.nonce, challenge)
        await context.write(pb.JoinResponse(welcome=pb.Welcome(mac=mac, epoch=EPOCH)))
        saying = asyncio.create_task(self._say_all(context))
        try:
            async for message in requests:
                kind = message.WhichOneof("message")
                if kind == "heartbeat":
                    self.heartbeats.append(message.heartbeat)
                    continue
                self.heard.put_nowait(message)
                if kind == "loaded" and self.lay_out:
                    plan = plan_pb2.Plan(pages=11, lanes=2, context=512, world=1)
                    self.say(lay_out=pb.LayOut(plan=plan, link_addresses=[message.loaded.link_address], epoch=EPOCH))
        finally:
            saying.cancel()
            self.closed.set()

    async def _say_all(self, context) -> None:
        while True:
            await context.write(await self.outgoing.get())

    async def ready(self) -> None:
        await self.hear("loaded")
        await self.hear("ready")

    async def Session(self, requests, context) -> None:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not faked")


class Rounds:
    """A router's end of one round stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = rank_worker_pb2_grpc.RankWorkerStub(channel).Rounds()

    async def open(self, term: int = 1, epoch: int = EPOCH, key: bytes = b"key") -> int:
        await self.call.write(rw.RoundsRequest(open=rw.OpenRounds(term=term, epoch=epoch, key=key)))
        return (await self._read()).opened.last_seq

    async def send(self, seq: int, acknowledged: int = 0, term: int = 1, epoch: int = EPOCH, operations=None) -> None:
        if operations is None:
            operations = [rw.Operation(decode=rw.Decode(lanes=[0, 1], rows=1))]
        message = rw.Round(term=term, epoch=epoch, seq=seq, acknowledged_seq=acknowledged, operations=operations)
        await self.call.write(rw.RoundsRequest(round=message))

    async def result(self) -> rw.RoundResult:
        return (await self._read()).result

    async def _read(self) -> rw.RoundsResponse:
        message = await self.call.read()
        assert message is not grpc.aio.EOF, "the stream has ended"
        return message

    async def refused(self) -> tuple[grpc.StatusCode, str]:
        """The status the stream ends with; what it still says is dropped."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return await self.call.code(), await self.call.details()


def bind(seconds: int) -> rw.Operation:
    """An operation that takes the fake engine so long."""
    return rw.Operation(bind=rw.Bind(lane=0, conversation=1, seed=seconds))


def make_worker(
    folder: Path, manager: str, hub: Hub | None = None, script: dict[str, object] | None = None, **settings
) -> RankWorker:
    """A front of the fake engine: a thread with a hub, else a process. `script` is the fake's."""
    model = folder / "script.json"
    model.write_text(json.dumps(script or {}))
    on_progress = settings.pop("on_progress", None)
    values = {"rank": 0, "world": 1, "page_rows": 64, "transport": "ucx" if hub is None else "inproc"} | settings
    return RankWorker(
        RankWorkerSettings(model=model, manager=manager, **values), hub, on_progress=on_progress, engine_module="fake_engine"
    )


@contextlib.asynccontextmanager
async def group(
    folder: Path, manager: FakeManager | None = None, process: bool = False, **settings
) -> AsyncIterator[tuple[FakeManager, RankWorker]]:
    """A manager and a started worker; both are gone at the end."""
    manager = manager or FakeManager()
    await manager.start()
    world = settings.get("world", 1)
    worker = make_worker(folder, manager.address, None if process else Hub(world), **settings)
    try:
        await worker.start()
        yield manager, worker
    finally:
        await worker.stop()
        await manager.server.stop(0)


@contextlib.asynccontextmanager
async def opened(worker: RankWorker, manager: FakeManager, term: int = 1) -> AsyncIterator[Rounds]:
    """An open round stream in a freshly granted term."""
    manager.say(term=pb.TermGranted(term=term, key=b"key"))
    async with net.channel(worker.address) as channel:
        rounds = Rounds(channel)
        await rounds.open(term=term)
        yield rounds


async def ended(worker: RankWorker) -> LatentPoolError | None:
    return await asyncio.wait_for(worker.ended(), 20)


async def until(condition: Callable[[], bool], within: float = 20.0) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within
    while not condition():
        assert loop.time() < deadline, "it did not come to pass"
        await asyncio.sleep(0.01)
