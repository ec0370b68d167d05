"""A whole group: stop strings, log-probabilities and cuts of a reply, against what the same group says by other means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_checkpoint import random_checkpoint
from tokenizers import Tokenizer

from latentpool.cli.group import LocalGroup
from latentpool.client import Client
from latentpool.receipts import receipt
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2

MODEL = random_checkpoint()
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
PROMPT = list(b"The pool holds pages, and every page has an owner.")


def group(world: int) -> LocalGroup:
    return LocalGroup(MODEL, world, context=512, parallel=2, page_rows=64, dtype="f32")


async def reply(client: Client, **sampling: Any) -> tuple[list[int], str, list[router_pb2.TokenLogProb], router_pb2.Completion]:
    ids: list[int] = []
    text, scored, completion = "", [], router_pb2.Completion()
    async for event in client.generate(PROMPT, Sampling(**({"max_tokens": 60, "ignore_eos": True} | sampling))):
        if isinstance(event, router_pb2.Chunk):
            assert event.first_index == len(ids)
            ids += event.token_ids
            text += event.text
            scored += event.log_probs
        elif isinstance(event, router_pb2.Completion):
            completion = event
    return ids, text, scored, completion


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 3])
async def test_log_probabilities_of_a_reply_are_those_of_its_score(world: int) -> None:
    async with group(world) as served:
        ids, _, scored, _ = await reply(served.client, log_probs=5, temperature=0.8, seed=3, max_tokens=40)
        assert len(scored) == len(ids) == 40
        logits, given = [], []
        async for event in served.client.score(PROMPT + ids, decode_from=len(PROMPT), raw_logits=True):
            if isinstance(event, router_pb2.ScoredRows):
                logits.append(np.frombuffer(event.logits, "<f4").reshape(len(event.best_ids), -1))
                given += event.next_log_probs
        rows = np.concatenate(logits)[len(PROMPT) - 1 : -1]
        wide = rows.astype(np.float64)
        log_softmax = (
            wide
            - np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
            - wide.max(axis=1, keepdims=True)
        )
        assert [one.log_prob for one in scored] == given[len(PROMPT) - 1 : -1]  # the same bits
        for row, one in enumerate(scored):
            likeliest = sorted(range(rows.shape[1]), key=lambda i: (-rows[row, i], i))[:5]
            assert list(one.top_ids) == likeliest
            np.testing.assert_allclose(one.top_log_probs, log_softmax[row, likeliest], atol=1e-9)
        plain, _, none, _ = await reply(served.client, temperature=0.8, seed=3, max_tokens=40)
        assert (plain, none) == (ids, [])  # asking changes nothing


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
async def test_a_stop_string_ends_a_reply_in_its_text(world: int) -> None:
    async with group(world) as served:
        ids, text, _, _ = await reply(served.client, temperature=1.0, seed=9)
        assert text == TOKENIZER.decode(ids)
        readable = [i for i in range(5, len(text) - 2) if "\ufffd" not in text[i : i + 2]]
        stop = text[readable[0] : readable[0] + 2]
        count = next(n for n in range(1, 61) if stop in TOKENIZER.decode(ids[:n]))
        stopped, told, _, completion = await reply(
            served.client, temperature=1.0, seed=9, stop=("never", stop), max_tokens=None
        )
        assert stopped == ids[:count]
        assert told == text[: text.index(stop)]
        assert (completion.finish_reason, completion.stop) == (router_pb2.FINISH_REASON_STOP, stop)
        assert completion.receipt.sha256 == receipt(PROMPT, ids[:count])


async def test_cuts_that_leave_one_token_are_greedy() -> None:
    async with group(2) as served:
        greedy, *_ = await reply(served.client, max_tokens=8)
        drawn: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 8}
        for cut in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
            assert (await reply(served.client, **drawn, **cut))[0] == greedy
        assert (await reply(served.client, **drawn))[0] != greedy
