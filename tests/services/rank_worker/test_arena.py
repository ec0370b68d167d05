"""The arena's bytes against the arithmetic of the plan, with the release's real geometry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernels.numpy import NumpyKernels
from latentpool.geometry import Geometry
from services.pool_manager.plan import lane_fixed, plan
from services.rank_worker.arena import Arena

GEOMETRY = Geometry.from_config(json.loads((Path(__file__).parents[2] / "data" / "glm-5.3-flash" / "config.json").read_text()))
CONTEXT, LANES, ROOM = 32_768, 4, 2 << 30


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("split", [True, False])
def test_a_rank_allocates_what_its_ledger_says(world: int, split: bool) -> None:
    """k * 512 * (latent + W index) bytes a rank, of 11 * 1,024 + 1,024 latent and 12 * 128 * 2 / 4 index bytes a token."""
    fixed = [lane_fixed(GEOMETRY, world, rank, "bf16", "bf16", "pages", CONTEXT, 512) for rank in range(world)]
    made = plan([ROOM] * world, CONTEXT, LANES, 1 << 30, GEOMETRY, world, "pages", split, fixed, "bf16")
    owned = made.pages // (world if split else 1)
    for rank in (0, world - 1):
        arena = Arena(
            GEOMETRY, NumpyKernels("bf16"), "bf16", world=world, rank=rank, pages=made.pages, lanes=LANES, context=CONTEXT,
            page_rows=512, split=split,
        )  # fmt: skip
        assert arena.pages_bytes == owned * 512 * (12_288 + (world if split else 1) * 768)
        assert arena.local_pages == owned
        ledger = made.ledgers[rank]
        whole = ledger.stream_bytes + ledger.cache_bytes
        assert whole - ledger.page_bytes < arena.pages_bytes <= whole or len(set(fixed)) > 1  # the minimum over ranks
        spare = arena.nbytes - arena.pages_bytes
        assert spare < 2 * 512 * 13_056 + LANES * fixed[rank] + (1 << 20)


def test_a_split_arena_holds_nearly_w_times_the_rows() -> None:
    """In equal bytes: 13,056 bytes a row where every rank keeps all, 768 + 12,288 / W where one does."""
    for world, factor in ((2, 13_056 / 6_912), (3, 13_056 / 4_864), (4, 13_056 / 3_840)):
        fixed = [lane_fixed(GEOMETRY, world, rank, "bf16", "bf16", "pages", CONTEXT, 512) for rank in range(world)]
        rows = [
            plan([ROOM] * world, CONTEXT, 1, 0, GEOMETRY, world, "pages", split, fixed, "bf16").stream_tokens
            for split in (False, True)
        ]
        assert rows[1] / rows[0] == pytest.approx(factor, rel=0.02)
