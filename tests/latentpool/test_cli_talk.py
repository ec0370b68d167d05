"""latentpool generate: what its flags ask of the router, and what of the answer is shown."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from latentpool.cli import talk
from latentpool.cli.app import app
from latentpool.sampling import Sampling
from latentpool.v1 import pool_manager_pb2
from latentpool.v1 import router_pb2 as pb

SCORE = pb.TokenLogProb(log_prob=-0.5, top_ids=[7, 9], top_log_probs=[-0.5, -1.5])


class Asked:
    """A client that answers one reply and keeps what was asked."""

    def __init__(self) -> None:
        self.prompt: Any = None
        self.sampling = Sampling()
        self.background = False

    async def get_model(self) -> Any:
        return SimpleNamespace(has_tokenizer=True)

    async def generate(
        self, prompt: Any, sampling: Sampling, *, chat: Any = None, background: bool = False
    ) -> AsyncIterator[Any]:
        assert chat is None
        self.prompt, self.sampling, self.background = prompt, sampling, background
        scores = [] if sampling.log_probs is None else [SCORE]
        yield pb.Waiting(ahead=1, reason="the one lane is busy")
        yield pb.Chunk(token_ids=[7], text="[/]", log_probs=scores)
        yield pb.Chunk(first_index=1, token_ids=[8], log_probs=scores)
        yield pb.Completion(finish_reason=pb.FINISH_REASON_STOP, stop="[/x]", usage=pb.Usage(generated_tokens=2, parked=1))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    import asyncio

    client = Asked()
    monkeypatch.setattr(talk, "ask_router", lambda _settings, question: asyncio.run(question(client)))
    return client


def generate(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["generate", "hello", *arguments])


def test_flags_become_the_request(asked: Asked) -> None:
    ran = generate("--top-p", "0.9", "--min-p", "0.05", "--stop", "a b", "--stop", "é", "--background", "--temperature", "0.7")
    assert ran.exit_code == 0, ran.output
    assert asked.prompt == "hello"
    assert asked.sampling == Sampling(temperature=0.7, top_p=0.9, min_p=0.05, stop=("a b", "é"))
    assert asked.background
    assert ran.stdout == "[/]\n"
    assert "2 generated (ended by stop '[/x]')" in ran.stderr


def test_the_last_lines_say_how_the_prompt_was_computed_and_where_it_went() -> None:
    told = talk.summary(pb.Completion(usage=pb.Usage(prompt_tokens=900, generated_tokens=3)))
    assert "900 prompt tokens (0 cached), 3 generated" in told
    assert not any(word in told for word in ("borrowed", "fetched", "carried", "parked"))
    usage = pb.Usage(prompt_tokens=900, borrowed_tokens=640, fetched_tokens=1_260, carried=1, parked=2, generated_tokens=3)
    told = talk.summary(pb.Completion(usage=usage, seed=5))
    assert "900 prompt tokens (0 cached, 640 on borrowed pages, 1,260 on fetched rows)" in told
    assert "; carried once; parked 2 times; seed 5\n" in told
    resumed = pb.Usage(prompt_tokens=900, cached_tokens=832, cached_from=pool_manager_pb2.MARK_REPLY, fetched_tokens=68)
    told = talk.summary(pb.Completion(usage=resumed))
    assert "900 prompt tokens (832 cached from a reply mark, 68 on fetched rows), 0 generated" in told


def test_without_flags_nothing_is_cut(asked: Asked) -> None:
    assert generate().exit_code == 0
    assert (asked.sampling, asked.background) == (Sampling(), False)


def test_log_probabilities_are_shown_as_json(asked: Asked) -> None:
    ran = generate("--log-probs", "2", "--stop", "[/x]", "--json")
    assert asked.sampling.log_probs == 2
    shown = json.loads(ran.stdout)
    assert (shown["text"], shown["token_ids"], shown["stop"], shown["usage"]["parked"]) == ("[/]", [7, 8], "[/x]", 1)
    assert shown["log_probs"] == [{"log_prob": -0.5, "top_ids": [7, 9], "top_log_probs": [-0.5, -1.5]}] * 2
    assert "log_probs" not in json.loads(generate("--json").stdout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--top-p", "0"), "--top-p 0: top-p must be a number above 0, at most 1"),
        (("--top-p", "1.5"), "--top-p 1.5: top-p must be a number above 0, at most 1"),
        (("--top-p", "nan"), "--top-p nan: top-p must be a number above 0, at most 1"),
        (("--min-p", "2"), "--min-p 2: min-p must be a number from 0 to 1"),
        (("--log-probs", "3"), "--log-probs: they are shown as JSON only: add --json"),
        (("--log-probs", "21", "--json"), "20"),
    ],
)
def test_what_is_not_allowed_is_said_before_anything_is_asked(asked: Asked, arguments: tuple[str, ...], words: str) -> None:
    ran = generate(*arguments)
    assert ran.exit_code == 2
    assert words in ran.stderr
    assert asked.prompt is None
