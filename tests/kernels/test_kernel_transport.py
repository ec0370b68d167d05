"""Rows and values on their way between ranks: what arrives has the bits that left."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import compute, contents, normal, paged

from kernels.api import Kernels
from kernels.numpy import NumpyKernels
from kernels.rows import RowView

PAGES, OFFSETS = np.array([3, 0, 5, 3], np.int32), np.array([1, 63, 0, 2], np.int32)


def test_packed_values_come_back(kernels: Kernels) -> None:
    """In the compute dtype's own bytes, strange values too; into every second place of a wider array."""
    x = compute(kernels, contents(np.random.default_rng(0), 6, 40))
    x[0, :4] = np.inf, -0.0, -np.inf, 0.0
    x[1, 0] = np.nan
    wire = np.empty(x.shape, kernels.wire)
    kernels.pack(x, wire)
    assert wire.dtype.itemsize == {"f32": 4, "bf16": 2}[kernels.dtype]
    back = np.full((6, 80), 7, np.float32)
    kernels.unpack(wire, back[:, ::2])
    np.testing.assert_array_equal(back[:, ::2], x)
    assert (np.signbit(back[:, ::2]) == np.signbit(x)).all()
    assert (back[:, 1::2] == 7).all()


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
def test_exported_rows_are_stored_unchanged(kernels: Kernels, kv_dtype: str) -> None:
    rng = np.random.default_rng(1)
    there, here = (RowView(kernels.cache((8, 64, 24), kv_dtype), None, np.zeros((1, 1), np.int32)) for _ in range(2))
    rows = compute(kernels, contents(rng, 4, 24))
    kernels.write_rows(rows, there, PAGES, OFFSETS)
    link = np.empty((4, 24), there.values.dtype)
    kernels.export_rows(there, PAGES, OFFSETS, link)
    kernels.import_rows(link, here, PAGES[::-1], OFFSETS)
    kept = kernels.read_rows(here, PAGES[::-1], OFFSETS)
    assert kept.tobytes() == kernels.read_rows(there, PAGES, OFFSETS).tobytes()
    assert kept.tobytes() == kernels.stored_rows(rows, there).tobytes()
    assert np.count_nonzero(here.values.astype(np.float32).any(axis=-1)) == 4  # and nothing else


def test_copied_pages_are_equal_and_the_only_ones_changed() -> None:
    kernels = NumpyKernels("f32")
    view = paged(kernels, np.random.default_rng(2), 2, 256, 64, 8)
    plane = np.stack([view.values, normal(np.random.default_rng(3), *view.values.shape)], axis=1)
    before = plane.copy()
    kernels.copy_pages(plane, np.array([4, 1], np.int32), np.array([0, 7], np.int32))
    np.testing.assert_array_equal(plane[[0, 7]], before[[4, 1]])
    rest = [1, 2, 3, 4, 5, 6, *range(8, len(plane))]
    np.testing.assert_array_equal(plane[rest], before[rest])
