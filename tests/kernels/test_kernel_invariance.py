"""What a row or block gets depends on itself, never on how many there are or where it stands (design 3.2 and 3.3)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path as FilePath

import numpy as np
import pytest
from kernel_cases import CASES, Case, Inputs, experts_case, linear_case

from kernels.api import Kernels, Path
from kernels.numpy import NumpyKernels
from kernels.rows import Array

UNIT = {Path.DECODE: 1, Path.PROMPT: 64}
PAIRS = [pytest.param(case, path, id=f"{case.name}-{path.value}") for case in CASES for path in case.paths]


def bits(x: Array) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def take(inputs: Inputs, rows: Array) -> Inputs:
    return {name: np.ascontiguousarray(value[rows]) for name, value in inputs.items()}


def check(kernels: Kernels, case: Case, path: Path, units: int, seed: int) -> None:
    """Compares every unit alone, in pairs and in another order with the same unit in the whole call, bit for bit."""
    unit = UNIT[path]
    inputs, constants = case.make(kernels, np.random.default_rng(seed), path, units * unit)
    before = {name: bits(value) for name, value in inputs.items()}
    whole = case.call(kernels, path, inputs, constants)
    assert before == {name: bits(value) for name, value in inputs.items()}, f"{case.name} changed its inputs"
    every = np.arange(units)
    others = [every[u : u + 1] for u in every] + [every[u : u + 2] for u in every[:-1]] + [every[::-1], np.roll(every, 1)]
    for chosen in others:
        rows = (chosen[:, None] * unit + np.arange(unit)).ravel()
        part = case.call(kernels, path, take(inputs, rows), constants)
        for place, (ours, theirs) in enumerate(zip(part, whole, strict=True)):
            assert bits(ours) == bits(theirs[rows]), f"{case.name}: output {place} of units {chosen.tolist()} has other bits"


@pytest.mark.parametrize(("case", "path"), PAIRS)
def test_a_unit_does_not_see_its_neighbours(kernels: Kernels, case: Case, path: Path) -> None:
    check(kernels, case, path, units=3 if path is Path.PROMPT else 7, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("case", "path"), PAIRS)
def test_a_unit_does_not_see_its_many_neighbours(kernels: Kernels, case: Case, path: Path, seed: int) -> None:
    check(kernels, case, path, units=6 if path is Path.PROMPT else 33, seed=10 + seed)


def test_a_row_does_not_see_how_many_rows_chose_its_expert(kernels: Kernels) -> None:
    check(kernels, experts_case(96, 2, 1, 48), Path.DECODE, units=48, seed=1)


def test_the_check_catches_a_gemm_over_rows() -> None:
    """The planted fault: one product for all rows gives one row other bits than two."""

    class Faulty(NumpyKernels):
        def linear(self, path: Path, x: Array, w: Array, out: Array) -> None:
            out[...] = x @ w.T

    with pytest.raises(AssertionError, match="has other bits"):
        check(Faulty("f32"), linear_case("linear", 256, 256), Path.DECODE, units=2, seed=1)


def test_kda_prompt_blocks_in_one_call_equal_blocks_in_many(kernels: Kernels) -> None:
    rng = np.random.default_rng(3)
    T, H, D = 192, 2, 24
    q, k, v = (kernels.upload(rng.standard_normal((T, H, D)), "compute") for _ in range(3))
    G = (-5 * rng.random((T, H, D)) ** 3).astype(np.float32)
    beta = rng.random((T, H)).astype(np.float32)
    first = rng.standard_normal((H, D, D)).astype(np.float32)

    whole, after = kernels.empty((T, H, D), "compute"), kernels.empty((H, D, D), "f32")
    kernels.kda_prompt(q, k, v, G, beta, T - 7, first, after, whole)

    state = first.copy()
    for start in range(0, T, 64):
        here = slice(start, start + 64)
        out = kernels.empty((64, H, D), "compute")
        real = min(64, T - 7 - start)
        kernels.kda_prompt(q[here], k[here], v[here], G[here], beta[here], real, state, state, out)
        assert bits(out) == bits(whole[here])
    assert bits(state) == bits(after)


def test_a_window_of_rows_equals_windows_of_one(kernels: Kernels) -> None:
    rng = np.random.default_rng(4)
    B, R, H, D = 2, 4, 2, 16
    q, k, v = (kernels.upload(rng.standard_normal((B, R, H, D)), "compute") for _ in range(3))
    G = (-5 * rng.random((B, R, H, D))).astype(np.float32)
    beta = rng.random((B, R, H)).astype(np.float32)
    first = rng.standard_normal((4, H, D, D)).astype(np.float32)
    low, high = np.array([0, 1], np.int32), np.array([2, 3], np.int32)

    together, states = kernels.empty((B, R, H, D), "compute"), first.copy()
    kernels.kda_decode(q, k, v, G, beta, states, low, high, together)

    single, here, there = first.copy(), low, high
    for row in range(R):
        out = kernels.empty((B, 1, H, D), "compute")
        one = [np.ascontiguousarray(x[:, row : row + 1]) for x in (q, k, v, G, beta)]
        kernels.kda_decode(*one, single, here, there, out)
        assert bits(out[:, 0]) == bits(together[:, row])
        here, there = there, here
    assert bits(single[here]) == bits(states[high])


def blas_core() -> str:
    [library] = (FilePath(np.__file__).parent.parent / "numpy.libs").glob("libscipy_openblas64*")
    core = ctypes.CDLL(str(library)).scipy_openblas_get_corename64_
    core.restype = ctypes.c_char_p
    return core().decode()


def test_the_asked_for_blas_kernels_are_in_use() -> None:
    asked = os.environ.get("OPENBLAS_CORETYPE")
    if asked is None:
        pytest.skip("OPENBLAS_CORETYPE is not set")
    assert blas_core().lower() == asked.lower()


@pytest.mark.skipif("OPENBLAS_CORETYPE" in os.environ, reason="this is the other run")
def test_the_same_on_haswell_kernels() -> None:
    """The BLAS kernels of Haswell and Zen have other tiles: what holds on one family may not hold on the other."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("x86-64 kernels")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not full", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"OPENBLAS_CORETYPE": "Haswell"}, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
