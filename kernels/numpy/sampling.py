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
_LN2 = 0.693147180559945309417
_EXP_TERMS = 13
_EXP_LEAST = -708.0
_ONE = 2.0**44
"""A probability ratio of 1 in fixed point."""


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


def exp(x: Array) -> Array:
    """Exponential of fp64 numbers <= 0, relative error below 1e-14; 0 below -708.

    x = n ln2 + r with |r| <= ln2 / 2; e^r by its Taylor series to the 13th power, whose rest is below 1e-17.
    """
    tiny, x = x < _EXP_LEAST, np.maximum(x, _EXP_LEAST)
    n = np.rint(x * (1.0 / _LN2))
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    series = np.full_like(r, 1.0)
    for k in range(_EXP_TERMS, 0, -1):
        series *= r
        series /= float(k)
        series += 1.0
    return np.where(tiny, 0.0, np.ldexp(series, n.astype(np.int32)))


def _fixed(logits: Array, top: float, temperature: float) -> Array:
    """floor(exp((logit - top) / temperature) * 2**44) as uint64; logits fp64, none above top."""
    return np.floor(exp((logits - top) / temperature) * _ONE).astype(np.uint64)


def candidates(
    logits: Array, first_id: int, temperature: Array, kept: Array, seed: Array, position: Array, scores: Array, ids: Array
) -> None:
    scores[...] = -np.inf
    ids[...] = -1
    width = logits.shape[1]
    names = np.arange(first_id, first_id + width, dtype=np.uint64)
    for t in range(logits.shape[0]):
        row = logits[t].astype(np.float64)
        n = int(kept[t])
        if n > 0:
            best = _best(row, n)
            scores[t, : len(best)] = row[best]
            ids[t, : len(best)] = first_id + best
            continue
        if temperature[t] > 0:
            row = row / float(temperature[t]) + gumbel(int(seed[t]), int(position[t]), names)
        winner = int(np.argmax(row))
        scores[t, 0] = row[winner]
        ids[t, 0] = first_id + winner


def _best(row: Array, n: int) -> Array:
    """Indices of the n largest, descending, ties to the lower index."""
    if n >= len(row):
        return np.argsort(-row, kind="stable")
    least = np.partition(row, len(row) - n)[len(row) - n]
    above = np.flatnonzero(row > least)
    here = np.concatenate([above, np.flatnonzero(row == least)[: n - len(above)]])
    return here[np.lexsort((here, -row[here]))]


def mass(logits: Array, top: Array, temperature: Array, out: Array) -> None:
    for t in range(logits.shape[0]):
        if temperature[t] > 0:
            out[t] = _fixed(logits[t].astype(np.float64), float(top[t]), float(temperature[t])).sum()
        else:
            out[t] = 0


def draw(
    scores: Array, ids: Array, columns: Array, masses: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array,
    seed: Array, position: Array, out: Array,
) -> None:  # fmt: skip
    for t in range(out.shape[0]):
        real = ids[:, t] >= 0
        score, name = scores[:, t][real], ids[:, t][real]
        order = np.lexsort((name, -score))
        cuts = top_k[t] > 0 or top_p[t] < 1 or min_p[t] > 0
        if temperature[t] > 0 and cuts:
            told = _told(scores[:, t], ids[:, t], columns)
            count = _cut(
                score[order[:told]], told == len(order) == columns.sum(), masses[:, t], float(temperature[t]),
                int(top_k[t]), float(top_p[t]), float(min_p[t]),
            )  # fmt: skip
            if count < 0:
                out[t] = -1
                continue
            score, name = score[order[:count]], name[order[:count]]
            score = score / float(temperature[t]) + gumbel(int(seed[t]), int(position[t]), name.astype(np.uint64))
            order = np.lexsort((name, -score))
        out[t] = name[order[0]]


def _told(scores: Array, ids: Array, columns: Array) -> int:
    """How many of the merged candidates of one row surely are the best ones: those not behind the last candidate of a rank
    that has more columns than candidates. scores, ids [W, C]."""
    real = ids >= 0
    told = int(real.sum())
    for rank in np.flatnonzero(columns > ids.shape[1]):
        last, name = scores[rank, -1], ids[rank, -1]
        before = (scores > last) | ((scores == last) & (ids <= name))
        told = min(told, int((before & real).sum()))
    return told


def _cut(
    logits: Array, whole: bool, masses: Array, temperature: float, top_k: int, top_p: float, min_p: float
) -> int:  # fmt: skip
    """How many of the best candidates stay, at least one; -1 if that cannot be told. logits fp64, descending; whole: they
    are the whole vocabulary."""
    whole = whole or top_k > 0
    logits = logits[:top_k] if top_k > 0 else logits
    parts = _fixed(logits, float(logits[0]), temperature)
    stay = len(parts)
    if top_p < 1:
        total = float(parts.sum() if top_k > 0 else masses.sum())
        reached = np.flatnonzero(np.cumsum(parts).astype(np.float64) >= top_p * total)
        if len(reached):
            stay = int(reached[0]) + 1
        elif not whole:
            return -1
    if min_p > 0:
        likely = int((parts >= np.uint64(min_p * _ONE)).sum())
        if likely == len(parts) and stay == len(parts) and not whole:
            return -1
        stay = min(stay, likely)
    return max(stay, 1)


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
