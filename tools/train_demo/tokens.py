"""The tokenizer: byte-level BPE of 2,048 ids, trained on the generated texts, with the release's special tokens at the end.

Numbers are cut into pairs of digits and a space belongs to the word behind it, so pieces of text that begin with a space, a
line end or punctuation can be encoded apart: their ids join to the ids of the whole. `Vocabulary` keeps such pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.train_demo import words
from tools.train_demo.grammar import INTROS, KINDS, MORE, World
from tools.train_demo.talk import exchange, text

VOCAB = 2048
SPECIAL = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
)
ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
SPECIAL_IDS = {token: VOCAB - len(SPECIAL) + i for i, token in enumerate(SPECIAL)}
_PIECES = r"\n| ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+"
_TEXTS = 12_000


def _texts() -> Iterator[str]:
    """What the merges are learned from: lines, questions, answers and talk, in about the shares of training."""
    rng = Random(0)
    for _ in range(_TEXTS):
        world = World.of(rng, 400)
        fact = world.fact()
        asked, answer = rng.choice(fact.kind.questions)
        yield f"{rng.randrange(24):02}:{rng.randrange(60):02} {rng.choice(fact.kind.lines).format(**fact.slots)}"
        yield f"{asked.format(**fact.slots)}\n{answer.format(**fact.slots)}"
        template, slots = world.distractor()
        yield f"{rng.randrange(24):02}:{rng.randrange(60):02} {template.format(**slots)}"
        if rng.random() < 0.3:
            yield " ".join(exchange(rng))
            yield text(rng)
    for word in (*words.COLOURS, *words.OBJECTS, *words.FIRST_NAMES, *(f"{n:02}" for n in range(100))):
        yield f" {word}" * 20
    for number in range(100):  # a line may begin with a time
        yield f"{number:02}:{number:02}\n" * 20
    for line in (*INTROS, *MORE, *(line for kind in KINDS for line in kind.lines)):
        yield (line[0].upper() + line[1:]).replace("{", "").replace("}", "") + "\n"


def build_tokenizer() -> Tokenizer:
    """Trains the tokenizer. The same words and grammars give the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    assert len(spec["model"]["vocab"]) == VOCAB - len(SPECIAL)
    spec["model"]["vocab"] |= SPECIAL_IDS
    spec["added_tokens"] = [
        {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for token, number in SPECIAL_IDS.items()
    ]  # fmt: skip
    return Tokenizer.from_str(json.dumps(spec))


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Writes tokenizer.json, one entry a line."""
    path.write_text(json.dumps(json.loads(tokenizer.to_str()), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


class Vocabulary:
    """Ids of pieces of text, each encoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids = lru_cache(maxsize=None)(self._encode)

    def _encode(self, piece: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(piece, add_special_tokens=False).ids)


_of_worker: Vocabulary | None = None


def start_worker(tokenizer: str) -> None:
    """Begins a process that makes texts: reads the tokenizer.json that all its vocabularies are of."""
    global _of_worker
    _of_worker = Vocabulary(Tokenizer.from_file(tokenizer))


def worker_vocabulary() -> Vocabulary:
    """This process's vocabulary, behind `start_worker`."""
    assert _of_worker is not None
    return _of_worker
