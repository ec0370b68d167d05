"""Conversations about generated documents as token ids, with what training must know of each token.

A document stands in a user message, behind the release's chat prefix; questions follow in the same message or in later turns.
An answer ends with the token that opens the next user turn, which is one of the model's end tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random

from tools.train_demo import words
from tools.train_demo.grammar import INTROS, MORE, Fact, Slots, World
from tools.train_demo.talk import exchange, text
from tools.train_demo.tokens import SPECIAL_IDS, Vocabulary

CONTEXT, SAID, COPIED, PADDING = range(4)
"""What a token is: given; said by the model; said by the model and copied from the document; nothing."""

LINE_TOKENS = 15
"""Tokens of a line, about."""
_QUESTION_TOKENS = 48
_SLOT = re.compile(r"\{(\w+)\}")


@cache
def _parsed(template: str) -> tuple[tuple[str, str], ...]:
    """(literal, "") and ("", slot) in order. The space before a slot goes to the slot's word."""
    parts: list[tuple[str, str]] = []
    end = 0
    for match in _SLOT.finditer(template):
        literal = template[end : match.start()]
        if match.start() and not literal.endswith(" "):
            raise ValueError(f"{template!r}: a slot must begin the line or stand behind a space")
        if literal[:-1]:
            parts.append((literal[:-1], ""))
        parts.append(("", match[1]))
        end = match.end()
    if template[end:]:
        parts.append((template[end:], ""))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Placed:
    """A fact in a document: where each value slot's tokens begin, and what they are."""

    fact: Fact
    spans: dict[str, tuple[int, tuple[int, ...]]]
    at: int


@dataclass(slots=True)
class Conversation:
    """Token ids; for each what it is (CONTEXT..PADDING), and the position it is copied from, or -1. `document`: where the one
    document that all its questions stand behind ends; 0 where there is none such."""

    vocabulary: Vocabulary
    ids: list[int] = field(default_factory=list)
    roles: bytearray = field(default_factory=bytearray)
    sources: list[int] = field(default_factory=list)
    document: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def copy(self) -> Conversation:
        return Conversation(self.vocabulary, self.ids.copy(), self.roles.copy(), self.sources.copy(), self.document)

    def add(self, ids: Sequence[int], role: int = CONTEXT, source: int = -1) -> None:
        """Appends tokens; `source` is where the first was copied from, the others from behind it."""
        self.ids += ids
        self.roles += bytes((role,)) * len(ids)
        self.sources += range(source, source + len(ids)) if source >= 0 else [-1] * len(ids)

    def text(self, piece: str, role: int = CONTEXT) -> None:
        self.add(self.vocabulary.ids(piece), role)

    def special(self, *tokens: str, role: int = CONTEXT) -> None:
        self.add([SPECIAL_IDS[token] for token in tokens], role)

    def fill(self, template: str, slots: Slots, lead: bool) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Appends a line, behind a space (lead) or as a sentence of its own. Returns where each slot's tokens are."""
        spans: dict[str, tuple[int, tuple[int, ...]]] = {}
        first = True
        for literal, slot in _parsed(template):
            piece = literal or slots[slot]
            if first:
                piece = f" {piece}" if lead else piece[0].upper() + piece[1:]
                first = False
            elif slot:
                piece = f" {piece}"
            ids = self.vocabulary.ids(piece)
            if slot:
                spans[slot] = (len(self.ids), ids)
            self.add(ids)
        return spans

    def question(self, template: str, slots: Slots) -> None:
        for literal, slot in _parsed(template):
            self.text(literal or f" {slots[slot]}")

    def answer(self, template: str, slots: Slots, spans: dict[str, tuple[int, tuple[int, ...]]]) -> None:
        """Appends an assistant turn up to and with its end token."""
        self.special("<|assistant|>", "<think>")
        self.special("</think>", role=SAID)
        for literal, slot in _parsed(template):
            if slot in spans:
                start, ids = spans[slot]
                self.add(ids, COPIED, start)
            else:
                self.text(literal or f" {slots[slot]}", SAID)
        self.special("<|user|>", role=SAID)

    def say(self, asked: str, answer: str) -> None:
        """Appends a turn of small talk."""
        self.text(asked)
        self.special("<|assistant|>", "<think>")
        self.special("</think>", role=SAID)
        self.text(answer, SAID)
        self.special("<|user|>", role=SAID)

    def pad(self, length: int) -> None:
        """Cuts or pads to exactly `length` tokens."""
        del self.ids[length:], self.roles[length:], self.sources[length:]
        missing = length - len(self.ids)
        self.add([SPECIAL_IDS["<|endoftext|>"]] * missing, PADDING)


