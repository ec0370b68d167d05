"""The numerics digest: equal where bits are equal, different where anything that makes bits is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import ORACLE

from kernels.numpy import NumpyKernels
from latentpool.geometry import Geometry
from services.rank_worker.numerics import numerics_digest


def digest(case: str = "tiny", dtype: Any = "f32", kv_dtype: str = "f32", world: int = 2, kernels: Any = None) -> str:
    geometry = Geometry.from_file(ORACLE / case).without_drafts()
    return numerics_digest(geometry, kernels or NumpyKernels(dtype), kv_dtype, world)


def test_it_repeats_and_tells_settings_apart() -> None:
    assert digest() == digest()
    assert len({digest(), digest(dtype="bf16"), digest(kv_dtype="bf16"), digest(world=1), digest("shared_index")}) == 5


class _OneUlp:
    """A backend whose chosen operation differs in the last bit of one value of its output."""

    def __init__(self, operation: str) -> None:
        self._kernels = NumpyKernels("f32")
        self._operation = operation

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._kernels, name)
        if name != self._operation:
            return operation

        def off(*args: Any, **kwargs: Any) -> None:
            operation(*args, **kwargs)
            out = args[-1]
            flat = out.reshape(-1)
            flat[0] = np.nextafter(flat[0], np.float32(np.inf))

        return off


@pytest.mark.parametrize(
    "operation", ["linear", "linear_f32", "rms_norm", "hyper_post", "kda_conv", "kda_gate", "kda_output", "attend", "pool_keys"]
)
def test_one_ulp_in_one_operation_changes_it(operation: str) -> None:
    assert digest(kernels=_OneUlp(operation)) != digest()
