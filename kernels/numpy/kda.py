"""KDA, the gated delta rule with a decay per key channel (specification 3.4)."""

from __future__ import annotations

import functools

import numpy as np

from kernels.numpy.elementwise import ONE, mean_square, sigmoid, silu, slabs
from kernels.numpy.products import BLOCK
from kernels.numpy.rounding import Round
from kernels.rows import Array

SUB = 16
"""Rows of a sub-chunk. A decay from row j to row i of it is a product of two factors around its middle row, each between
exp(-8 |G|) and exp(8 |G|): finite for G >= -10. Entries above the diagonal may overflow and are replaced, not multiplied."""


def conv(u: Array, w: Array, out: Array, rounded: Round) -> None:
    taps, T = w.shape[0], out.shape[1]
    for rows in slabs(T):
        here = out[:, rows]
        total = u[:, rows] * w[0]
        part = np.empty_like(total)
        for tap in range(1, taps):
            np.multiply(u[:, rows.start + tap : rows.stop + tap], w[tap], out=part)
            total += part
        silu(total, here)
    rounded(out)


def gate(f: Array, dt_bias: Array, a_log: Array, bound: float, out: Array) -> None:
    heads = a_log.shape[0]
    np.add(f, dt_bias, out=out)
    by_head = out.reshape(out.shape[0], heads, -1)
    by_head *= np.exp(a_log)[:, None]
    sigmoid(out, out)
    out *= np.float32(bound)


def output(o: Array, gate: Array, w: Array, eps: float, out: Array, rounded: Round) -> None:
    root = mean_square(o)
    root += np.float32(eps)
    np.sqrt(root, out=root)
    by_head = out.reshape(o.shape)
    np.divide(o, root[..., None], out=by_head)
    by_head *= w
    opened = np.empty_like(gate)
    sigmoid(gate, opened)
    out *= opened
    rounded(out)


def unit(x: Array) -> Array:
    """x / sqrt(sum x² + 1e-6) over the last axis."""
    total = np.vecdot(x, x)
    total += np.float32(1e-6)
    np.sqrt(total, out=total)
    return x / total[..., None]


def decode(
    q: Array, k: Array, v: Array, G: Array, beta: Array, states: Array, source: Array, target: Array, out: Array, rounded: Round
) -> None:
    """The recurrence, token by token: q, k, v, G [B, R, H, D], beta [B, R, H]."""
    q = unit(q)
    q /= np.sqrt(np.float32(q.shape[-1]))
    k = unit(k)
    decay = np.exp(G)
    S = states[source]
    for row in range(q.shape[1]):
        S *= decay[:, row, :, :, None]
        key = k[:, row]
        delta = v[:, row] - np.matmul(key[..., None, :], S)[..., 0, :]
        delta *= beta[:, row, :, None]
        S += key[..., :, None] * delta[..., None, :]
        out[:, row] = np.matmul(q[:, row, :, None, :], S)[..., 0, :]
    states[target] = S
    rounded(out)


def prompt(
    q: Array,
    k: Array,
    v: Array,
    G: Array,
    beta: Array,
    rows: int,
    state_in: Array,
    state_out: Array,
    out: Array,
    rounded: Round,
) -> None:
    """The chunked form, block after block: q, k, v, G [T, H, D], beta [T, H]."""
    S = state_in.copy()
    for start in range(0, q.shape[0], BLOCK):
        here = slice(start, start + BLOCK)
        real = min(BLOCK, rows - start)
        if real <= 0:
            out[here] = 0
            continue
        weights = _by_head(beta[here, :, None], real)
        q_, k_, v_, G_ = (_by_head(x[here], real) for x in (q, k, v, G))
        o, S = _block(q_, k_, v_, G_, weights, S)
        out[here] = o.transpose(1, 0, 2)
        out[start + real : start + BLOCK] = 0
    state_out[...] = S
    rounded(out)


def _by_head(x: Array, real: int) -> Array:
    """Rows of a block as [H, 64, D], padding rows zeros whatever they held."""
    by_head = np.zeros((x.shape[1], BLOCK, x.shape[2]), np.float32)
    by_head[:, :real] = x[:real].transpose(1, 0, 2)
    return by_head


def _block(q: Array, k: Array, v: Array, G: Array, beta: Array, S: Array) -> tuple[Array, Array]:
    """One block of 64 rows of every head: the outputs [H, 64, D] and the state after it. beta [H, 64, 1]."""
    q = unit(q)
    q /= np.sqrt(np.float32(q.shape[-1]))
    k = unit(k)
    total = np.add.accumulate(G, axis=1)  # Γ
    A, M = _decayed_products(q, k, total)
    A *= beta
    since_start = np.exp(total)
    right = v - np.matmul(k * since_start, S)
    right *= beta
    delta = _solve(A, right)
    o = np.matmul(q * since_start, S)
    o += np.matmul(M, delta)
    last = total[:, -1:, :]
    until_end = k * np.exp(last - total)
    after = np.exp(last[:, 0, :, None]) * S
    after += np.matmul(until_end.transpose(0, 2, 1), delta)
    return o, after


def _decayed_products(q: Array, k: Array, total: Array) -> tuple[Array, Array]:
    """A_ij = Σ_c k_ic k_jc exp(Γ_ic - Γ_jc) for j < i and M_ij, with q_i and j <= i; both [H, 64, 64], zeros elsewhere."""
    H = q.shape[0]
    A = np.zeros((H, BLOCK, BLOCK), np.float32)
    M = np.zeros((H, BLOCK, BLOCK), np.float32)
    for first in range(0, BLOCK, SUB):
        end = first + SUB
        sub = slice(first, end)
        middle = total[:, first + SUB // 2 - 1, None]
        since = np.exp(total[:, sub] - middle)
        until = np.exp(middle - total[:, :end])
        until *= k[:, :end]
        until = until.transpose(0, 2, 1)
        A[:, sub, :end] = np.matmul(k[:, sub] * since, until)
        M[:, sub, :end] = np.matmul(q[:, sub] * since, until)
    above, diagonal = _above(BLOCK)
    np.copyto(M, 0, where=above)
    np.copyto(A, 0, where=diagonal)
    return A, M


@functools.cache
def _above(n: int) -> tuple[Array, Array]:
    """Entries above the diagonal of an [n, n] matrix, and those with the diagonal."""
    lower = np.tri(n, dtype=bool)
    return ~lower, ~np.tri(n, k=-1, dtype=bool)


def _solve(A: Array, right: Array) -> Array:
    """Δ of (I + A) Δ = right, A strictly lower triangular: inverses of the diagonal blocks, then forward substitution."""
    H = A.shape[0]
    subs = BLOCK // SUB
    diagonal = np.empty((subs, H, SUB, SUB), np.float32)
    for s in range(subs):
        diagonal[s] = A[:, s * SUB : (s + 1) * SUB, s * SUB : (s + 1) * SUB]
    inverse = np.zeros_like(diagonal)
    inverse[..., range(SUB), range(SUB)] = ONE
    for i in range(1, SUB):
        inverse[..., i : i + 1, :] -= np.matmul(diagonal[..., i : i + 1, :i], inverse[..., :i, :])
    delta = np.empty_like(right)
    for s in range(subs):
        sub = slice(s * SUB, (s + 1) * SUB)
        known = right[:, sub]
        if s:
            known = known - np.matmul(A[:, sub, : s * SUB], delta[:, : s * SUB])
        delta[:, sub] = np.matmul(inverse[s], known)
    return delta
