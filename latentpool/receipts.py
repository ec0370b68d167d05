"""The receipt of a reply: what was said, as one hash (design sections 10 and 12)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

VERSION = 1


def receipt(prompt: Sequence[int] | npt.NDArray[np.uint32], generated: Sequence[int]) -> str:
    """SHA-256, in hex, of: version (one byte), prompt length (u32), all token ids (u32), little-endian. The token that
    stopped the reply is one of the generated ids, although it is not part of the text."""
    digest = hashlib.sha256(bytes([VERSION]))
    digest.update(len(prompt).to_bytes(4, "little"))
    digest.update(np.asarray(prompt, dtype="<u4").tobytes())
    digest.update(np.asarray(generated, dtype="<u4").tobytes())
    return digest.hexdigest()
