"""What is left on a rank for conversations: `room` of the plan (design section 4)."""

from __future__ import annotations

import os
from pathlib import Path

from latentpool.errors import ConfigError

_GIB = 1 << 30


def resident_bytes() -> int:
    """Bytes this process keeps in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def default_budget() -> int:
    """Half of what this host could give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // 2
    raise ConfigError("/proc/meminfo has no MemAvailable: set --memory")


def room(budget: int, resident: int, work: int, first_lane: int, spare_pages: int) -> int:
    """Bytes of `budget` left after what is resident, work and link buffers, the first lane's fixed part, and the null and
    discard pages. Raises ConfigError with the numbers if nothing is left."""
    left = budget - resident - work - first_lane - spare_pages
    if left <= 0:
        raise ConfigError(
            f"--memory {budget / _GIB:.2f} GiB is too little: {resident / _GIB:.2f} GiB resident after loading, "
            f"{work / _GIB:.2f} GiB work and link buffers, {first_lane / _GIB:.2f} GiB for the first lane, "
            f"{spare_pages / _GIB:.2f} GiB for two spare pages"
        )
    return left
