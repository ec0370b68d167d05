"""A random checkpoint with a tokenizer of one token a byte, for tests that must not depend on what a trained model says."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from tools.make_checkpoint import make_checkpoint, preset_config


@functools.cache
def random_checkpoint() -> Path:
    """Its directory, written once a test process and removed at its end."""
    out = Path(tempfile.mkdtemp(prefix="latentpool-random-"))
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    make_checkpoint(out, preset_config("demo"), 0, "bf16", 1)
    return out
