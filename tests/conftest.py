"""Settings every test process needs before NumPy is imported."""

import os
from collections.abc import Iterator

import pytest
import structlog

# The NumPy backend's bits are those of one BLAS thread; children inherit the setting.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _logs_of_one_test() -> Iterator[None]:
    """Commands configure logging for their process; here the next test's must not go to what this one's stderr was."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
