"""Questions to measure a model by: documents of a length, the asked fact in a fifth of it, the answer that is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from tools.train_demo.documents import CONTEXT, PADDING, Conversation, apart, single
from tools.train_demo.tokens import Vocabulary

FIFTHS = 5
SEED = 1_000_003
"""Cases are drawn from other generators than any training step's."""


@dataclass(frozen=True, slots=True)
class Case:
    """`tokens` [L] i32, padded; `said` [L] bool: the tokens of answers; `turns` [L] i8: whose answer it is, from 0."""

    tokens: NDArray[np.int32]
    said: NDArray[np.bool_]
    turns: NDArray[np.int8]


def make_chat(vocabulary: Vocabulary, length: int, fifth: int, number: int, more: int = 0) -> Conversation:
    """Case `number` of a cell. `more`: further questions in later turns."""
    rng = Random(f"{SEED}:{length}:{fifth}:{number}:{more}")
    return single(vocabulary, rng, length, (fifth + rng.random()) / FIFTHS, more)


def make_shared(vocabulary: Vocabulary, length: int, each: int, number: int) -> Iterator[tuple[int, Conversation]]:
    """Questions that have document `number` in common, `each` about facts in every fifth of it, with their fifths."""
    return apart(vocabulary, Random(f"{SEED}:{length}:shared:{number}"), length, FIFTHS, each)


def make_case(vocabulary: Vocabulary, length: int, fifth: int, number: int, more: int = 0) -> Case:
    """As `make_chat`, as arrays of `length`."""
    chat = make_chat(vocabulary, length, fifth, number, more)
    chat.pad(length)
    roles = np.frombuffer(bytes(chat.roles), np.uint8)
    said = (roles != CONTEXT) & (roles != PADDING)
    begins = said & ~np.concatenate(([False], said[:-1]))
    return Case(np.array(chat.ids, np.int32), said, (np.cumsum(begins) - 1).clip(0).astype(np.int8))


def turns_of(chat: Conversation) -> list[tuple[list[int], list[int]]]:
    """Of every answer: the tokens before it, where the model begins to speak, and the answer with its end token."""
    found = []
    start = 0
    for i, role in enumerate(chat.roles):
        said = role not in (CONTEXT, PADDING)
        if said and not start:
            start = i
        last = i + 1 == len(chat.roles) or chat.roles[i + 1] in (CONTEXT, PADDING)
        if said and last:
            found.append((chat.ids[:start], chat.ids[start : i + 1]))
            start = 0
    return found
