"""What a manager refuses before any worker comes, and what its state file keeps."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from manager_fakes import MakePlace

from latentpool.errors import ConfigError
from services.pool_manager.service import PoolManager, PoolManagerSettings
from services.pool_manager.state import State


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"split": "on", "world": 1}, "--split on --ranks 1: one rank keeps every row anyway: use --ranks 2 or more"),
        ({"split": "on", "kv_pages": "off"}, "--split on --kv-pages off"),
        ({"parallel": 0}, "--parallel 0: at least 1"),
        ({"world": 9}, "--ranks 9: a group has 1 to 8"),
        ({"bind": "0.0.0.0:0"}, "0.0.0.0:0, which is not loopback: set --secret-file"),
    ],
)
async def test_settings_that_are_not_served(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        await PoolManager(PoolManagerSettings(**({"world": 2, "context": None} | changes))).start()


async def test_a_taken_port(place: MakePlace, tmp_path: Path) -> None:
    here = await place()
    other = PoolManagerSettings(world=2, context=None, bind=here.manager.address, state_dir=tmp_path)
    with pytest.raises(ConfigError, match=f"the pool manager cannot listen on {here.manager.address}: the address is taken"):
        await PoolManager(other).start()
    State(tmp_path).close()  # the lock is not left behind


async def test_a_second_manager_on_one_state_directory(place: MakePlace, tmp_path: Path) -> None:
    await place(state_dir=tmp_path)
    with pytest.raises(ConfigError) as refused:
        await PoolManager(PoolManagerSettings(world=2, context=None, state_dir=tmp_path)).start()
    assert str(refused.value) == (
        f"--state-dir {tmp_path} belongs to another pool manager (process {os.getpid()}): stop it, or choose another directory"
    )


async def test_terms_and_epochs_go_on_after_a_restart(place: MakePlace, tmp_path: Path) -> None:
    for start in (1, 2):
        here = await place(state_dir=tmp_path)
        await here.ready()
        for term in (2 * start - 1, 2 * start):
            router = await here.router()
            await router.open()
            granted = (await router.get()).granted
            assert (granted.term, granted.epoch) == (term, start)
            await router.leave()
            assert await router.get() is None
        await here.manager.stop()


def test_state_is_on_disk_before_it_is_given(tmp_path: Path) -> None:
    state = State(tmp_path)
    assert (state.next_epoch(), state.next_term(), state.next_term()) == (1, 1, 2)
    assert state._lock is not None  # a crash: the lock goes, and nothing more is written
    fcntl.flock(state._lock, fcntl.LOCK_UN)
    again = State(tmp_path)
    assert (again.next_epoch(), again.next_term()) == (2, 3)
    again.close()
    state.close()


def test_epochs_keep_to_the_16_bits_of_a_tag(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"term": 5, "epoch": 65535}')
    state = State(tmp_path)
    assert state.next_epoch() == 1
    state.close()


@pytest.mark.parametrize("text", ["", "[]", '{"term": 1}', '{"term": "x", "epoch": 1}', "{"])
def test_a_damaged_state_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"state\.json is damaged: it should hold a term and an epoch"):
        State(tmp_path)
    (tmp_path / "state.json").unlink()
    State(tmp_path).close()


def test_a_state_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--state-dir .*file"):
        State(tmp_path / "file" / "state")