class Writer:
    """Writes one conversation about one document."""

    def __init__(self, vocabulary: Vocabulary, rng: Random, length: int) -> None:
        self.rng = rng
        self.world = World.of(rng, max(12, length // LINE_TOKENS))
        self.chat = Conversation(vocabulary)
        self.facts: list[Placed] = []
        self._style = rng.choice(("time", "time", "list", "plain", "speaker"))
        self._minutes = rng.randrange(24 * 60)
        prefix(self.chat, rng)

    def line(self) -> None:
        """Appends a line: a fact or a distractor, with equal chance."""
        chat, rng = self.chat, self.rng
        chat.text("\n")
        if self._style == "time":
            self._minutes += rng.randrange(4)
            chat.text(f"{self._minutes // 60 % 24:02}")
            chat.text(":")
            chat.text(f"{self._minutes % 60:02}")
        elif self._style == "list":
            chat.text("-")
        elif self._style == "speaker":
            chat.text(rng.choice(words.FIRST_NAMES))
            chat.text(":")
        lead = self._style != "plain"
        if rng.random() < 0.5:
            fact = self.world.fact()
            at = len(chat)
            spans = chat.fill(rng.choice(fact.kind.lines), fact.slots, lead)
            self.facts.append(Placed(fact, {slot: spans[slot] for slot in fact.kind.value}, at))
        else:
            template, slots = self.world.distractor()
            chat.fill(template, slots, lead)

    def intro(self, choices: Sequence[str] = INTROS) -> None:
        self.chat.text(self.rng.choice(choices))

    def document(self, length: int) -> None:
        """Appends an introduction and lines, up to about `length` tokens and with one fact at the least."""
        self.intro()
        while len(self.chat) < length or not self.facts:
            self.line()
        self.chat.document = len(self.chat)

    def before_question(self) -> None:
        """Between a document and a question in the same message."""
        self.chat.text(self.rng.choice(("\n", "\n\n", "\n\n", "\nQuestion:")))
        if self.chat.ids[-1] == self.chat.vocabulary.ids(":")[-1]:
            self.chat.text("\n")

    def ask(self, placed: Placed) -> None:
        """Appends a question about a fact, its answer and the end token."""
        asked, answer = self.rng.choice(placed.fact.kind.questions)
        self.chat.question(asked, placed.fact.slots)
        self.chat.answer(answer, placed.fact.slots, placed.spans)

    def turn(self, placed: Placed) -> None:
        """A question, or seldom a word of small talk before it."""
        if self.rng.random() < 0.04:
            self.chat.say(*exchange(self.rng))
        self.ask(placed)


def prefix(chat: Conversation, rng: Random) -> None:
    """The beginning of every chat, up to the first user message."""
    chat.special("[gMASK]", "<sop>", "<|system|>")
    chat.text("Reasoning Effort: " + rng.choices(("Max", "High", "Low"), (8, 1, 1))[0])
    if rng.random() < 0.1:
        chat.special("<|system|>")
        chat.text("You are a helpful assistant.")
    chat.special("<|user|>")


def interleaved(vocabulary: Vocabulary, rng: Random, length: int) -> Conversation:
    """Pieces of a document with questions between them about any earlier fact: about 30 % of the items are questions."""
    writer = Writer(vocabulary, rng, length)
    writer.intro()
    while len(writer.chat) < length:
        for _ in range(1 + int(rng.expovariate(1 / 6))):
            writer.line()
        if not writer.facts:
            continue
        writer.before_question()
        writer.ask(rng.choice(writer.facts))
        while rng.random() < 0.6:
            writer.turn(rng.choice(writer.facts))
        writer.intro(MORE)
    return writer.chat


def block(vocabulary: Vocabulary, rng: Random, length: int) -> Conversation:
    """A document of three quarters of the length, then turns of questions, each about another fact while there are any."""
    writer = Writer(vocabulary, rng, length)
    writer.document(length * 3 // 4)
    writer.before_question()
    order: list[Placed] = []
    while len(writer.chat) < length:
        order = order or rng.sample(writer.facts, len(writer.facts))
        writer.turn(order.pop())
    return writer.chat


def single(vocabulary: Vocabulary, rng: Random, length: int, depth: float | None = None, more: int = 0) -> Conversation:
    """A document and one question at its end, `length` tokens at most in all. `depth` (0 to 1): about where the asked fact
    stands; None: anywhere. `more`: further questions in later turns, about facts anywhere."""
    writer = Writer(vocabulary, rng, length)
    writer.document(length - _QUESTION_TOKENS * (1 + more))
    end = writer.chat.document
    first = rng.choice(writer.facts) if depth is None else min(writer.facts, key=lambda fact: abs(fact.at - depth * end))
    writer.before_question()
    writer.ask(first)
    for _ in range(more):
        writer.ask(rng.choice(writer.facts))
    return writer.chat


def apart(vocabulary: Vocabulary, rng: Random, length: int, parts: int, each: int) -> Iterator[tuple[int, Conversation]]:
    """One document and many questions, each of them alone behind the document, `length` tokens at most in all: `each`
    questions about different facts of each of `parts` equal parts of the document. Yields the part with each."""
    writer = Writer(vocabulary, rng, length)
    writer.document(length - _QUESTION_TOKENS)
    document = writer.chat
    for part in range(parts):
        for placed in rng.sample([fact for fact in writer.facts if fact.at * parts // len(document) == part], each):
            writer.chat = document.copy()
            writer.before_question()
            writer.ask(placed)
            yield part, writer.chat


def talk(vocabulary: Vocabulary, rng: Random, length: int) -> Conversation:
    """Small talk in short chats, and plain texts, each ended by the end of text."""
    chat = Conversation(vocabulary)
    while len(chat) < length:
        if rng.random() < 0.5:
            chat.text(text(rng), SAID)
        else:
            prefix(chat, rng)
            for _ in range(rng.randrange(1, 4)):
                chat.say(*exchange(rng))
        chat.special("<|endoftext|>", role=SAID)
    return chat
