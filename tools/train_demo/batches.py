"""Batches of conversations as arrays, made in worker processes ahead of the training step that takes them."""

from __future__ import annotations

import multiprocessing
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.train_demo import documents
from tools.train_demo.documents import COPIED, Conversation
from tools.train_demo.tokens import Vocabulary, start_worker, worker_vocabulary

SUPERVISED_PART = 32
"""One position in so many has its attention supervised."""
TALK_LENGTH = 256

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """B conversations of L tokens. `tokens` [B, L], `roles` [B, L]; `asked` [B, L/32]: positions before a copied token, and
    `sources` [B, L/32] the positions of what they copy, -1 where there are too few; `others` [B, L/32]: any positions."""

    tokens: Ints
    roles: NDArray[np.uint8]
    asked: Ints
    sources: Ints
    others: Ints


def stack(rng: Random, chats: list[Conversation], length: int) -> Batch:
    """Cuts or pads conversations to `length` and draws the supervised positions."""
    count = length // SUPERVISED_PART
    asked = np.zeros((len(chats), count), np.int32)
    sources = np.full((len(chats), count), -1, np.int32)
    for row, chat in enumerate(chats):
        chat.pad(length)
        copied = [i for i, role in enumerate(chat.roles) if role == COPIED]
        drawn = rng.sample(copied, min(count, len(copied)))
        asked[row, : len(drawn)] = [i - 1 for i in drawn]
        sources[row, : len(drawn)] = [chat.sources[i] for i in drawn]
    others = [[rng.randrange(length) for _ in range(count)] for _ in chats]
    tokens = np.array([chat.ids for chat in chats], np.int32)
    roles = np.stack([np.frombuffer(bytes(chat.roles), np.uint8) for chat in chats])
    return Batch(tokens, roles, asked, sources, np.array(others, np.int32))


def make_batch(vocabulary: Vocabulary, seed: int, step: int, tokens: int, length: int, kind: str) -> Batch:
    """The batch of one step: `kind` "documents" or "talk". The same arguments give the same batch."""
    rng = Random(f"{seed}:{step}")
    chats = []
    for _ in range(tokens // length):
        draw = rng.random()
        if kind == "talk":
            make = documents.talk
        elif draw < 0.45:
            make = documents.interleaved
        else:
            make = documents.block if draw < 0.93 else documents.single
        chats.append(make(vocabulary, rng, length))
    return stack(rng, chats, length)


def _make(*arguments: Any) -> Batch:
    return make_batch(worker_vocabulary(), *arguments)


class Batches:
    """Batches in order, some steps ahead: `ask` for one more, `take` the oldest."""

    def __init__(self, tokenizer: Path, seed: int, workers: int) -> None:
        self._seed = seed
        self._pool = ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), initializer=start_worker, initargs=(str(tokenizer),)
        )
        self._asked: deque[Future[Batch]] = deque()

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, step: int, tokens: int, length: int, kind: str) -> None:
        self._asked.append(self._pool.submit(_make, self._seed, step, tokens, length, kind))

    def take(self) -> Batch:
        return self._asked.popleft().result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
