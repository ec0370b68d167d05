"""Reads requests: what is not allowed is refused here, by name and with numbers, before a stream starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from latentpool.errors import NotServedError, RequestError
from latentpool.geometry import Geometry
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2
from services.router.conversations import Scoring
from services.router.stops import StopFinder, StopStrings
from services.router.text import Texts

MAX_REQUEST_ID = 128

Request = router_pb2.GenerateRequest | router_pb2.ScoreRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against. `context` in tokens."""

    context: int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that may run. `tokens` is uint32 [prompt]; a background request yields to all others; `stops` are the stop
    strings of `sampling`."""

    request_id: str
    tokens: npt.NDArray[np.uint32]
    sampling: Sampling
    scoring: Scoring | None = None
    background: bool = False
    stops: StopStrings = field(default_factory=StopStrings)
    stop_finder: StopFinder | None = None
    """Where the reply has stop strings: what the round loop asks after each token."""


async def read_generate(request: router_pb2.GenerateRequest, limits: Limits, texts: Texts) -> Accepted:
    """Raises RequestError, or NotServedError where prompt and max_tokens exceed the context."""
    sampling = Sampling.from_proto(request.sampling)
    sampling.check(limits.geometry.vocab)
    background = _background(request.priority)
    if sampling.stop and not texts.present:
        raise RequestError(
            "stop: this checkpoint is served without a tokenizer (no tokenizer.json), so a reply has no text: send "
            "stop_token_ids",
            field="sampling.stop",
        )
    tokens = await _prompt(request, limits, texts)
    _refuse_images(tokens, request, limits.geometry)
    _check_context(len(tokens), sampling.max_tokens, limits.context)
    stops = await texts.work(lambda: StopStrings(sampling.stop)) if sampling.stop else StopStrings()
    finder = StopFinder(stops, texts.detokenizer()) if stops else None
    return Accepted(request.request_id, tokens, sampling, background=background, stops=stops, stop_finder=finder)


async def read_score(request: router_pb2.ScoreRequest, limits: Limits, texts: Texts) -> Accepted:
    """Raises RequestError, or NotServedError where the tokens exceed the context."""
    tokens = await _prompt(request, limits, texts)
    decode_from = request.decode_from if request.HasField("decode_from") else len(tokens)
    if not 1 <= decode_from <= len(tokens):
        raise RequestError(
            f"decode_from = {decode_from}: 1 to {len(tokens)}, the number of tokens", field="decode_from", tokens=len(tokens)
        )
    _refuse_images(tokens[:decode_from], request, limits.geometry)  # from there on they are a reply's, which may hold any id
    if len(tokens) > limits.context:
        raise NotServedError(
            f"{len(tokens)} tokens to score: this group serves --context {limits.context}",
            field="prompt",
            tokens=len(tokens),
            context=limits.context,
        )
    return Accepted(request.request_id, tokens, Sampling(), Scoring(decode_from, request.raw_logits))


def _background(priority: router_pb2.Priority.ValueType) -> bool:
    if priority not in router_pb2.Priority.values():
        raise RequestError(
            f"priority = {priority}: PRIORITY_FOREGROUND (1, and where it is left out) or PRIORITY_BACKGROUND (2)",
            field="priority",
        )
    return priority == router_pb2.PRIORITY_BACKGROUND


def _check_context(prompt: int, max_tokens: int | None, context: int) -> None:
    numbers = {"prompt_tokens": prompt, "context": context}
    if prompt >= context:
        raise NotServedError(
            f"a prompt of {prompt} tokens leaves no room for a reply: this group serves --context {context}",
            field="prompt",
            **numbers,
        )
    if max_tokens is not None and prompt + max_tokens > context:
        raise NotServedError(
            f"a prompt of {prompt} tokens and max_tokens = {max_tokens} make {prompt + max_tokens} tokens: this group serves "
            f"--context {context}",
            field="sampling.max_tokens",
            max_tokens=max_tokens,
            **numbers,
        )


async def _prompt(request: Request, limits: Limits, texts: Texts) -> npt.NDArray[np.uint32]:
    if len(request.request_id) > MAX_REQUEST_ID:
        raise RequestError(f"request_id has {len(request.request_id)} characters: at most {MAX_REQUEST_ID}", field="request_id")
    ids: Sequence[int] = await texts.encode(request.text) if request.HasField("text") else request.token_ids.ids
    if not ids:
        raise RequestError("the prompt is empty: send text or token_ids with at least one token", field="prompt")
    tokens = await texts.work(lambda: np.array(ids, dtype=np.uint32))
    vocab = limits.geometry.vocab
    _refuse(tokens >= vocab, tokens, request, f"ids of this model are 0 to {vocab - 1}")
    return tokens


def _refuse_images(tokens: npt.NDArray[np.uint32], request: Request, geometry: Geometry) -> None:
    images = np.isin(tokens, np.array(geometry.image_ids, dtype=np.uint32))
    _refuse(images, tokens, request, "an image or video token, and this build serves text only")


def _refuse(wrong: npt.NDArray[np.bool_], tokens: npt.NDArray[np.uint32], request: Request, why: str) -> None:
    if wrong.any():
        where, field = ("the text's token", "text") if request.HasField("text") else ("token_ids", "token_ids.ids")
        index = int(wrong.argmax())
        raise RequestError(f"{where}[{index}] = {tokens[index]}: {why}", field=field, index=index, token=int(tokens[index]))
