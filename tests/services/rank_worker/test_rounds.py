"""The round executor: what it refuses, and how its digests tell ranks apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Ranks, oracle

from latentpool.errors import EpochError
from services.rank_worker import frames

MODEL, EXPECTED = oracle("tiny")
PROMPT = EXPECTED["input_ids"].tolist()


@pytest.fixture
def ranks() -> Any:
    group = Ranks(MODEL)
    group.begin(0, range(4))
    yield group
    group.close()


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (frames.Bind(0, 1, 0.0, 0, 0), "lane 0 is taken"),
        (frames.Bind(9, 1, 0.0, 0, 0), "lane 9: the plan has 2"),
        (frames.Table(0, 99, [1]), "outside the tables"),
        (frames.Table(0, 0, [24]), "outside the pool of 24"),
        (frames.Prompt(1, 0, [1], True), "lane 1 runs nothing"),
        (frames.Prompt(0, 64, [1], True), "start 64: the lane is at 0"),
        (frames.Prompt(0, 0, [1, 2], False), "2 tokens: 1 to 2048, a multiple of 64"),
        (frames.Prompt(0, 0, [], True), "0 tokens"),
        (frames.Prompt(0, 0, [256], True), "outside 0..255"),
        (frames.Prompt(0, 0, [1] * 320, True), "row 256 has no page"),
        (frames.Decode([0, 0], 1, []), "each once"),
        (frames.Decode([], 1, []), "at least one"),
        (frames.Decode([0], 5, [1] * 5), "5 rows: 1 to 4"),
        (frames.Decode([0], 2, [1]), "1 tokens for 1 lanes of 2 rows"),
        (frames.Decode([0], 1, []), "outside 0..255"),
        (frames.Free(1), "lane 1 runs nothing"),
    ],
)
def test_an_operation_that_does_not_fit_the_lanes_is_refused(ranks: Ranks, operation: Any, message: str) -> None:
    with pytest.raises(EpochError, match=r"round 2, operation 1 \(") as caught:
        ranks.run(frames.Ping(), operation)
    assert message in str(caught.value)


class _FlipsABit:
    """A fault between computing a row and writing it: the lowest bit of one value of one row."""

    def __init__(self, kernels: Any, operation: int) -> None:
        self._kernels = kernels
        self._left = operation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def write_rows(self, rows: Any, *place: Any) -> None:
        if self._left == 0:
            rows = rows.copy()
            rows.view(np.uint32)[-1, -1] ^= 1
        self._left -= 1
        self._kernels.write_rows(rows, *place)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("write", [0, 1])
def test_one_flipped_bit_shows_in_that_ranks_digest(world: int, write: int) -> None:
    """write 0: a latent row; write 1: a pooled key. 48 rows fill whole blocks and pools, so the last row is a real one
    only for pools; the latent fault sits on a padding row unless the prompt fills its block."""
    prompt = (PROMPT * 2)[:64]
    ranks = Ranks(MODEL, world, kernels_of=lambda rank, k: _FlipsABit(k, write) if rank == world - 1 else k)
    ranks.begin(0, range(4))
    results = ranks.run(frames.Ping(), frames.Prompt(0, 0, prompt, True))
    digests = [[operation.digest for operation in result.results] for result in results]
    assert all(d == digests[0] for d in digests[:-1])
    assert digests[-1][0] == digests[0][0]
    assert digests[-1][1] != digests[0][1]
    ranks.close()


def test_digests_tell_operations_tokens_and_rows_apart() -> None:
    """Equal work gives equal digests; another token, another page or another seed gives another digest."""

    def digests(pages: list[int], prompt: list[int], seed: int) -> list[int]:
        ranks = Ranks(MODEL)
        results = ranks.agree(frames.Bind(0, 1, 1.0, 0, seed), frames.Table(0, 0, pages), frames.Prompt(0, 0, prompt, True))
        ranks.close()
        return [operation.digest for operation in results[0].results]

    base = digests([0, 1, 2, 3], PROMPT, 1)
    assert digests([0, 1, 2, 3], PROMPT, 1) == base
    assert [a == b for a, b in zip(base, digests([0, 1, 3, 2], PROMPT, 1), strict=True)] == [True, False, True]
    assert [a == b for a, b in zip(base, digests([0, 1, 2, 3], [*PROMPT[:-1], 9], 1), strict=True)] == [True, True, False]
    assert digests([0, 1, 2, 3], PROMPT, 2)[0] != base[0]
