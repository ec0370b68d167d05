"""Sampling parameters and their limits (design section 3.7)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from latentpool.errors import RequestError
from latentpool.v1 import router_pb2

MAX_TEMPERATURE = 100.0
MAX_TOP_K = 1024
MAX_SEED = 2**64 - 1


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

    def check(self, vocab: int) -> None:
        """Raises RequestError naming the first field whose value is not allowed for a vocabulary of `vocab` ids."""
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE):
            raise _refusal("temperature", f"{self.temperature}: a finite number from 0 (greedy) to {MAX_TEMPERATURE:g}")
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise _refusal("top_k", f"{self.top_k}: 0 (all) to {MAX_TOP_K}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise _refusal("seed", f"{self.seed}: 0 to {MAX_SEED}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _refusal("max_tokens", f"{self.max_tokens}: at least 1; leave it out for as many as fit")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab:
                raise _refusal("stop_token_ids", f"{token}: ids of this model are 0 to {vocab - 1}")

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
        )


def _refusal(field: str, rest: str) -> RequestError:
    return RequestError(f"{field} = {rest}", field=f"sampling.{field}")
