"""What a group refuses before anything of it is started: what the model's config.json and the settings decide alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentpool.geometry import Geometry

if TYPE_CHECKING:  # every command would load them
    from services.pool_manager.service import PoolManagerSettings
    from services.rank_worker.front import RankWorkerSettings


def check_group(geometry: Geometry, manager: PoolManagerSettings, worker: RankWorkerSettings) -> None:
    """Raises SetupError in the words of the service that would refuse it later."""
    from services.pool_manager.plan import check_context, decide
    from services.rank_worker.limits import check_rows
    from services.rank_worker.memory import check_budget

    geometry.check_world(manager.world)
    decide(manager.kv_pages, manager.split, manager.world)
    if manager.context is not None:
        check_context(manager.context, geometry)
    check_rows(geometry, manager.world, worker.page_rows, worker.chunk_rows, worker.staging_rows)
    if worker.memory_bytes is not None:
        check_budget(worker.memory_bytes)
