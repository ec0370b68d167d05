"""Gumbel-max sampling keyed by (seed, position, token id), in steps whose bits are the same everywhere (design 3.7).

Only 64-bit integer arithmetic and fp64 + - * / are used, each rounded once, so any backend can repeat them exactly:

    h = mix(seed + g); h = mix((h ^ position) + g); h = mix((h ^ id) + g)      g = 0x9E3779B97F4A7C15, modulo 2^64
    u = (2 (h >> 12) + 1) 2^-53                                                in (0, 1), 52 random bits, exact
    gumbel = -ln(-ln(u))                                                       with `ln` below

`mix` is the finaliser of splitmix64.
"""

from __future__ import annotations

import numpy as np

from kernels.rows import Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)
_ROOT_HALF = 0.70710678118654752440
_LN2_HIGH = 0.693147180369123816490  # 33 significant bits: its product with any exponent is exact
_LN2_LOW = 1.90821492927058770002e-10
_TERMS = 11


def mix(z: Array) -> Array:
    """A bijection of uint64 whose outputs look independent for neighbouring inputs."""
    for shift, factor in _MIX:
        z = (z ^ (z >> shift)) * factor
    return z ^ (z >> _LAST_SHIFT)


def ln(x: Array) -> Array:
    """Natural logarithm of positive normal fp64 numbers, relative error below 1e-15.

    x = m 2^e with m in [sqrt(1/2), sqrt(2)); s = (m - 1) / (m + 1); ln m = 2 s (1 + s²/3 + ... + s^20/21); the first term
    left out is below 1e-18 of the sum. ln x = e ln2_high + (e ln2_low + ln m).
    """
    m, e = np.frexp(x)
    low = m < _ROOT_HALF
    m = np.where(low, m * 2.0, m)
    exponent = (e - low).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = np.full_like(s, 1.0 / (2 * _TERMS - 1))
    for n in range(_TERMS - 2, 0, -1):
        series *= square
        series += 1.0 / (2 * n + 1)
    tail = series * square
    ln_m = 2.0 * s + 2.0 * s * tail
    result: Array = exponent * _LN2_HIGH + (exponent * _LN2_LOW + ln_m)
    return result


def gumbel(seed: int, position: int, ids: Array) -> Array:
    """Standard Gumbel numbers, fp64, one a token id (uint64 array)."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64
        h = mix(np.array([seed], np.uint64) + _GOLDEN)
        h = mix((h ^ np.uint64(position)) + _GOLDEN)
        h = mix((h ^ ids) + _GOLDEN)
    u = ((h >> np.uint64(12)) * np.uint64(2) + np.uint64(1)).astype(np.float64) * 2.0**-53
    return -ln(-ln(u))


def candidates(
    logits: Array, first_id: int, temperature: Array, top_k: Array, seed: Array, position: Array, scores: Array, ids: Array
) -> None:
    scores[...] = -np.inf
    ids[...] = -1
    width = logits.shape[1]
    names = np.arange(first_id, first_id + width, dtype=np.uint64)
    for t in range(logits.shape[0]):
        row = logits[t].astype(np.float64)
        k = int(top_k[t])
        if temperature[t] > 0 and k > 0:
            kept = np.argsort(-row, kind="stable")[:k]
            scores[t, : len(kept)] = row[kept]
            ids[t, : len(kept)] = first_id + kept
            continue
        if temperature[t] > 0:
            row = row / float(temperature[t]) + gumbel(int(seed[t]), int(position[t]), names)
        winner = int(np.argmax(row))
        scores[t, 0] = row[winner]
        ids[t, 0] = first_id + winner


def draw(scores: Array, ids: Array, temperature: Array, top_k: Array, seed: Array, position: Array, out: Array) -> None:
    for t in range(out.shape[0]):
        real = ids[:, t] >= 0
        score, name = scores[:, t][real], ids[:, t][real]
        order = np.lexsort((name, -score))
        k = int(top_k[t])
        if temperature[t] > 0 and k > 0:
            score, name = score[order[:k]], name[order[:k]]
            score = score / float(temperature[t]) + gumbel(int(seed[t]), int(position[t]), name.astype(np.uint64))
            order = np.lexsort((name, -score))
        out[t] = name[order[0]]


def score_rows(logits: Array, first_id: int, following: Array, max_: Array, sum_: Array, best: Array, next_: Array) -> None:
    width = logits.shape[1]
    for t in range(logits.shape[0]):
        row = logits[t]
        winner = int(np.argmax(row))
        max_[t] = row[winner]
        best[t] = first_id + winner
        shifted = row.astype(np.float64)
        shifted -= np.float64(row[winner])
        sum_[t] = np.add.reduce(np.exp(shifted))
        local = int(following[t]) - first_id
        next_[t] = row[local] if following[t] >= 0 and 0 <= local < width else np.nan
