"""Questions that a model is measured by, read as text by a solver of its own: it knows the grammars' forms and no position."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import latentpool
from tools.train_demo.cases import FIFTHS, make_chat, make_shared, turns_of
from tools.train_demo.documents import Conversation
from tools.train_demo.grammar import KINDS
from tools.train_demo.tokens import Vocabulary

TOKENIZER = Tokenizer.from_file(str(Path(latentpool.__file__).parent / "checkpoints" / "demo" / "tokenizer.json"))
VOCABULARY = Vocabulary(TOKENIZER)
LENGTH = 4096
HEAD = r"(?P<head>\d\d:\d\d|-|\w+:|) ?"
"""A line's time, dash or speaker."""


def slots_of(template: str, text: str, head: str = "") -> dict[str, str] | None:
    """What fills the template's slots, if the text is of its form."""

    def words(slot: re.Match[str]) -> str:
        return rf"(?P<{slot[1]}>\w+ \w+)" if slot[1] == "p" else rf"(?P<{slot[1]}>\w+)"

    form = re.sub(r"\\{(\w+)\\}", words, re.escape(template))
    found = re.fullmatch(f"{head}(?i:{form[0]}){form[1:]}", text)
    return found.groupdict() if found else None


def solve(document: str, question: str) -> tuple[str, int]:
    """The answer, and the character at which the one line that tells it begins, behind its head."""
    ((kind, key, answer),) = [
        (kind, slots, answer) for kind in KINDS for form, answer in kind.questions if (slots := slots_of(form, question))
    ]
    found, at = [], 0
    for line in document.split("\n"):
        for form in kind.lines:
            told = slots_of(form, line, HEAD)
            if told and all(told[name] == key[name] for name in kind.key):
                found.append((told, at + len(told["head"])))
        at += len(line) + 1
    ((told, at),) = found
    return answer.format(**(key | told)), at


def fifth_of(chat: Conversation) -> int:
    """In which fifth of the document the first question's answer is told; it must be the right one, and told once."""
    prompt, answer = turns_of(chat)[0]
    text, document = (TOKENIZER.decode(ids, skip_special_tokens=False) for ids in (prompt, prompt[: chat.document]))
    question = text.removeprefix(document).partition("<|assistant|>")[0]
    right, at = solve(document, question.strip().removeprefix("Question:\n"))
    assert TOKENIZER.decode(answer) == right
    return FIFTHS * len(TOKENIZER.encode(document[:at]).ids) // chat.document


@pytest.mark.parametrize("number", range(6))
def test_questions_that_share_a_document(number: int) -> None:
    made = list(make_shared(VOCABULARY, LENGTH, 3, number))
    assert [fifth for fifth, _ in made] == [fifth for fifth in range(FIFTHS) for _ in range(3)]
    assert [fifth_of(chat) for _, chat in made] == [fifth for fifth, _ in made]
    assert len({tuple(chat.ids[: chat.document]) for _, chat in made}) == 1
    assert len({tuple(chat.ids) for _, chat in made}) == len(made)
    assert all(LENGTH - 64 < len(chat) <= LENGTH for _, chat in made)
    again = make_shared(VOCABULARY, LENGTH, 3, number)
    assert [chat.ids for _, chat in again] == [chat.ids for _, chat in made]


@pytest.mark.parametrize("fifth", range(FIFTHS))
def test_a_single_question_is_answered_in_its_fifth(fifth: int) -> None:
    chats = [make_chat(VOCABULARY, LENGTH, fifth, number) for number in range(4)]
    off = [fifth_of(chat) - fifth for chat in chats]
    assert {*off} <= {-1, 0, 1}  # the fact nearest to a depth may stand just beyond the edge
    assert off.count(0) >= 3
