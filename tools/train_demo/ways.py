"""Ways to have a question answered by a group. They differ in what happens to the conversation, never in its receipt.

* fresh: alone and from the first token on; nothing is kept
* resumed: from the kept state of its document, which is read once before its first question
* parked: beside an older conversation that runs out of pages, for which the question gives up its own and is replayed
* carried: while an operator moves it from rank to rank and back
"""

from __future__ import annotations

import asyncio
import contextlib
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from latentpool.cli.group import LocalGroup
from latentpool.client import AdminClient, Client
from latentpool.errors import LatentPoolError
from latentpool.geometry import BLOCK
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2

WAYS = {"fresh": "", "resumed": "cached_tokens", "parked": "parked", "carried": "carried"}
"""What tells in a reply's usage that it went that way."""
_MOST = 40
"""Tokens of a reply."""
_MEMORY = 2 << 30
_KEEP_FROM = 512
"""Half of the shortest documents that are asked about."""
_SPARE_PAGES = 16
"""Of a tight pool, beside those of the longest question: what else a process takes of its memory differs by a few of them."""
_HEADROOM = 1
"""Tokens of a reply that an admission to a tight pool covers: the rest must be asked for."""
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Question:
    """`document`: the prompt's tokens that other questions may have in common."""

    name: str
    prompt: list[int]
    answer: list[int]
    document: int


@dataclass(frozen=True, slots=True)
class Reply:
    """With its end token."""

    ids: list[int]
    completion: router_pb2.Completion

    def went(self, way: str) -> bool:
        return way == "fresh" or getattr(self.completion.usage, WAYS[way]) > 0


Ask = Callable[[Question], Awaitable[Reply]]


@asynccontextmanager
async def asking(args: Namespace, questions: Sequence[Question]) -> AsyncIterator[Ask]:
    """How to ask each of the questions, in a group that is started for it or, the fresh way, runs already."""
    if args.address:
        async with Client(args.address) as client:
            yield lambda question: _reply(client, question.prompt)
    else:
        ways = {"fresh": _fresh, "resumed": _resumed, "parked": _parked, "carried": _carried}
        async with ways[args.way](args, questions) as ask:
            yield ask


async def _reply(client: Client, prompt: Sequence[int], request_id: str = "", most: int = _MOST) -> Reply:
    """The greedy reply."""
    ids: list[int] = []
    async for event in client.generate(prompt, Sampling(max_tokens=most), request_id=request_id):
        if isinstance(event, router_pb2.Chunk):
            ids += event.token_ids
        elif isinstance(event, router_pb2.Completion):
            return Reply(ids, event)
    raise LatentPoolError("a stream ended without a completion")


def _group(args: Namespace, **settings: Any) -> LocalGroup:
    common = {
        "transport": args.transport, "kv_pages": args.kv_pages, "split": args.split, "page_rows": args.page_rows,
        "memory_bytes": _MEMORY, "context": args.context, "cache_bytes": 0,
    }  # fmt: skip
    return LocalGroup(args.model, args.ranks, **(common | settings))


@asynccontextmanager
async def _fresh(args: Namespace, _: Sequence[Question]) -> AsyncIterator[Ask]:
    async with _group(args) as group:
        yield lambda question: _reply(group.client, question.prompt)


@asynccontextmanager
async def _resumed(args: Namespace, _: Sequence[Question]) -> AsyncIterator[Ask]:
    read: list[int] = []

    async def ask(question: Question) -> Reply:
        nonlocal read
        document = question.prompt[: question.document]
        if document != read:
            await _reply(group.client, document, most=1)
            read = document
        return await _reply(group.client, question.prompt)

    async with _group(args, cache_bytes=_MEMORY, keep_from=_KEEP_FROM, keep_replies=False) as group:
        yield ask


# ---- parked --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _parked(args: Namespace, questions: Sequence[Question]) -> AsyncIterator[Ask]:
    """Of the pool an older neighbour has all pages but those of the question, and asks for one more about when the question's
    reply begins: beside a reply a round computes one block of a prompt."""
    rows: int = args.page_rows

    def quota(question: Question) -> int:
        return -(-(len(question.prompt) + _HEADROOM) // rows) + 1

    async def ask(question: Question) -> Reply:
        dry_after = min(len(question.prompt) // BLOCK + 3, rows - 1)
        tokens = (pool - quota(question) - 1) * rows - dry_after
        prompt = (question.prompt * (tokens // len(question.prompt) + 1))[:tokens]
        # pages are asked for a page ahead, but not beyond the end
        writes = Sampling(max_tokens=dry_after + rows + 2, ignore_eos=True)
        async with aclosing(group.client.generate(prompt, writes)) as neighbour:
            await anext(neighbour)  # it is the older one
            reply = await _reply(group.client, question.prompt)
            async for _ in neighbour:
                pass
        return reply

    async with _tight(args, max(map(quota, questions))) as group, AdminClient(group.manager.address) as admin:
        pool = (await admin.get_plan()).pages
        yield ask


@asynccontextmanager
async def _tight(args: Namespace, pages: int) -> AsyncIterator[LocalGroup]:
    """A group of little more than so many pages. What else its memory goes to, one that is not tight tells."""
    context = (pages + _SPARE_PAGES) * args.page_rows
    settings = {"parallel": 2, "headroom": _HEADROOM, "chunk_rows": BLOCK, "context": context}
    async with _group(args, **settings) as group, AdminClient(group.manager.address) as admin:
        ledger = min((await admin.get_plan()).ledgers, key=lambda ledger: ledger.room_bytes)
    room = ledger.lane_bytes + (pages + _SPARE_PAGES * 3 // 2) * ledger.page_bytes
    async with _group(args, **settings, memory_bytes=_MEMORY - ledger.room_bytes + room) as group:
        yield group


# ---- carried -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _carried(args: Namespace, _: Sequence[Question]) -> AsyncIterator[Ask]:
    async def to_and_fro(name: str) -> None:
        while True:
            for conversation in await admin.list_conversations():
                if conversation.request_id == name:
                    with contextlib.suppress(LatentPoolError):  # it has just come, or has ended
                        await admin.carry(conversation.conversation)
            await asyncio.sleep(_POLL_SECONDS)

    async def ask(question: Question) -> Reply:
        operator = asyncio.create_task(to_and_fro(question.name))
        try:
            return await _reply(group.client, question.prompt, request_id=question.name)
        finally:
            operator.cancel()
            await asyncio.wait({operator})

    async with _group(args) as group, AdminClient(group.manager.address) as admin:
        yield ask
