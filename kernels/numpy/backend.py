"""NumpyKernels: the operations of kernels.api on the CPU, and their definition.

Compute arrays are float32 arrays; in a bf16 run their values are bf16 numbers. One BLAS thread is assumed: whoever starts
the process sets OPENBLAS_NUM_THREADS=1 before NumPy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from kernels.api import Kind, Path
from kernels.numpy import attention, cached_rows, elementwise, hyper, kda, norms, products, sampling, selection
from kernels.numpy import experts as _experts
from kernels.numpy.rounding import CACHE_DTYPES, ROUNDING, widen
from kernels.rows import Array, RowView

_CARRIERS = {"compute": np.float32, "f32": np.float32, "f64": np.float64, "i32": np.int32, "u64": np.uint64}


class NumpyKernels:
    """See kernels.api.Kernels; shapes, dtypes and rounding points are said there."""

    name = "numpy"

    def __init__(self, dtype: Literal["f32", "bf16"]) -> None:
        self.dtype: str = dtype
        self.wire = CACHE_DTYPES[dtype]
        self._round = ROUNDING[dtype]
        self._balancers: hyper.Balancers = {}

    # ---- memory ----------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], kind: Kind) -> Array:
        return np.empty(tuple(shape), _CARRIERS[kind])

    def cache(self, shape: Sequence[int], kv_dtype: str) -> Array:
        return np.zeros(tuple(shape), CACHE_DTYPES[kv_dtype])

    def upload(self, array: Array, kind: Kind) -> Array:
        carried = np.array(array, dtype=_CARRIERS[kind], order="C")
        if kind == "compute":
            self._round(carried)
        return carried

    def host(self, array: Array) -> Array:
        return array

    # ---- products --------------------------------------------------------------------------------------------

    def linear(self, path: Path, x: Array, w: Array, out: Array) -> None:
        products.product(path, x, w, out)
        self._round(out)

    def linear_f32(self, path: Path, x: Array, w: Array, out: Array) -> None:
        products.product(path, x, w, out)

    def embed(self, tokens: Array, table: Array, first_id: int, out: Array) -> None:
        products.embed(tokens, table, first_id, out)

    def sum_ranks(self, parts: Sequence[Array], out: Array) -> None:
        products.sum_ranks(parts, out)
        self._round(out)

    def add(self, a: Array, b: Array, out: Array) -> None:
        np.add(a, b, out=out)

    # ---- norms and activations -------------------------------------------------------------------------------

    def rms_norm(self, x: Array, w: Array, eps: float, out: Array) -> None:
        norms.rms_norm(x, w, eps, out, self._round)

    def layer_norm(self, x: Array, w: Array, b: Array, eps: float, out: Array) -> None:
        norms.layer_norm(x, w, b, eps, out, self._round)

    def swiglu(self, gate_up: Array, limit: float, out: Array) -> None:
        norms.swiglu(gate_up, limit, out, self._round)

    # ---- hyper-connections -----------------------------------------------------------------------------------

    def hyper_spread(self, e: Array, out: Array) -> None:
        hyper.spread(e, out)

    def hyper_pre(
        self, path: Path, X: Array, fn: Array, base: Array, scale: Array, rms_eps: float, hyper_eps: float, iters: int,
        x: Array, post: Array, comb: Array,
    ) -> None:  # fmt: skip
        hyper.pre(path, X, fn, base, scale, rms_eps, hyper_eps, iters, x, post, comb, self._round, self._balancers)

    def hyper_post(self, X: Array, y: Array, post: Array, comb: Array, out: Array) -> None:
        hyper.post(X, y, post, comb, out, self._round)

    def hyper_mean(self, X: Array, out: Array) -> None:
        hyper.mean(X, out, self._round)

    def scale(self, x: Array, factor: float, out: Array) -> None:
        np.multiply(x, np.float32(factor), out=out)

    # ---- a lane's rings --------------------------------------------------------------------------------------

    def read_ring(self, ring: Array, lanes: Array, positions: Array, out: Array) -> None:
        cached_rows.read_ring(ring, lanes, positions, out)

    def write_ring(self, rows: Array, ring: Array, lanes: Array, positions: Array) -> None:
        cached_rows.write_ring(rows, ring, lanes, positions)

    # ---- KDA -------------------------------------------------------------------------------------------------

    def kda_conv(self, u: Array, w: Array, out: Array) -> None:
        kda.conv(u, w, out, self._round)

    def kda_gate(self, f: Array, dt_bias: Array, a_log: Array, bound: float, out: Array) -> None:
        kda.gate(f, dt_bias, a_log, bound, out)

    def sigmoid(self, x: Array, out: Array) -> None:
        elementwise.sigmoid(x, out)

    def kda_prompt(
        self, q: Array, k: Array, v: Array, G: Array, beta: Array, rows: int, state_in: Array, state_out: Array, out: Array
    ) -> None:  # fmt: skip
        kda.prompt(q, k, v, G, beta, rows, state_in, state_out, out, self._round)

    def kda_decode(
        self, q: Array, k: Array, v: Array, G: Array, beta: Array, states: Array, source: Array, target: Array, out: Array
    ) -> None:  # fmt: skip
        kda.decode(q, k, v, G, beta, states, source, target, out, self._round)

    def kda_output(self, o: Array, gate: Array, w: Array, eps: float, out: Array) -> None:
        kda.output(o, gate, w, eps, out, self._round)

    # ---- latent rows, pools, selection -----------------------------------------------------------------------

    def write_rows(self, rows: Array, view: RowView, pages: Array, offsets: Array) -> None:
        cached_rows.write_rows(rows, view, pages, offsets)

    def read_rows(self, view: RowView, pages: Array, offsets: Array) -> Array:
        return view.values[pages, offsets]

    def stored_rows(self, rows: Array, view: RowView) -> Array:
        return rows.astype(view.values.dtype)

    def export_rows(self, view: RowView, pages: Array, offsets: Array, out: Array) -> None:
        out[...] = view.values[pages, offsets]

    def import_rows(self, rows: Array, view: RowView, pages: Array, offsets: Array) -> None:
        view.values[pages, offsets] = rows

    def copy_pages(self, plane: Array, source: Array, target: Array) -> None:
        plane[target] = plane[source]

    def save_bytes(self, parts: Sequence[Array], plane: Array, pages: Array) -> None:
        cached_rows.save_bytes(parts, plane, pages)

    def load_bytes(self, plane: Array, pages: Array, parts: Sequence[Array]) -> None:
        cached_rows.load_bytes(plane, pages, parts)

    def pack(self, x: Array, out: Array) -> None:
        out[...] = x

    def unpack(self, x: Array, out: Array) -> None:
        out[...] = widen(x)

    def absorb(self, path: Path, q: Array, w: Array, out: Array) -> None:
        products.head_product(path, q, w, out)
        self._round(out)

    def attend(
        self, path: Path, q: Array, view: RowView, lanes: Array, positions: Array, lists: Array, counts: Array,
        scale: float, out: Array, tiles: Sequence[int] = (),
    ) -> None:  # fmt: skip
        attention.attend(path, q, view, lanes, positions, lists, counts, scale, out, tiles, self._round)

    def pool_keys(self, keys: Array, gates: Array, ape: Array, out: Array) -> None:
        selection.pool_keys(keys, gates, ape, out, self._round)

    def select(
        self, path: Path, q: Array, weights: Array, view: RowView, lanes: Array, positions: Array, pool: int, kept: int,
        lists: Array, counts: Array,
    ) -> None:  # fmt: skip
        selection.select(path, q, weights, view, lanes, positions, pool, kept, lists, counts)

    # ---- experts ---------------------------------------------------------------------------------------------

    def route(
        self, path: Path, x: Array, w: Array, bias: Array, groups: int, groups_kept: int, normalise: bool, scale: float,
        experts: Array, weights: Array,
    ) -> None:  # fmt: skip
        _experts.route(path, x, w, bias, groups, groups_kept, normalise, scale, experts, weights)

    def experts(
        self, path: Path, x: Array, experts: Array, weights: Array, rows: int, gate_up: Array, down: Array, limit: float,
        out: Array,
    ) -> None:  # fmt: skip
        _experts.routed(path, x, experts, weights, rows, gate_up, down, limit, out, self._round)

    # ---- sampling --------------------------------------------------------------------------------------------

    def candidates(
        self, logits: Array, first_id: int, temperature: Array, kept: Array, seed: Array, position: Array,
        scores: Array, ids: Array,
    ) -> None:  # fmt: skip
        sampling.candidates(logits, first_id, temperature, kept, seed, position, scores, ids)

    def mass(self, logits: Array, top: Array, temperature: Array, out: Array) -> None:
        sampling.mass(logits, top, temperature, out)

    def draw(
        self, scores: Array, ids: Array, columns: Array, masses: Array, temperature: Array, top_k: Array, top_p: Array,
        min_p: Array, seed: Array, position: Array, out: Array,
    ) -> None:  # fmt: skip
        sampling.draw(scores, ids, columns, masses, temperature, top_k, top_p, min_p, seed, position, out)

    def score_rows(
        self, logits: Array, first_id: int, following: Array, max_: Array, sum_: Array, best: Array, next_: Array
    ) -> None:
        sampling.score_rows(logits, first_id, following, max_, sum_, best, next_)
