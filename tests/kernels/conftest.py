"""Every backend and compute dtype that the tests of the operations run on."""

from __future__ import annotations

import pytest

from kernels.api import Kernels
from kernels.numpy import NumpyKernels


@pytest.fixture(scope="session", params=["f32", "bf16"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return NumpyKernels(request.param)
