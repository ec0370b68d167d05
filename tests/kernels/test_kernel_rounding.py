"""Carriers of the compute and cache dtypes: rounded to nearest even, exactly widened, NaN kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.numpy import NumpyKernels
from kernels.rows import Array, RowView


def rounded(x: Array) -> Array:
    return NumpyKernels("bf16").upload(x, "compute")


@given(st.integers(0, 2**32 - 1))
def test_the_nearest_bf16_number_ties_to_even(bits: int) -> None:
    x = np.array([bits], np.uint32).view(np.float32)
    y = rounded(x)
    if np.isnan(x[0]):
        assert np.isnan(y[0])
        return
    below = bits & 0xFFFF0000
    rest = bits - below
    up = rest > 0x8000 or (rest == 0x8000 and (below >> 16) & 1)
    assert int(y.view(np.uint32)[0]) == below + (0x10000 if up else 0)


def test_infinities_and_ties() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 3.4e38, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0], np.float32)
    y = rounded(x)
    assert y.tolist()[:2] == [np.inf, -np.inf]
    assert np.isnan(y[2])
    assert y.tolist()[3:6] == [np.inf, 1.0, 1 + 2.0**-6]
    assert np.signbit(y[6])


def test_a_float32_run_rounds_nothing() -> None:
    x = np.array([1 + 2.0**-20], np.float32)
    assert NumpyKernels("f32").upload(x, "compute")[0] == x[0]


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
def test_written_rows_come_back_and_the_null_page_stays_zero(kv_dtype: str) -> None:
    kernels = NumpyKernels("f32")
    plane = kernels.cache((6, 2, 8, 5), kv_dtype)  # [page][layer][row]: a view of one layer is not contiguous
    view = RowView(plane[:, 1], None, np.zeros((1, 1), np.int32))
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4, 5)).astype(np.float32)
    pages, offsets = np.array([3, 0, view.discard_page, view.discard_page], np.int32), np.array([7, 0, 2, 2], np.int32)
    kernels.write_rows(rows, view, pages, offsets)
    held = kernels.read_rows(view, pages[:2], offsets[:2])
    assert held.dtype == plane.dtype
    expected = rows[:2] if kv_dtype == "f32" else rounded(rows[:2])
    assert np.array_equal(held.astype(np.float32), expected)
    assert not plane[view.null_page].any()
    assert not plane[:, 0].any()


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
def test_a_ring_keeps_the_last_rows_and_reads_zeros_before_the_conversation(kv_dtype: str) -> None:
    kernels = NumpyKernels("bf16")
    ring = kernels.cache((2, 3, 4), kv_dtype)
    ring[...] = 9
    rows = kernels.upload(np.arange(16).reshape(4, 4), "compute")
    for position in range(4):
        here = np.array([position], np.int32)
        kernels.write_ring(rows[position : position + 1], ring, np.array([1], np.int32), here)
    out = kernels.empty((4, 4), "compute")
    kernels.read_ring(ring, np.array([1, 1, 1, 1], np.int32), np.array([3, 2, 1, -1], np.int32), out)
    assert np.array_equal(out, np.concatenate([rows[[3, 2, 1]], np.zeros((1, 4))]))
    assert np.all(ring[0].astype(np.float32) == 9)
