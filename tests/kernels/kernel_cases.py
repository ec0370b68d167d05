"""One case an operation for the invariance tests: how to make inputs of some units, and how to call it on them.

A unit is what the contract says must not see its neighbours: a row (decode), a window (kda_conv, kda_decode), a pool, or a
block of 64 rows (prompt). Inputs and outputs have the units' rows on their first axis; constants are shared by all units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.api import Kernels, Path
from kernels.rows import RowView

Array = np.ndarray
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Kernels, np.random.Generator, Path, int], tuple[Inputs, Inputs]]
    """(kernels, generator, path, rows) -> (per-row arrays, constants)"""
    call: Callable[[Kernels, Path, Inputs, Inputs], tuple[Array, ...]]
    paths: tuple[Path, ...] = (Path.DECODE,)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def compute(kernels: Kernels, x: Array) -> Array:
    return kernels.upload(x, "compute")


def contents(rng: np.random.Generator, *shape: int) -> Array:
    """Rows of very different size, so that a sum in another order shows."""
    x = normal(rng, *shape)
    x *= np.exp(2 * rng.standard_normal(shape)).astype(np.float32)
    return x


BOTH = (Path.PROMPT, Path.DECODE)


def out(kernels: Kernels, kind: Any, *shape: int) -> Array:
    """An output full of NaN (or a strange integer): what an operation forgets to write shows."""
    array = kernels.empty(shape, kind)
    array[...] = np.nan if array.dtype.kind == "f" else 77
    return array


def linear_case(name: str, K: int, N: int) -> Case:
    def make(kernels: Kernels, rng: np.random.Generator, path: Path, rows: int) -> tuple[Inputs, Inputs]:
        return {"x": compute(kernels, contents(rng, rows, K))}, {"w": compute(kernels, normal(rng, N, K))}

    def call(kernels: Kernels, path: Path, i: Inputs, c: Inputs) -> tuple[Array, ...]:
        y = out(kernels, "compute" if name == "linear" else "f32", len(i["x"]), N)
        getattr(kernels, name)(path, i["x"], c["w"], y)
        return (y,)

    return Case(f"{name}-{K}x{N}", make, call, BOTH)


def absorb_case(h: int, a: int, b: int) -> Case:
    def make(kernels: Kernels, rng: np.random.Generator, path: Path, rows: int) -> tuple[Inputs, Inputs]:
        return {"q": compute(kernels, contents(rng, rows, h, a))}, {"w": compute(kernels, normal(rng, h, b, a))}

    def call(kernels: Kernels, path: Path, i: Inputs, c: Inputs) -> tuple[Array, ...]:
        y = out(kernels, "compute", len(i["q"]), h, b)
        kernels.absorb(path, i["q"], c["w"], y)
        return (y,)

    return Case(f"absorb-{h}x{a}x{b}", make, call, BOTH)


def simple(
    name: str, shapes: dict[str, tuple[int, ...]], constants: dict[str, tuple[int, ...]],
    call: Callable[[Kernels, Inputs, Inputs], tuple[Array, ...]],
) -> Case:  # fmt: skip
    """An operation without a path, all of whose inputs are compute arrays (f32 where the name ends in _f32)."""

    def cast(kernels: Kernels, key: str, x: Array) -> Array:
        return x if key.endswith("_f32") else compute(kernels, x)

    def make(kernels: Kernels, rng: np.random.Generator, path: Path, rows: int) -> tuple[Inputs, Inputs]:
        rowwise = {key: cast(kernels, key, contents(rng, rows, *shape)) for key, shape in shapes.items()}
        shared = {key: cast(kernels, key, normal(rng, *shape)) for key, shape in constants.items()}
        return rowwise, shared

    return Case(name, make, lambda kernels, path, i, c: call(kernels, i, c))


def hyper_pre_case(N: int, d: int) -> Case:
    def make(kernels: Kernels, rng: np.random.Generator, path: Path, rows: int) -> tuple[Inputs, Inputs]:
        width = (2 + N) * N
        c = {"fn": normal(rng, width, N * d) / 8, "base": normal(rng, width), "scale": np.abs(normal(rng, 3))}
        return {"X": compute(kernels, contents(rng, rows, N, d))}, c

    def call(kernels: Kernels, path: Path, i: Inputs, c: Inputs) -> tuple[Array, ...]:
        T = len(i["X"])
        x, post, comb = (out(kernels, "compute", T, *s) for s in ((d,), (N,), (N, N)))
        kernels.hyper_pre(path, i["X"], c["fn"], c["base"], c["scale"], 1e-5, 1e-6, 20, x, post, comb)
        return x, post, comb

    return Case(f"hyper_pre-{N}x{d}", make, call, BOTH)


def route_case(d: int, E: int, k: int, groups: int) -> Case:
    def make(kernels: Kernels, rng: np.random.Generator, path: Path, rows: int) -> tuple[Inputs, Inputs]:
        c = {"w": normal(rng, E, d) / np.float32(np.sqrt(d)), "bias": normal(rng, E) / 10}
        return {"x": compute(kernels, normal(rng, rows, d))}, c

    def call(kernels: Kernels, path: Path, i: Inputs, c: Inputs) -> tuple[Array, ...]:
        T = len(i["x"])
        chosen, weights = out(kernels, "i32", T, k), out(kernels, "f32", T, k)
        kernels.route(path, i["x"], c["w"], c["bias"], groups, max(1, groups // 2), True, 2.5, chosen, weights)
        return chosen, weights

    return Case(f"route-{d}x{E}-{groups}groups", make, call, BOTH)


def experts_case(d: int, E: int, k: int, m: int) -> Case:
    def make(kernels: Kernels, rng: np.random.Generator, path: Path, rows: int) -> tuple[Inputs, Inputs]:
        chosen = np.stack([np.sort(rng.permutation(E)[:k]) for _ in range(rows)]).astype(np.int32)
        i = {"x": compute(kernels, normal(rng, rows, d)), "experts": chosen, "weights": np.abs(normal(rng, rows, k))}
        c = {"gate_up": compute(kernels, normal(rng, E, 2 * m, d) / 8), "down": compute(kernels, normal(rng, E, d, m) / 8)}
        return i, c

    def call(kernels: Kernels, path: Path, i: Inputs, c: Inputs) -> tuple[Array, ...]:
        T = len(i["x"])
        y = out(kernels, "f32", T, d)
        kernels.experts(path, i["x"], i["experts"], i["weights"], T, c["gate_up"], c["down"], 1.5, y)
        return (y,)

    return Case(f"experts-{d}x{E}x{m}", make, call, BOTH)


def paged(kernels: Kernels, rng: np.random.Generator, lanes: int, length: int, rows: int, width: int) -> RowView:
    """A shuffled plane in the cache dtype of the run with lanes of `length` rows each, and two pages nobody has."""
    slots = -(-length // rows)
    pages = lanes * slots + 2
    values = kernels.cache((pages + 2, rows, width), kernels.dtype)
    values[:pages] = normal(rng, pages, rows, width)
    tables = np.full((lanes, slots + 1), pages, np.int32)
    tables[:, :slots] = rng.permutation(pages)[: lanes * slots].reshape(lanes, slots)
    return RowView(values, None, tables)


def attend_case(h: int, r: int, longest: int) -> Case:
    length = 1408

    def make(kernels: Kernels, rng: np.random.Generator, path: Path, rows: int) -> tuple[Inputs, Inputs]:
        lanes = np.zeros(rows, np.int32)
        positions = np.zeros(rows, np.int32)
        if path is Path.PROMPT:
            for start in range(0, rows, 64):
                lanes[start : start + 64] = rng.integers(3)
                # the second block crosses from dense rows to rows with a selection
                block = longest // 64 if start == 64 else rng.integers(length // 64)
                positions[start : start + 64] = block * 64 + np.arange(64)
        else:
            lanes[:] = rng.integers(3, size=rows)
            positions[:] = rng.integers(length, size=rows)
            positions[0] = longest - 1
        lists = np.full((rows, longest), -1, np.int32)
        counts = np.minimum(positions + 1, longest).astype(np.int32)
        for t in range(rows):
            lists[t, : counts[t]] = np.sort(rng.permutation(positions[t] + 1)[: counts[t]])
        i = {"q": compute(kernels, normal(rng, rows, h, r)), "lanes": lanes, "positions": positions, "lists": lists}
        return i | {"counts": counts}, {"view": paged(kernels, rng, 3, length, 64, r)}

    def call(kernels: Kernels, path: Path, i: Inputs, c: Inputs) -> tuple[Array, ...]:
        y = out(kernels, "compute", *i["q"].shape)
        kernels.attend(path, i["q"], c["view"], i["lanes"], i["positions"], i["lists"], i["counts"], 0.25, y)
        return (y,)

    return Case(f"attend-{h}x{r}-{longest}", make, call, BOTH)


def select_case(n: int, d: int, pool: int, kept: int) -> Case:
    length = 900

    def make(kernels: Kernels, rng: np.random.Generator, path: Path, rows: int) -> tuple[Inputs, Inputs]:
        positions = rng.integers(length, size=rows).astype(np.int32)
        lanes = rng.integers(3, size=rows).astype(np.int32)
        if path is Path.PROMPT:
            for start in range(0, rows, 64):
                block = kept * pool // 64 if start == 64 else rng.integers(length // 64)
                positions[start : start + 64] = block * 64 + np.arange(64)
                lanes[start : start + 64] = lanes[start]
        i = {"q": compute(kernels, normal(rng, rows, n, d)), "weights": normal(rng, rows, n)}
        i |= {"lanes": lanes, "positions": positions}
        return i, {"view": paged(kernels, rng, 3, length // pool, 32, d)}

    def call(kernels: Kernels, path: Path, i: Inputs, c: Inputs) -> tuple[Array, ...]:
        T = len(i["q"])
        lists, counts = out(kernels, "i32", T, kept * pool + pool - 1), out(kernels, "i32", T)
        view, lanes, positions = c["view"], i["lanes"], i["positions"]
        kernels.select(path, i["q"], i["weights"], view, lanes, positions, pool, kept, lists, counts)
        return lists, counts

    return Case(f"select-{n}x{d}-pool{pool}", make, call, BOTH)


def kda_decode_case(R: int, H: int, D: int) -> Case:
    def make(kernels: Kernels, rng: np.random.Generator, path: Path, rows: int) -> tuple[Inputs, Inputs]:
        q, k, v = (compute(kernels, normal(rng, rows, R, H, D)) for _ in range(3))
        i = {"q": q, "k": k, "v": v, "G": -5 * rng.random((rows, R, H, D)).astype(np.float32)}
        return i | {"beta": rng.random((rows, R, H)).astype(np.float32), "state": normal(rng, rows, H, D, D)}, {}

    def call(kernels: Kernels, path: Path, i: Inputs, c: Inputs) -> tuple[Array, ...]:
        B = len(i["q"])
        states = np.concatenate([i["state"], np.full_like(i["state"], np.nan)])
        source, target = np.arange(B, dtype=np.int32), np.arange(B, 2 * B, dtype=np.int32)
        y = out(kernels, "compute", B, R, H, D)
        kernels.kda_decode(i["q"], i["k"], i["v"], i["G"], i["beta"], states, source, target, y)
        return y, states[B:]

    return Case(f"kda_decode-{R}rows-{H}x{D}", make, call)


def conv_case(T: int, C: int, taps: int) -> Case:
    def make(kernels: Kernels, rng: np.random.Generator, path: Path, rows: int) -> tuple[Inputs, Inputs]:
        return {"u": compute(kernels, contents(rng, rows, taps - 1 + T, C))}, {"w": normal(rng, taps, C)}

    def call(kernels: Kernels, path: Path, i: Inputs, c: Inputs) -> tuple[Array, ...]:
        y = out(kernels, "compute", len(i["u"]), T, C)
        kernels.kda_conv(i["u"], c["w"], y)
        return (y,)

    return Case(f"kda_conv-{T}x{C}", make, call)


def candidates_case(V: int, C: int) -> Case:
    def make(kernels: Kernels, rng: np.random.Generator, path: Path, rows: int) -> tuple[Inputs, Inputs]:
        i = {"logits": compute(kernels, 4 * normal(rng, rows, V)), "temperature": rng.choice([0.0, 0.5, 1.3], size=rows)}
        i |= {"kept": rng.choice([0, 1, 5, C], size=rows).astype(np.int32)}
        return i | {name: rng.integers(1 << 63, size=rows).astype(np.uint64) for name in ("seed", "position")}, {}

    def call(kernels: Kernels, path: Path, i: Inputs, c: Inputs) -> tuple[Array, ...]:
        T = len(i["logits"])
        scores, ids = out(kernels, "f64", T, C), out(kernels, "i32", T, C)
        kernels.candidates(i["logits"], 100, i["temperature"], i["kept"], i["seed"], i["position"], scores, ids)
        return scores, ids

    return Case(f"candidates-{V}", make, call)


def score_rows_case(V: int) -> Case:
    def make(kernels: Kernels, rng: np.random.Generator, path: Path, rows: int) -> tuple[Inputs, Inputs]:
        following = rng.integers(-1, V, size=rows).astype(np.int32)
        return {"logits": compute(kernels, 4 * normal(rng, rows, V)), "following": following}, {}

    def call(kernels: Kernels, path: Path, i: Inputs, c: Inputs) -> tuple[Array, ...]:
        T = len(i["logits"])
        top, total, best, following = (out(kernels, kind, T) for kind in ("f32", "f64", "i32", "f32"))
        kernels.score_rows(i["logits"], 0, i["following"], top, total, best, following)
        return top, total, best, following

    return Case(f"score_rows-{V}", make, call)


def result(kernels: Kernels, kind: Any, shape: tuple[int, ...], fill: Callable[[Array], None]) -> tuple[Array, ...]:
    y = out(kernels, kind, *shape)
    fill(y)
    return (y,)


SIMPLE = [
    simple("rms_norm", {"x": (300,)}, {"w": (300,)},
           lambda k, i, c: result(k, "compute", i["x"].shape, lambda y: k.rms_norm(i["x"], c["w"], 1e-5, y))),
    simple("layer_norm", {"x": (48,)}, {"w": (48,), "b": (48,)},
           lambda k, i, c: result(k, "compute", i["x"].shape, lambda y: k.layer_norm(i["x"], c["w"], c["b"], 1e-6, y))),
    simple("swiglu", {"x": (130,)}, {},
           lambda k, i, c: result(k, "compute", (len(i["x"]), 65), lambda y: k.swiglu(i["x"], 1.5, y))),
    simple("hyper_spread", {"e": (70,)}, {},
           lambda k, i, c: result(k, "compute", (len(i["e"]), 4, 70), lambda y: k.hyper_spread(i["e"], y))),
    simple("hyper_mean", {"X": (4, 70)}, {},
           lambda k, i, c: result(k, "compute", (len(i["X"]), 70), lambda y: k.hyper_mean(i["X"], y))),
    simple("hyper_post", {"X": (4, 70), "y": (70,), "post": (4,), "comb": (4, 4)}, {},
           lambda k, i, c: result(k, "compute", i["X"].shape,
                                  lambda y: k.hyper_post(i["X"], i["y"], i["post"], i["comb"], y))),
    simple("kda_gate", {"f": (3 * 20,)}, {"dt_bias_f32": (60,), "a_log_f32": (3,)},
           lambda k, i, c: result(k, "f32", i["f"].shape,
                                  lambda y: k.kda_gate(i["f"], c["dt_bias_f32"], c["a_log_f32"], -5.0, y))),
    simple("sigmoid", {"x": (9,)}, {}, lambda k, i, c: result(k, "f32", i["x"].shape, lambda y: k.sigmoid(i["x"], y))),
    simple("scale", {"x": (9,)}, {}, lambda k, i, c: result(k, "f32", i["x"].shape, lambda y: k.scale(i["x"], 0.3, y))),
    simple("kda_output", {"o": (3, 20), "gate": (60,)}, {"w_f32": (20,)},
           lambda k, i, c: result(k, "compute", i["gate"].shape,
                                  lambda y: k.kda_output(i["o"], i["gate"], c["w_f32"], 1e-5, y))),
    simple("pool_keys", {"keys": (4, 24), "gates": (4, 24)}, {"ape": (4, 24)},
           lambda k, i, c: result(k, "compute", (len(i["keys"]), 24),
                                  lambda y: k.pool_keys(i["keys"], i["gates"], c["ape"], y))),
    simple("sum_ranks", {"a_f32": (70,), "b_f32": (70,), "c_f32": (70,)}, {},
           lambda k, i, c: result(k, "compute", i["a_f32"].shape, lambda y: k.sum_ranks(list(i.values()), y))),
]  # fmt: skip

CASES = [
    *(linear_case("linear", K, N) for K, N in ((256, 256), (64, 96), (300, 40), (1024, 130), (33, 1))),
    linear_case("linear_f32", 256, 64),
    absorb_case(3, 48, 96),
    absorb_case(1, 256, 128),
    *SIMPLE,
    hyper_pre_case(4, 64),
    hyper_pre_case(2, 33),
    route_case(256, 24, 3, 1),
    route_case(64, 16, 2, 4),
    experts_case(128, 6, 2, 80),
    attend_case(3, 32, 67),
    attend_case(1, 48, 1091),
    select_case(4, 16, 4, 16),
    select_case(3, 24, 8, 10),
    kda_decode_case(1, 3, 16),
    kda_decode_case(4, 2, 24),
    conv_case(1, 40, 4),
    conv_case(4, 40, 4),
    candidates_case(200, 8),
    score_rows_case(200),
]
