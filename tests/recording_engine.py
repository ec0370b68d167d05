"""An engine that writes down every logits row that a token is drawn from. Run in the engine's place; the directory is named by
RECORD_DIRECTORY."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from services.rank_worker import engine
from services.rank_worker.engine import EngineSettings, serve  # what a front looks for
from services.rank_worker.sample import Draws, Sampler

__all__ = ["RECORD_DIRECTORY", "EngineSettings", "read", "serve"]

RECORD_DIRECTORY = "RECORD_DIRECTORY"

Rows = dict[tuple[int, int, int], bytes]


def read(directory: Path) -> Rows:
    """Logits rows by (rank, seed, position). A row that was drawn from again must be equal to itself."""
    rows: Rows = {}
    for path in directory.iterdir():
        data = path.read_bytes()
        at = 0
        while at < len(data):
            rank, seed, position, size = np.frombuffer(data, np.uint64, 4, at).tolist()
            at += 32
            key, bits = (rank, seed, position), data[at : at + size]
            assert rows.setdefault(key, bits) == bits, f"another row when computed again: {key}"
            at += size
    return rows


def _record(directory: Path) -> None:
    sample = Sampler.sample
    out = (directory / str(os.getpid())).open("ab", buffering=0)

    def recorded(sampler: Sampler, logits: Any, draws: Draws) -> Any:
        link = sampler._link
        if link.world > 1:  # the numerics digest draws alone
            for row, seed, position in zip(np.array(logits), draws.seed, draws.position, strict=True):
                head = np.array([link.rank, seed, position, row.nbytes], np.uint64)
                out.write(head.tobytes() + row.tobytes())
        return sample(sampler, logits, draws)

    Sampler.sample = recorded  # type: ignore[method-assign]


if __name__ == "__main__":
    _record(Path(os.environ[RECORD_DIRECTORY]))
    sys.exit(engine.main(sys.argv[1:]))
