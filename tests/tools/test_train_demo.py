"""The texts a demonstration model is trained on: unique keys, tokens that join, answers that stand where they are said to."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

import latentpool
from latentpool.geometry import Geometry
from services.rank_worker.model.checkpoint import open_checkpoint
from tools.train_demo import documents, log
from tools.train_demo.batches import SUPERVISED_PART, make_batch
from tools.train_demo.cases import FIFTHS, make_case, make_chat, turns_of
from tools.train_demo.documents import CONTEXT, COPIED, PADDING, SAID
from tools.train_demo.grammar import KINDS, World
from tools.train_demo.schedule import Curriculum, learning_rate
from tools.train_demo.settings import generation_config, model_config
from tools.train_demo.tokens import SPECIAL_IDS, VOCAB, Vocabulary, build_tokenizer

BUNDLED = Path(latentpool.__file__).parent / "checkpoints" / "demo"
TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
VOCABULARY = Vocabulary(TOKENIZER)
MAKERS = (documents.interleaved, documents.block, documents.single, documents.talk)


@pytest.mark.parametrize("lines", [10, 300, 3000])
def test_no_two_facts_of_a_document_have_equal_keys(lines: int) -> None:
    world = World.of(Random(lines), lines)
    facts = [world.fact() for _ in range(lines // 2)]
    keys = [(fact.kind.name, *(fact.slots[name] for name in fact.kind.key)) for fact in facts]
    assert len(set(keys)) == len(keys)
    near = sum(a.slots["o"] == b.slots["o"] and a.kind is b.kind for a in facts for b in facts if a is not b)
    assert near > len(facts)  # most facts have others that differ in a word or two


def test_a_value_stands_behind_its_key_and_never_first() -> None:
    for kind in KINDS:
        for line in kind.lines:
            assert max(line.index(f"{{{name}}}") for name in kind.key) < min(line.index(f"{{{name}}}") for name in kind.value)
            assert not line.startswith("{")
        for _, answer in kind.questions:
            assert all(f"{{{name}}}" in answer for name in kind.value)
            assert not answer.startswith("{")


@pytest.mark.parametrize("make", MAKERS)
def test_pieces_encode_as_the_whole(make) -> None:
    for seed in range(5):
        ids = make(VOCABULARY, Random(seed), 800).ids
        text = TOKENIZER.decode(ids, skip_special_tokens=False)
        assert TOKENIZER.encode(text).ids == ids


def test_copied_tokens_are_those_of_their_source() -> None:
    for make in MAKERS[:3]:
        chat = make(VOCABULARY, Random(3), 1500)
        copied = [i for i, role in enumerate(chat.roles) if role == COPIED]
        assert copied
        for i in copied:
            assert 0 <= chat.sources[i] < i
            assert chat.ids[chat.sources[i]] == chat.ids[i]
        assert all(source == -1 for source, role in zip(chat.sources, chat.roles, strict=True) if role != COPIED)


def test_every_answer_ends_with_an_end_token() -> None:
    chat = make_chat(VOCABULARY, 1024, 2, 0, more=3)
    turns = turns_of(chat)
    assert len(turns) == 4
    for prompt, answer in turns:
        assert prompt[-2:] == [SPECIAL_IDS["<|assistant|>"], SPECIAL_IDS["<think>"]]
        assert answer[0] == SPECIAL_IDS["</think>"]
        assert answer[-1] in generation_config()["eos_token_id"]
        assert TOKENIZER.decode(answer).endswith(".")


@pytest.mark.parametrize("fifth", range(FIFTHS))
def test_a_case_asks_about_its_fifth_and_fits(fifth: int) -> None:
    length = 2048
    chat = make_chat(VOCABULARY, length, fifth, 7)
    assert length - 64 < len(chat) <= length
    source = min(source for source in chat.sources if source >= 0)
    assert fifth - 0.1 < FIFTHS * source / len(chat) < fifth + 1.1
    case = make_case(VOCABULARY, length, fifth, 7)
    assert len(case.tokens) == length
    assert case.said.sum() == len(turns_of(chat)[0][1])


def test_a_batch_is_the_same_each_time_and_has_its_shapes() -> None:
    batch, again = (make_batch(VOCABULARY, 5, 9, 4096, 1024, "documents") for _ in range(2))
    assert (batch.tokens == again.tokens).all()
    assert (batch.sources == again.sources).all()
    assert batch.tokens.shape == batch.roles.shape == (4, 1024)
    assert batch.asked.shape == (4, 1024 // SUPERVISED_PART)
    rows, columns = (batch.sources >= 0).nonzero()
    assert len(rows) > 50
    for row, column in zip(rows, columns, strict=True):
        at, source = batch.asked[row, column], batch.sources[row, column]
        assert batch.tokens[row, at + 1] == batch.tokens[row, source]
    talk = make_batch(VOCABULARY, 5, 9, 1024, 256, "talk")
    assert set(talk.roles.flatten()) <= {CONTEXT, SAID, PADDING}
    assert (talk.sources == -1).all()


def test_lengths_double_when_copies_are_right_and_not_before() -> None:
    curriculum = Curriculum(0, 2048)
    for _ in range(200):
        curriculum.learn(512, 0.79)
    assert curriculum.length == 512
    for _ in range(30):
        curriculum.learn(512, 1.0)
    assert curriculum.length == 1024
    for _ in range(29):
        curriculum.learn(1024, 1.0)
        curriculum.learn(512, 1.0)  # of another length: says nothing
    assert curriculum.length == 1024
    for _ in range(100):
        curriculum.learn(curriculum.length, 1.0)
    assert curriculum.length == 2048
    assert {curriculum.draw(step)[0] for step in range(200)} == {256, 512, 1024, 2048}
    assert learning_rate(149, 1800) == pytest.approx(2e-3)
    assert learning_rate(1800, 1800) == pytest.approx(1e-4)


def test_the_bundled_files_are_what_the_tools_write() -> None:
    assert build_tokenizer().to_str() == TOKENIZER.to_str()
    assert (BUNDLED / "log.txt").read_text(encoding="utf-8").splitlines() == log.lines()
    template = Path(documents.__file__).with_name("chat_template.jinja")
    assert (BUNDLED / "chat_template.jinja").read_text() == template.read_text()
    geometry = Geometry.from_file(BUNDLED)
    assert geometry == Geometry.from_config(model_config())
    assert geometry.vocab == VOCAB == TOKENIZER.get_vocab_size()
    assert geometry.draft_layers == 1
    open_checkpoint(BUNDLED, geometry)
    assert sum(file.stat().st_size for file in BUNDLED.iterdir()) <= 25_000_000
