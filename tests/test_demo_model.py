"""The bundled model through the services: it says what transformers' own class says, and finds a fact in a document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

import latentpool
from latentpool.cli.app import app
from latentpool.cli.group import LocalGroup
from latentpool.client import Client
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2
from tools.train_demo.cases import make_chat, turns_of
from tools.train_demo.tokens import Vocabulary

BUNDLED = Path(latentpool.__file__).parent / "checkpoints" / "demo"
EXPECTED = Path(__file__).parent / "data" / "demo" / "expected.safetensors"


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.full)])
def test_verify_passes_on_the_bundled_model(ranks: int) -> None:
    arguments = ["verify", str(BUNDLED), "--expected", str(EXPECTED), "--ranks", str(ranks), "--transport", "inproc"]
    done = CliRunner().invoke(app, [*arguments, "--page-rows", "64"])
    assert done.exit_code == 0, done.output
    assert done.output.rstrip().endswith("passed")


async def said(client: Client, prompt: list[int] | None, chat: Any = None) -> tuple[list[int], str, str]:
    """Token ids, text and receipt of a greedy reply to a prompt or a chat."""
    ids: list[int] = []
    text, receipt = "", ""
    async for event in client.generate(prompt, Sampling(max_tokens=40), chat=chat):
        if isinstance(event, router_pb2.Chunk):
            ids += event.token_ids
            text += event.text
        elif isinstance(event, router_pb2.Completion):
            receipt = event.receipt.sha256
    return ids, text, receipt


async def test_a_chat_and_questions_of_a_document() -> None:
    vocabulary = Vocabulary(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")))
    receipts = []
    for kv_pages, split in (("on", "off"), ("off", "off"), ("on", "on")):
        async with LocalGroup(BUNDLED, 2, context=1024, page_rows=64, kv_pages=kv_pages, split=split) as group:
            for prompt, answer in turns_of(make_chat(vocabulary, 900, 1, 0, more=1)):
                ids, _, receipt = await said(group.client, prompt)
                assert ids == answer
                receipts.append(receipt)
            _, text, _ = await said(group.client, None, [("user", "Who are you?")])
            assert text == "I am a small demonstration model. I read logs and answer questions about them."
    assert receipts[:2] == receipts[2:4] == receipts[4:]  # pages, windows and owners give the same bits
