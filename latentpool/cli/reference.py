"""Compares what a group computes with reference data: what `latentpool verify` measures, whatever group it asks.

An expected file holds one or more prompts: the keys below, alone or behind a prefix lenN. (S tokens, V vocabulary):
input_ids [S]; logits [S, V]; decode.split [1] = p and decode.logits [S-p+1, V], row j being the output after token p-1+j;
greedy.ids [n]; greedy.logits [n, V]; f64.logits [S, V], the best estimate of the exact answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentpool.errors import ConfigError

Floats = NDArray[np.float32]
Expected = Mapping[str, NDArray[Any]]

_PREFIX = re.compile(r"(len\d+\.)?input_ids")
_BF16_MEDIAN, _BF16_ROW, _BF16_ROWS, _BF16_TOP1 = 0.006, 0.012, 0.90, 0.95
"""What a bf16 run must reach: median row error; error of a row, and the part of rows under it; top-1 agreement."""
_ALIEN = 0.05
"""Median row error that no dtype and no fault in a few rows brings about."""
ANOTHER = "most rows differ altogether: was it made by another checkpoint?"
_LOGITS = ("logits", "decode.logits", "greedy.logits", "f64.logits")


class Runner(Protocol):
    """The group under test."""

    async def score(self, ids: Sequence[int], decode_from: int | None) -> Floats:
        """Logits [len(ids), V] after each token; tokens from `decode_from` on run on the decode path."""

    async def generate(self, ids: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens after `ids`, end tokens ignored."""


@dataclass(frozen=True)
class Check:
    """One row of the report. `error` None: nothing to measure (ids, which are equal or not). `passed` None: the key is
    absent from the file, so nothing was checked."""

    key: str
    rows: int
    error: float | None
    limit: float | None
    passed: bool | None
    note: str = ""


