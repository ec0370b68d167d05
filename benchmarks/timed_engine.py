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
_rows: list[int] = []
"""Decode rows of the attention under way; empty outside."""


def _add(part: str, seconds: float) -> None:
    _times[str(_rows[-1])][part].append(seconds)


def _timed(owner_of: Any, name: str, part: str) -> None:
    """Seconds of a method inside a decode's attention."""
    plain: Callable[..., Any] = getattr(owner_of, name)

    @functools.wraps(plain)
    def timed(*arguments: Any, **named: Any) -> Any:
        if not _rows:
            return plain(*arguments, **named)
        begun = time.perf_counter()
        result = plain(*arguments, **named)
        _add(part, time.perf_counter() - begun)
        return result

    setattr(owner_of, name, timed)


def _attention(kind: Any) -> None:
    """Seconds of a layer's attention as a whole."""
    plain: Callable[..., None] = kind.attend

    def attend(self: Any, p: Any, *arguments: Any) -> None:
        if p.batch.path is not Path.DECODE:
            plain(self, p, *arguments)
            return
        _rows.append(p.batch.total)
        begun = time.perf_counter()
        plain(self, p, *arguments)
        _add("whole", time.perf_counter() - begun)
        _rows.pop()

    kind.attend = attend


def _exchange() -> None:
    """Seconds inside the link, by what travels."""
    plain = link.Channel.exchange

    def exchange(self: Any, *arguments: Any) -> Any:
        if not _rows:
            return plain(self, *arguments)
        begun = time.perf_counter()
        slot = plain(self, *arguments)
        _add(f"{self._kind} exchanged", time.perf_counter() - begun)
        return slot

    channel: Any = link.Channel
    channel.exchange = exchange


def main(arguments: list[str]) -> int:
    """The child process, as engine.main: SETTINGS_JSON FD."""
    _attention(owner.OwnerRows)
    _attention(rows.HereRows)
    _exchange()
    _timed(owner.OwnerRows, "_routes", "routes")
    _timed(owner.OwnerRows, "_gather_queries", "queries")
    _timed(owner.OwnerRows, "_attend_mine", "attend")
    _timed(owner.OwnerRows, "_return_outputs", "outputs")
    code = engine.main(arguments)
    settings = msgspec.json.decode(arguments[0], type=EngineSettings)
    medians = {rows: {part: statistics.median(of) for part, of in parts.items()} for rows, parts in _times.items()}
    File(os.environ["SPLIT_TIMES"], f"{settings.world}-{settings.rank}.json").write_text(json.dumps(medians))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
