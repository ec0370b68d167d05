"""Sampling parameters and their limits (design section 3.7)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from latentpool.errors import RequestError
from latentpool.v1 import router_pb2

MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-300  # logits divided by less overflow, and what is drawn would mean nothing
MAX_TOP_K = 1024
MAX_SEED = 2**64 - 1
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_LOG_PROBS = 20

_HOLE = "\ufffd"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen and when a reply ends. The defaults are greedy, until the end of the context."""

    temperature: float = 0.0
    """0 is greedy: the largest logit, the lowest id on ties."""
    top_k: int = 0
    """Keep only the k largest logits; 0 keeps all."""
    seed: int | None = None
    """Keys the draws; None: the router draws one and reports it."""
    max_tokens: int | None = None
    """None: until the limit of the context."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens that holds this share of the probability; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the likeliest; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """The reply ends where one of these appears in its text; neither it nor what follows is delivered."""
    log_probs: int | None = None
    """Return each reply token's log-probability by the raw logits, and of this many likeliest beside it; None: no."""

    def check(self, vocab: int) -> None:
        """Raises RequestError naming the first field whose value is not allowed for a vocabulary of `vocab` ids."""
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE):
            raise _refusal("temperature", f"{self.temperature}: a finite number from 0 (greedy) to {MAX_TEMPERATURE:g}")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise _refusal("temperature", f"{self.temperature}: at least {MIN_TEMPERATURE:g} where it is not 0 (greedy)")
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise _refusal("top_k", f"{self.top_k}: 0 (all) to {MAX_TOP_K}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise _refusal("seed", f"{self.seed}: 0 to {MAX_SEED}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _refusal("max_tokens", f"{self.max_tokens}: at least 1; leave it out for as many as fit")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab:
                raise _refusal("stop_token_ids", f"{token}: ids of this model are 0 to {vocab - 1}")
        if not 0 < self.top_p <= 1:
            raise _refusal("top_p", f"{self.top_p}: above 0 and at most 1 (all)")
        if not 0 <= self.min_p <= 1:
            raise _refusal("min_p", f"{self.min_p}: 0 (all) to 1")
        self._check_stops()
        if self.log_probs is not None and not 0 <= self.log_probs <= MAX_LOG_PROBS:
            raise _refusal("log_probs", f"{self.log_probs}: 0 to {MAX_LOG_PROBS} likeliest tokens; leave it out for none")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise _refusal("stop", f"{len(self.stop)} strings: at most {MAX_STOPS}")
        for index, stop in enumerate(self.stop):
            size = len(stop.encode("utf-8", "surrogatepass"))
            if not 1 <= size <= MAX_STOP_BYTES:
                raise _refusal(f"stop[{index}]", f"{size} bytes of UTF-8: 1 to {MAX_STOP_BYTES}")
            if _HOLE in stop:
                raise _refusal(f"stop[{index}]", "a string with U+FFFD, which stands for bytes that are not text: leave it out")

    def to_proto(self) -> router_pb2.Sampling:
        """As a message. Raises RequestError for a value that its field cannot hold at all (seed = -1)."""
        try:
            return router_pb2.Sampling(
                temperature=self.temperature,
                top_k=self.top_k,
                seed=self.seed,
                max_tokens=self.max_tokens,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=self.ignore_eos,
                top_p=self.top_p,
                min_p=self.min_p,
                stop=self.stop,
                log_probs=self.log_probs,
            )
        except (ValueError, TypeError) as error:
            raise RequestError(f"sampling parameters: {error}", field="sampling") from None

    @classmethod
    def from_proto(cls, message: router_pb2.Sampling) -> Sampling:
        """The parameters of a request, unchecked."""
        return cls(
            temperature=message.temperature,
            top_k=message.top_k,
            seed=message.seed if message.HasField("seed") else None,
            max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            min_p=message.min_p,
            stop=tuple(message.stop),
            log_probs=message.log_probs if message.HasField("log_probs") else None,
        )


def _refusal(field: str, rest: str) -> RequestError:
    return RequestError(f"{field} = {rest}", field=f"sampling.{field}")
