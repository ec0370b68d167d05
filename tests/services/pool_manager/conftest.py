"""The manager under test, made to a test's settings and stopped after it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from manager_fakes import MakePlace, Place

from services.pool_manager.service import PoolManager, PoolManagerSettings


@pytest.fixture
async def place() -> AsyncIterator[MakePlace]:
    """Makes started managers (settings as keywords; two ranks, 128k tokens, no owners by default); proves the books and stops
    them."""
    async with AsyncExitStack() as stack:

        async def make(**changes: Any) -> Place:
            manager = PoolManager(PoolManagerSettings(**({"world": 2, "context": 128 * 1024, "split": "off"} | changes)))
            await manager.start()
            stack.push_async_callback(manager.stop)
            stack.callback(lambda: _whole(manager))
            return Place(manager, await stack.enter_async_context(AsyncExitStack()))

        yield make


def _whole(manager: PoolManager) -> None:
    if manager.leases is not None:
        assert manager.leases.check_integrity() == []
