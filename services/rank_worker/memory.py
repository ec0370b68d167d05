"""What is left on a rank for conversations: `room` of the plan (design section 4)."""

from __future__ import annotations

import os
from pathlib import Path

from latentpool.errors import ConfigError
from latentpool.units import format_bytes


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


def host_bytes() -> int:
    """Memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_budget(budget: int) -> None:
    """Raises ConfigError if this host has not so much."""
    if budget > host_bytes():
        raise ConfigError(f"--memory {format_bytes(budget)} is more than this host has: {format_bytes(host_bytes())}")


def room(budget: int, resident: int, work: int, first_lane: int, spare_pages: int) -> int:
    """Bytes of `budget` left after what is resident, work and link buffers, the first lane's fixed part, and the null and
    discard pages. Raises ConfigError with the numbers if nothing is left, or the host has not so much."""
    check_budget(budget)
    left = budget - resident - work - first_lane - spare_pages
    if left <= 0:
        raise ConfigError(
            f"--memory {format_bytes(budget)} is too little: {format_bytes(resident)} resident after loading, "
            f"{format_bytes(work)} work and link buffers, {format_bytes(first_lane)} for the first lane, "
            f"{format_bytes(spare_pages)} for two spare pages"
        )
    return left
