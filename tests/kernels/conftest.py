"""Every backend and compute dtype that the tests of the operations run on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kernels.api import Kernels
from kernels.numpy import NumpyKernels


@pytest.fixture(scope="session", params=["f32", "bf16"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return NumpyKernels(request.param)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What whoever runs operations does: overflow and masked infinities are meant."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield
