"""Text to token ids and back. Encoding runs in threads, off the event loop; a reply is decoded as its tokens come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import tokenizers

from latentpool.errors import CheckpointError, RequestError
from latentpool.v1 import router_pb2
from services.router.chat import ChatTemplate

T = TypeVar("T")

_HOLE = "\ufffd"
_LONGEST_HOLD = 16


class Texts:
    """The checkpoint's tokenizer, or its absence, and the threads that work on texts and long id lists."""

    def __init__(self, model: Path | None) -> None:
        """Reads `model`/tokenizer.json and the chat template, if they are there. Raises CheckpointError where one cannot be
        read."""
        self._template = ChatTemplate(model)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="texts")
        self._tokenizer: tokenizers.Tokenizer | None = None
        if model is not None and (path := model / "tokenizer.json").exists():
            try:
                self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises bare Exception
                raise CheckpointError(f"{path}: cannot be read as a tokenizer: {error}") from None

    @property
    def present(self) -> bool:
        return self._tokenizer is not None

    async def work(self, function: Callable[[], T]) -> T:
        """Runs a function in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text, with what the tokenizer itself adds. Raises RequestError without a tokenizer."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError(
                "text: this checkpoint is served without a tokenizer (no tokenizer.json): send token_ids", field="text"
            )
        # a batch of one: unlike encode, it releases the interpreter lock
        return await self.work(lambda: list(tokenizer.encode_batch_fast([text])[0].ids))

    async def encode_chat(self, chat: router_pb2.Chat) -> tuple[list[int], int]:
        """Token ids of a chat, and how many of them come before its newest user message (0 where there is none). Raises
        RequestError without a tokenizer or template, and in the template's words."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError(
                "chat: this checkpoint is served without a tokenizer (no tokenizer.json): send token_ids", field="chat"
            )

        def encode() -> tuple[list[int], int]:
            rendered = self._template.render(chat)
            # the template writes what a tokenizer would add
            whole, before = tokenizer.encode_batch_fast([rendered.text, rendered.before], add_special_tokens=False)
            return list(whole.ids), _common(whole.ids, before.ids)

        return await self.work(encode)

    def detokenizer(self) -> Detokenizer:
        """For one reply. Without a tokenizer its texts are empty."""
        return Detokenizer(self._tokenizer.decode if self._tokenizer is not None else lambda _: "")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens with which both begin."""
    count = min(len(a), len(b))
    differ = np.asarray(a[:count]) != np.asarray(b[:count])
    return int(differ.argmax()) if differ.any() else count


class Detokenizer:
    """Decodes a reply piece by piece. The pieces join to what decoding all its tokens at once gives; a character whose
    bytes are not complete is held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # context, then what is not fully said
        self._context = 0
        self._said = 0  # characters said of the text behind the context

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._ids += ids
        text = self._tail()
        # bytes that are not a character yet decode to one hole at the very end; all before it is settled
        stable = len(text) - text.endswith(_HOLE)
        piece = text[self._said : stable]
        if stable == len(text):
            del self._ids[: self._context]
            self._context, self._said = len(self._ids), 0
        else:
            self._said = max(self._said, stable)
            if len(self._ids) - self._context > _LONGEST_HOLD:
                self._cut()
        return piece

    def flush(self) -> str:
        """What is still held back, as the tokenizer shows incomplete bytes. Called once, at the end."""
        return self._tail()[self._said :]

    def _tail(self) -> str:
        known = len(self._decode(self._ids[: self._context])) if self._context else 0
        return self._decode(self._ids)[known:]

    def _cut(self) -> None:
        """Keeps only the last tokens, cut where no character is split: bytes that never become one (a random model's) must
        not make every step longer. Nor must tokens without text behind bytes that wait."""
        whole = self._decode(self._ids)
        ids = [token for token in self._ids if self._decode((token,))]
        if self._decode(ids) != whole:
            return
        for kept in range(1, 5):
            head, rest = ids[:-kept], ids[-kept:]
            if self._decode(head) + self._decode(rest) == whole:
                ids = rest
                break
        self._ids, self._context, self._said = ids, 0, len(self._decode(ids)) - 1