def read_expected(path: Path) -> dict[str, NDArray[Any]]:
    """All tensors of a .safetensors file. Raises ConfigError if it is not one, or has no prompt."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        expected = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--expected {path}: {error}") from None
    if not prefixes(expected):
        raise ConfigError(f"--expected {path}: has no input_ids, alone or behind lenN., so there is nothing to run")
    return dict(expected)


def check_vocabulary(expected: Expected, vocab: int) -> None:
    """Raises ConfigError for data of a model with another vocabulary than of `vocab` tokens."""
    for prefix in prefixes(expected):
        for key in (prefix + name for name in _LOGITS):
            if key in expected and (width := expected[key].shape[-1]) != vocab:
                raise ConfigError(
                    f"--expected was made by another checkpoint: its {key} are of {width} tokens, and this model has {vocab}"
                )
        largest = int(expected[prefix + "input_ids"].max())
        if largest >= vocab:
            raise ConfigError(
                f"--expected was made by another checkpoint: its {prefix}input_ids have token {largest}, and this model has "
                f"{vocab} tokens"
            )


def prefixes(expected: Expected) -> list[str]:
    """Prefixes of the prompts found: "" first, then lenN. by N."""
    found = [match[1] or "" for key in expected if (match := _PREFIX.fullmatch(key))]
    return sorted(found, key=lambda prefix: int(prefix[3:-1]) if prefix else 0)


def longest(expected: Expected) -> int:
    """Tokens of the longest conversation that `compare` runs."""
    return max(len(expected[p + "input_ids"]) + len(expected.get(p + "greedy.ids", ())) for p in prefixes(expected))


async def compare(expected: Expected, runner: Runner, tolerance: float, bf16: bool = False) -> list[Check]:
    """Runs every prompt through `runner` and checks every known key. bf16: by row statistics against float64, since its
    rounding can move a selection, and without greedy replies, which a single moved token changes from there on."""
    checks = []
    for prefix in prefixes(expected):
        case = _Case(expected, prefix, runner, tolerance)
        checks += await (case.in_bf16() if bf16 else case.in_f32())
    return checks


class _Case:
    def __init__(self, expected: Expected, prefix: str, runner: Runner, tolerance: float) -> None:
        self._expected = expected
        self._prefix = prefix
        self._runner = runner
        self._tolerance = tolerance
        self._ids: list[int] = expected[prefix + "input_ids"].tolist()

    def _get(self, key: str) -> NDArray[Any] | None:
        return self._expected.get(self._prefix + key)

    def _absent(self, key: str) -> Check:
        return Check(self._prefix + key, 0, None, None, None, "absent")

    # ---- f32 -------------------------------------------------------------------------------------------------------

    async def in_f32(self) -> list[Check]:
        return [await self._prefill(), await self._decode(), *await self._greedy()]

    async def _prefill(self) -> Check:
        wanted = self._get("logits")
        if wanted is None:
            return self._absent("logits")
        return self._close("logits", await self._runner.score(self._ids, None), wanted)

    async def _decode(self) -> Check:
        wanted, split = self._get("decode.logits"), self._get("decode.split")
        if wanted is None or split is None:
            return self._absent("decode.logits" if wanted is None else "decode.split")
        start = int(split[0])
        return self._close("decode.logits", (await self._runner.score(self._ids, start))[start - 1 :], wanted)

    async def _greedy(self) -> list[Check]:
        ids, wanted = self._get("greedy.ids"), self._get("greedy.logits")
        if ids is None:
            return [self._absent("greedy.ids")] + ([self._absent("greedy.logits")] if wanted is None else [])
        reply = await self._runner.generate(self._ids, len(ids))
        checks = [_equal(self._prefix + "greedy.ids", reply, ids.tolist())]
        if wanted is None:
            return [*checks, self._absent("greedy.logits")]
        start = len(self._ids)
        rows = await self._runner.score(self._ids + ids.tolist(), start)
        return [*checks, self._close("greedy.logits", rows[start - 1 : start - 1 + len(ids)], wanted)]

    def _close(self, key: str, got: Floats, wanted: NDArray[Any]) -> Check:
        exact = self._get("f64.logits")
        scale = self._get("logits") if exact is None else exact
        return _within(self._prefix + key, got, wanted, wanted if scale is None else scale, self._tolerance)

    # ---- bf16 ------------------------------------------------------------------------------------------------------

    async def in_bf16(self) -> list[Check]:
        exact = self._get("f64.logits")
        if exact is None:
            return [self._absent("f64.logits")]
        checks = _by_rows(self._prefix + "f64.logits", await self._runner.score(self._ids, None), exact)
        split = self._get("decode.split")
        if split is None:
            return [*checks, self._absent("decode.split")]
        # The statistics are stated for a whole prompt, so the rows before the split count here too.
        return checks + _by_rows(
            self._prefix + "f64.logits, decoded", await self._runner.score(self._ids, int(split[0])), exact
        )


def _within(key: str, got: Floats, wanted: NDArray[Any], scale: NDArray[Any], tolerance: float) -> Check:
    if got.shape != wanted.shape:
        return Check(key, len(wanted), None, tolerance, False, f"shape {list(got.shape)}, not {list(wanted.shape)}")
    differences = np.abs(got.astype(np.float64) - wanted).max(axis=-1)
    error = float(differences.max() / np.abs(scale).max())
    # A NaN must fail, so the comparison is not turned round.
    passed = error <= tolerance
    alien = np.median(differences) > _ALIEN * np.abs(scale).max()
    note = "" if passed else ANOTHER if alien else f"worst row {int(differences.argmax())}"
    return Check(key, len(wanted), error, tolerance, passed, note)


def _equal(key: str, got: list[int], wanted: list[int]) -> Check:
    if got == wanted:
        return Check(key, len(wanted), None, None, True, "equal")
    first = next((i for i, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), min(len(got), len(wanted)))
    ours = got[first] if first < len(got) else "nothing"
    theirs = wanted[first] if first < len(wanted) else "nothing"
    return Check(key, len(wanted), None, None, False, f"id {first} is {ours}, not {theirs}")


def _by_rows(key: str, got: Floats, exact: NDArray[Any]) -> list[Check]:
    if got.shape != exact.shape:
        return [Check(key, len(exact), None, None, False, f"shape {list(got.shape)}, not {list(exact.shape)}")]
    errors = np.sqrt(np.mean((got.astype(np.float64) - exact) ** 2, axis=-1)) / np.abs(exact).max()
    median, near = float(np.median(errors)), float(np.mean(errors <= _BF16_ROW))
    top1 = float(np.mean(got.argmax(axis=-1) == exact.argmax(axis=-1)))
    rows = len(exact)
    return [
        Check(key, rows, median, _BF16_MEDIAN, median <= _BF16_MEDIAN, ANOTHER if median > _ALIEN else "median row"),
        Check(key, rows, 1 - near, 1 - _BF16_ROWS, near >= _BF16_ROWS, f"part of rows above {_BF16_ROW}"),
        Check(key, rows, 1 - top1, 1 - _BF16_TOP1, top1 >= _BF16_TOP1, "part of rows with another top token"),
    ]
