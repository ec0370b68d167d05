"""Asks a sample of the evaluation's questions through the real services, and compares receipts between ways of serving.

    python -m tools.train_demo.through_services MODEL_DIR --receipts pages.json
    python -m tools.train_demo.through_services MODEL_DIR --kv-pages off --same-as pages.json
    python -m tools.train_demo.through_services MODEL_DIR --split on --same-as pages.json
    python -m tools.train_demo.through_services MODEL_DIR --address 127.0.0.1:7410 --same-as pages.json

Starts a group of its own on this machine, or asks a running one (--address). Answers are generated freely, greedily. Receipts
are equal only between groups of equal ranks, dtypes and numerics. Needs no PyTorch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from tokenizers import Tokenizer

from latentpool import logs
from latentpool.cli.group import LocalGroup
from latentpool.client import Client
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2
from tools.train_demo.cases import FIFTHS, make_chat, turns_of
from tools.train_demo.tokens import Vocabulary

_SAMPLE = "1024:50,4096:50,16384:10"
_MOST = 40
_MEMORY = 2 << 30


def questions(model: Path, sample: str, turns: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """Name, prompt and right reply of every question; `turns` chats of four turns behind the single ones."""
    vocabulary = Vocabulary(Tokenizer.from_file(str(model / "tokenizer.json")))
    for length, count in (map(int, cell.split(":")) for cell in sample.split(",") if cell):
        for number in range(count):
            ((prompt, answer),) = turns_of(make_chat(vocabulary, length, number % FIFTHS, number // FIFTHS))
            yield f"{length}/{number % FIFTHS}/{number // FIFTHS}", prompt, answer
    for number in range(turns):
        for turn, (prompt, answer) in enumerate(turns_of(make_chat(vocabulary, 1024, number % FIFTHS, number, 3))):
            yield f"turns/{number}/{turn}", prompt, answer


async def reply(client: Client, prompt: list[int]) -> tuple[list[int], str]:
    """The greedy reply with its end token, and its receipt."""
    said: list[int] = []
    receipt = ""
    async for event in client.generate(prompt, Sampling(max_tokens=_MOST)):
        if isinstance(event, router_pb2.Chunk):
            said += event.token_ids
        elif isinstance(event, router_pb2.Completion):
            receipt = event.receipt.sha256
    return said, receipt


async def ask(args: argparse.Namespace) -> tuple[dict[str, str], dict[str, list[bool]]]:
    """Receipts by question, and whether each answer was exact, by cell."""
    receipts: dict[str, str] = {}
    exact: dict[str, list[bool]] = {}
    async with AsyncExitStack() as stack:
        if args.address:
            client = await stack.enter_async_context(Client(args.address))
        else:
            group = LocalGroup(
                args.model, args.ranks, transport=args.transport, kv_pages=args.kv_pages, split=args.split,
                page_rows=args.page_rows, memory_bytes=_MEMORY, context=args.context,
            )  # fmt: skip
            client = (await stack.enter_async_context(group)).client
        began = time.monotonic()
        for name, prompt, answer in questions(args.model, args.sample, args.turns):
            said, receipts[name] = await reply(client, prompt)
            if args.receipts:  # each time: a long run may be cut short
                args.receipts.write_text(json.dumps(receipts, indent=1) + "\n", encoding="utf-8")
            cell = exact.setdefault(name.split("/")[0], [])
            cell.append(said == answer)
            if said != answer:
                print(f"{name}: {said} instead of {answer}", flush=True)
            if len(cell) % 10 == 0:
                print(f"{time.monotonic() - began:.0f} s: {name.split('/')[0]} {sum(cell)}/{len(cell)}", flush=True)
    return receipts, exact


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--address", help="host:port of a running group's router")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--transport", choices=("inproc", "ucx"), default="ucx")
    parser.add_argument("--kv-pages", choices=("auto", "on", "off"), default="on")
    parser.add_argument("--split", choices=("auto", "on", "off"), default="off")
    parser.add_argument("--page-rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=20480)
    parser.add_argument("--sample", default=_SAMPLE, help=f"LENGTH:QUESTIONS,...; default: {_SAMPLE}")
    parser.add_argument("--turns", type=int, default=5, help="chats of four turns; default: 5")
    parser.add_argument("--receipts", type=Path, help="write every question's receipt as JSON")
    parser.add_argument("--same-as", type=Path, help="receipts that must be equal")
    args = parser.parse_args()
    logs.configure("error")
    receipts, exact = asyncio.run(ask(args))
    for cell, right in exact.items():
        print(f"{cell}: {sum(right)} of {len(right)} exact")
    if args.same_as is None:
        return 0
    before = json.loads(args.same_as.read_text(encoding="utf-8"))
    common = receipts.keys() & before.keys()
    same = sum(receipts[name] == before[name] for name in common)
    print(f"{same} of {len(common)} receipts equal those of {args.same_as}")
    return 0 if common and same == len(common) else 1


if __name__ == "__main__":
    raise SystemExit(main())
