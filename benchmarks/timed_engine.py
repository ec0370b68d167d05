"""An engine that measures the parts of a decode round's attention, for benchmarks/split.py. It computes as the product's does.

When it ends it writes SPLIT_TIMES/world-rank.json: median seconds by number of decode rows and part of a layer's attention.
The clock is read up to a dozen times a layer: whole rounds are measured with the product's own engine.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path as File
from typing import Any

import msgspec

from kernels.api import Path
from services.rank_worker import engine, link
from services.rank_worker.engine import EngineSettings, serve
from services.rank_worker.split import owner, rows

__all__ = ["EngineSettings", "main", "serve"]

_times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
_layer: dict[str, float] = {}
"""Seconds by part of the layer's attention under way, which begins with its queries."""


def _timed(kind: Any, name: str, part: str) -> None:
    """Has the seconds of a method written down as those of a part."""
    plain: Callable[..., Any] = getattr(kind, name)

    @functools.wraps(plain)
    def timed(self: Any, *arguments: Any) -> Any:
        begun = time.perf_counter()
        result = plain(self, *arguments)
        _layer[part] = time.perf_counter() - begun
        return result

    setattr(kind, name, timed)


def _layers(kind: Any) -> None:
    """Begins a layer where its queries are sent, and ends it behind its attention."""
    _timed(kind, "send_queries", "send queries")
    _timed(kind, "attend", "behind the selection")
    send, attend = kind.send_queries, kind.attend

    def begin(self: Any, *arguments: Any) -> None:
        _layer.clear()
        send(self, *arguments)

    def end(self: Any, p: Any, *arguments: Any) -> None:
        attend(self, p, *arguments)
        if p.batch.path is not Path.DECODE:
            return
        times = _times[str(p.batch.total)]
        times["whole"].append(_layer["send queries"] + _layer["behind the selection"])
        for part, seconds in _layer.items():
            times[part].append(seconds)

    kind.send_queries, kind.attend = begin, end


def main(arguments: list[str]) -> int:
    """The child process, as engine.main: SETTINGS_JSON FD."""
    _layers(owner.OwnerRows)
    _layers(rows.HereRows)
    _timed(owner.OwnerRows, "_take_queries", "take queries")
    _timed(owner.OwnerRows, "_attend_mine", "attend")
    _timed(owner.OwnerRows, "_return_outputs", "return outputs")
    _timed(link.Channel, "exchange", "outputs exchanged")
    code = engine.main(arguments)
    settings = msgspec.json.decode(arguments[0], type=EngineSettings)
    medians = {rows: {part: statistics.median(of) for part, of in parts.items()} for rows, parts in _times.items()}
    File(os.environ["SPLIT_TIMES"], f"{settings.world}-{settings.rank}.json").write_text(json.dumps(medians))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
