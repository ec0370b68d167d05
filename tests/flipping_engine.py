"""An engine with a fault: once, between computing a latent row and writing it, one bit flips. Run in the engine's place."""

from __future__ import annotations

import sys

import numpy as np

from kernels.numpy import NumpyKernels
from services.rank_worker import engine
from services.rank_worker.engine import EngineSettings, serve  # what a front looks for

__all__ = ["EngineSettings", "serve"]

_DECODES_BEFORE = 5
_LATENT_ROWS = 64
_write_rows = NumpyKernels.write_rows
_decodes = 0


def _write_and_flip(self: NumpyKernels, rows: np.ndarray, view: object, pages: np.ndarray, offsets: np.ndarray) -> None:
    """One row, of the latent plane: a decode step of one lane in a real arena (the numerics digest has a small one)."""
    global _decodes
    if rows.shape[0] == 1 and view.rows == _LATENT_ROWS and view.values.shape[0] > 20:  # type: ignore[attr-defined]
        _decodes += 1
        if _decodes == _DECODES_BEFORE:
            rows = rows.copy()
            rows.view(np.uint32)[0, 3] ^= 1
    _write_rows(self, rows, view, pages, offsets)  # type: ignore[arg-type]


if __name__ == "__main__":
    NumpyKernels.write_rows = _write_and_flip  # type: ignore[method-assign, assignment]
    sys.exit(engine.main(sys.argv[1:]))
