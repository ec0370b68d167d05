"""What a rank worker refuses before it reads a tensor."""

from __future__ import annotations

from latentpool.errors import ConfigError
from latentpool.geometry import BLOCK, Geometry
from services.rank_worker.split.fetch import least_staging_rows


def check_rows(geometry: Geometry, world: int, page_rows: int, chunk_rows: int, staging_rows: int) -> None:
    """Raises ConfigError for a number of rows that no rank of so many could work with."""
    if page_rows not in (64, 128, 256, 512):
        raise ConfigError(f"--page-rows {page_rows}: 64, 128, 256 or 512")
    if chunk_rows < BLOCK or chunk_rows % BLOCK:
        raise ConfigError(f"--chunk-rows {chunk_rows}: a multiple of {BLOCK} is needed")
    least = least_staging_rows(geometry)
    if world > 1 and staging_rows < least:
        raise ConfigError(f"--staging-rows {staging_rows}: the longest selections of this model need {least}")
