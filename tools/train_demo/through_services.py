"""Asks a sample of the evaluation's questions through the real services, and compares receipts between ways of serving.

    python -m tools.train_demo.through_services MODEL_DIR --receipts pages.json
    python -m tools.train_demo.through_services MODEL_DIR --kv-pages off --same-as pages.json
    python -m tools.train_demo.through_services MODEL_DIR --split on --same-as pages.json
    python -m tools.train_demo.through_services MODEL_DIR --way parked --same-as pages.json
    python -m tools.train_demo.through_services MODEL_DIR --split on --way carried --same-as pages.json
    python -m tools.train_demo.through_services MODEL_DIR --address 127.0.0.1:7410 --same-as pages.json
    python -m tools.train_demo.through_services MODEL_DIR --split on --way resumed --context 66560 \\
        --sample "" --turns 0 --shared 65536:10:6

Starts a group of its own on this machine, or asks a running one (--address). Answers are generated freely, greedily. Receipts
are equal only between groups of equal ranks, dtypes and numerics. Needs no PyTorch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from latentpool import logs
from tools.train_demo.cases import FIFTHS, make_chat, make_shared, turns_of
from tools.train_demo.tokens import Vocabulary
from tools.train_demo.ways import WAYS, Question, asking

_SAMPLE = "1024:50,4096:50,16384:10"
_TURNS = "turns"


def cells(text: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, cell.split(":"))) for cell in text.split(",") if cell]


def questions(vocabulary: Vocabulary, sample: str, turns: int, shared: str = "") -> Iterator[Question]:
    """Single questions, named CELL/FIFTH/..., and at the end those that share documents; between them `turns` chats of four
    turns."""
    for length, count in cells(sample):
        for number in range(count):
            chat = make_chat(vocabulary, length, number % FIFTHS, number // FIFTHS)
            ((prompt, answer),) = turns_of(chat)
            yield Question(f"{length}/{number % FIFTHS}/{number // FIFTHS}", prompt, answer, chat.document)
    for number in range(turns):
        chat = make_chat(vocabulary, 1024, number % FIFTHS, number, 3)
        for turn, (prompt, answer) in enumerate(turns_of(chat)):
            yield Question(f"{_TURNS}/{number}/{turn}", prompt, answer, chat.document)
    for length, documents, each in cells(shared):
        for document in range(documents):
            for number, (fifth, chat) in enumerate(make_shared(vocabulary, length, each, document)):
                ((prompt, answer),) = turns_of(chat)
                yield Question(f"shared-{length}/{fifth}/{document}/{number % each}", prompt, answer, chat.document)


class Tally:
    """What came of the questions: receipts, which answers were exact, and how many went the way they were to go."""

    def __init__(self) -> None:
        self.receipts: dict[str, str] = {}
        self.exact: dict[str, bool] = {}
        self.went = 0

    def right(self, *cell: str) -> tuple[int, int]:
        """Exact answers of how many, of the questions whose names begin so."""
        exact = [right for name, right in self.exact.items() if name.split("/")[: len(cell)] == list(cell)]
        return sum(exact), len(exact)

    def table(self) -> str:
        """Exact answers by cell, and percent by fifth."""
        lines = []
        for cell in dict.fromkeys(name.split("/")[0] for name in self.exact):
            right, asked = self.right(cell)
            lines.append(f"{cell}: {right} of {asked} exact")
            if cell != _TURNS:
                fifths = [self.right(cell, str(fifth)) for fifth in range(FIFTHS)]
                lines[-1] += "; % by fifth: " + ", ".join(f"{100 * right / asked:.1f}" for right, asked in fifths if asked)
        return "\n".join(lines)


async def ask(args: argparse.Namespace) -> Tally:
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    tally = Tally()
    todo = list(questions(Vocabulary(tokenizer), args.sample, args.turns, args.shared))
    async with asking(args, todo) as answered:
        began = time.monotonic()
        for question in todo:
            reply = await answered(question)
            tally.receipts[question.name] = reply.completion.receipt.sha256
            tally.exact[question.name] = reply.ids == question.answer
            tally.went += reply.went(args.way)
            if args.receipts:  # each time: a long run may be cut short
                args.receipts.write_text(json.dumps(tally.receipts, indent=1) + "\n", encoding="utf-8")
            if reply.ids != question.answer:
                said, right = (tokenizer.decode(ids) for ids in (reply.ids, question.answer))
                print(f"{question.name}: {said!r} instead of {right!r}", flush=True)
            if len(tally.exact) % 10 == 0:
                cell = question.name.split("/")[0]
                print(f"{time.monotonic() - began:.0f} s: {cell} {'/'.join(map(str, tally.right(cell)))}", flush=True)
    return tally


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--address", help="host:port of a running group's router")
    parser.add_argument("--way", choices=WAYS, default="fresh", help="what happens to a question on its way; default: fresh")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--transport", choices=("inproc", "ucx"), default="ucx")
    parser.add_argument("--kv-pages", choices=("auto", "on", "off"), default="on")
    parser.add_argument("--split", choices=("auto", "on", "off"), default="off")
    parser.add_argument("--page-rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=20480)
    parser.add_argument("--sample", default=_SAMPLE, help=f"LENGTH:QUESTIONS,...; default: {_SAMPLE}")
    parser.add_argument("--turns", type=int, default=5, help="chats of four turns; default: 5")
    parser.add_argument("--shared", default="", help="LENGTH:DOCUMENTS:QUESTIONS,...; questions a fifth of each document")
    parser.add_argument("--receipts", type=Path, help="write every question's receipt as JSON")
    parser.add_argument("--same-as", type=Path, help="receipts that must be equal")
    args = parser.parse_args(arguments)
    if args.way != "fresh" and (args.address or args.kv_pages != "on"):
        parser.error(f"--way {args.way}: needs a group of its own, with --kv-pages on")
    if args.way == "parked" and (args.split != "off" or args.transport != "ucx"):
        parser.error("--way parked: needs --split off, where one conversation can fill the pool, and --transport ucx")
    if args.way == "carried" and args.split != "on":
        parser.error("--way carried: needs --split on, where pages have owners")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parsed(arguments)
    logs.configure("error")
    tally = asyncio.run(ask(args))
    print(tally.table())
    good = True
    if args.way != "fresh":
        print(f"{tally.went} of {len(tally.exact)} questions were {args.way}")
        good = tally.went > 0
    if args.same_as is not None:
        before = json.loads(args.same_as.read_text(encoding="utf-8"))
        common = tally.receipts.keys() & before.keys()
        different = sorted(name for name in common if tally.receipts[name] != before[name])
        print(f"{len(common) - len(different)} of {len(common)} receipts equal those of {args.same_as}")
        for name in different:
            print(f"different: {name}")
        good = good and bool(common) and not different
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
