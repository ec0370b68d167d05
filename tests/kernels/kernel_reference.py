"""The operations written straight from the model specification: float64, loops, one row and one head at a time.

`r` rounds to the compute dtype where the specification does; it is the identity in a float32 run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

Array = np.ndarray
Round = Callable[[Array], Array]


def rounder(dtype: str) -> Round:
    if dtype == "f32":
        return lambda x: np.asarray(x, np.float64)
    return lambda x: np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -np.asarray(x, np.float64)))


def rms_norm(x: Array, w: Array, eps: float, r: Round) -> Array:
    return r(r(x / math.sqrt(np.mean(x * x) + eps)) * w)


def layer_norm(x: Array, w: Array, b: Array, eps: float, r: Round) -> Array:
    centred = x - np.mean(x)
    return r(centred / math.sqrt(np.mean(centred**2) + eps) * w + b)


def swiglu(gate_up: Array, limit: float, r: Round) -> Array:
    f = len(gate_up) // 2
    g = np.minimum(gate_up[:f], limit)
    u = np.clip(gate_up[f:], -limit, limit)
    return r(r(g * sigmoid(g)) * u)


def hyper_pre(
    X: Array, fn: Array, base: Array, scale: Array, rms_eps: float, hyper_eps: float, iters: int, r: Round
) -> tuple[Array, Array, Array]:
    N = X.shape[0]
    v = X.reshape(-1)
    z = fn @ (v / math.sqrt(np.mean(v * v) + rms_eps))
    pre = sigmoid(scale[0] * z[:N] + base[:N]) + hyper_eps
    post = 2 * sigmoid(scale[1] * z[N : 2 * N] + base[N : 2 * N])
    logits = (scale[2] * z[2 * N :] + base[2 * N :]).reshape(N, N)
    C = np.exp(logits - logits.max(1, keepdims=True))
    C = C / C.sum(1, keepdims=True) + hyper_eps
    C = C / (C.sum(0, keepdims=True) + hyper_eps)
    for _ in range(iters - 1):
        C = C / (C.sum(1, keepdims=True) + hyper_eps)
        C = C / (C.sum(0, keepdims=True) + hyper_eps)
    return r(pre @ X), r(post), r(C)


def hyper_post(X: Array, y: Array, post: Array, comb: Array, r: Round) -> Array:
    N = X.shape[0]
    return np.stack([r(r(post[n] * y) + r(sum(comb[j, n] * X[j] for j in range(N)))) for n in range(N)])


def conv(u: Array, w: Array, r: Round) -> Array:
    """u [c-1+T, C], w [c, C]."""
    taps = len(w)
    a = np.stack([sum(w[j] * u[t + j] for j in range(taps)) for t in range(len(u) - taps + 1)])
    return r(a * sigmoid(a))


def kda(q: Array, k: Array, v: Array, G: Array, beta: Array, S: Array) -> tuple[Array, Array]:
    """The recurrence over rows [T, H, D] from state S [H, D, D]: outputs before rounding, and the state after."""
    T, H, D = q.shape
    S = S.astype(np.float64).copy()
    out = np.zeros((T, H, D))
    for t in range(T):
        for a in range(H):
            qn = q[t, a] / math.sqrt(q[t, a] @ q[t, a] + 1e-6) / math.sqrt(D)
            kn = k[t, a] / math.sqrt(k[t, a] @ k[t, a] + 1e-6)
            S[a] = np.exp(G[t, a])[:, None] * S[a]
            S[a] += np.outer(kn, beta[t, a] * (v[t, a] - S[a].T @ kn))
            out[t, a] = S[a].T @ qn
    return out, S


def kda_output(o: Array, gate: Array, w: Array, eps: float, r: Round) -> Array:
    """o, gate [H, D]."""
    normed = o / np.sqrt(np.mean(o * o, -1, keepdims=True) + eps)
    return r(w * normed * sigmoid(gate)).reshape(-1)


def attend(q: Array, rows: Array, scale: float) -> Array:
    """q [h, r] over rows [n, r]."""
    out = np.zeros_like(q)
    for a in range(len(q)):
        z = rows @ q[a] * scale
        p = np.exp(z - z.max())
        out[a] = (p / p.sum()) @ rows
    return out


def pool_key(keys: Array, gates: Array, ape: Array, r: Round) -> Array:
    """keys, gates, ape [P, d_I]."""
    a = gates + ape
    alpha = np.exp(a - a.max(0))
    alpha = r(alpha / alpha.sum(0))
    return r(r(alpha * keys).sum(0))


def select(q: Array, weights: Array, keys: Array, position: int, pool: int, kept: int) -> tuple[list[int], Array]:
    """The set T_t ascending, and the scores of the complete pools; q [n_I, d_I], keys [pools, d_I]."""
    complete = (position + 1) // pool
    scores = np.array(
        [
            sum(w * max(0.0, float(qi @ keys[p]) / math.sqrt(q.shape[1])) for w, qi in zip(weights, q, strict=True))
            for p in range(complete)
        ]
    )
    chosen = sorted(sorted(range(complete), key=lambda p: (-scores[p], p))[:kept])
    return [p * pool + j for p in chosen for j in range(pool)] + list(range(complete * pool, position + 1)), scores


def route(
    x: Array, w: Array, bias: Array, k: int, groups: int, groups_kept: int, normalise: bool, scale: float
) -> tuple[list[int], Array]:
    p = sigmoid(w @ x)
    b = p + bias
    size = len(b) // groups
    strength = [sum(sorted(b[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: (-strength[g], g))[:groups_kept]
    allowed = [e for g in kept for e in range(g * size, (g + 1) * size)]
    chosen = sorted(sorted(allowed, key=lambda e: (-b[e], e))[:k])
    weights = p[chosen]
    if normalise:
        weights = weights / (weights.sum() + 1e-20)
    return chosen, weights * scale


def experts(x: Array, chosen: Array, weights: Array, gate_up: Array, down: Array, limit: float, r: Round) -> Array:
    out = np.zeros(down.shape[1])
    for e, weight in zip(chosen, weights, strict=True):
        out += weight * (down[e] @ swiglu(r(gate_up[e] @ x), limit, r))
    return out
