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
from services.router.kept import Blocks, Keeping
from services.router.stops import StopFinder, StopStrings
from services.router.text import Texts

MAX_REQUEST_ID = 128

Request = router_pb2.GenerateRequest | router_pb2.ScoreRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against. `context` in tokens. `kept`: the seed of what identifies kept states, of callers
    without a token; None: nothing is kept."""

    context: int
    geometry: Geometry
    kept: Blocks | None = None


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
    keeping: Keeping = field(default_factory=Keeping)


async def read_generate(request: router_pb2.GenerateRequest, limits: Limits, texts: Texts, caller: bytes = b"") -> Accepted:
    """`caller`: the scope within which its states are kept. Raises RequestError, or NotServedError where prompt and max_tokens
    exceed the context."""
    sampling = Sampling.from_proto(request.sampling)
    sampling.check(limits.geometry.vocab)
    background = _background(request.priority)
    if sampling.stop and not texts.present:
        raise RequestError(
            "stop: this checkpoint is served without a tokenizer (no tokenizer.json), so a reply has no text: send "
            "stop_token_ids",
            field="sampling.stop",
        )
    tokens, rewind = await _prompt(request, limits, texts)
    _refuse_images(tokens, request, limits.geometry)
    _check_context(len(tokens), sampling.max_tokens, limits.context)
    if request.HasField("rewind"):
        rewind = _checked_rewind(request.rewind, len(tokens))
    keeping = await texts.work(lambda: _keeping(tokens, limits.kept, caller, rewind))
    stops = await texts.work(lambda: StopStrings(sampling.stop)) if sampling.stop else StopStrings()
    finder = StopFinder(stops, texts.detokenizer()) if stops else None
    return Accepted(
        request.request_id, tokens, sampling, background=background, stops=stops, stop_finder=finder, keeping=keeping
    )


async def read_score(request: router_pb2.ScoreRequest, limits: Limits, texts: Texts) -> Accepted:
    """Raises RequestError, or NotServedError where the tokens exceed the context."""
    tokens, _ = await _prompt(request, limits, texts)
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


def _checked_rewind(rewind: int, tokens: int) -> int:
    if rewind > tokens:
        raise RequestError(f"rewind = {rewind}: at most {tokens}, the tokens of the prompt", field="rewind", tokens=tokens)
    return rewind


def _keeping(tokens: npt.NDArray[np.uint32], kept: Blocks | None, caller: bytes, rewind: int) -> Keeping:
    """A long prompt's digests take milliseconds."""
    if kept is None:
        return Keeping()
    return Keeping(Blocks.seeded(kept.seed, caller).over(tokens, len(tokens) - 1), rewind)


async def _prompt(request: Request, limits: Limits, texts: Texts) -> tuple[npt.NDArray[np.uint32], int]:
    """The tokens, and how many of them come before the newest message (0: unknown)."""
    if len(request.request_id) > MAX_REQUEST_ID:
        raise RequestError(f"request_id has {len(request.request_id)} characters: at most {MAX_REQUEST_ID}", field="request_id")
    ids, rewind = await _ids(request, texts)
    if not ids:
        raise RequestError("the prompt is empty: send text or token_ids with at least one token", field="prompt")
    tokens = await texts.work(lambda: np.array(ids, dtype=np.uint32))
    vocab = limits.geometry.vocab
    _refuse(tokens >= vocab, tokens, request, f"ids of this model are 0 to {vocab - 1}")
    return tokens, rewind


async def _ids(request: Request, texts: Texts) -> tuple[Sequence[int], int]:
    if isinstance(request, router_pb2.GenerateRequest) and request.HasField("chat"):
        return await texts.encode_chat(request.chat)
    return await texts.encode(request.text) if request.HasField("text") else request.token_ids.ids, 0


def _refuse_images(tokens: npt.NDArray[np.uint32], request: Request, geometry: Geometry) -> None:
    images = np.isin(tokens, np.array(geometry.image_ids, dtype=np.uint32))
    _refuse(images, tokens, request, "an image or video token, and this build serves text only")


def _refuse(wrong: npt.NDArray[np.bool_], tokens: npt.NDArray[np.uint32], request: Request, why: str) -> None:
    if wrong.any():
        kind = request.WhichOneof("prompt")
        where, field = ("token_ids", "token_ids.ids") if kind == "token_ids" else (f"the {kind}'s token", str(kind))
        index = int(wrong.argmax())
        raise RequestError(f"{where}[{index}] = {tokens[index]}: {why}", field=field, index=index, token=int(tokens[index]))
