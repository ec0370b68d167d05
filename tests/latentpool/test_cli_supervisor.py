"""What is said of a group whose processes end: who ended, why, and that its clients hear why before the router is stopped."""

import asyncio
from pathlib import Path

import pytest
from telling_child import __file__ as telling_child

from latentpool.cli import supervisor
from latentpool.cli.log_lines import last_words, readable
from latentpool.cli.supervisor import Child, Group
from latentpool.config import Settings

pytestmark = pytest.mark.timeout(60)

ENTRY = '{"pages": 1, "event": "borrowed pages released", "service": "pool-manager", "level": "info", "timestamp": "2026"}'


@pytest.fixture
async def group(monkeypatch):
    """A group whose children are started by `begin`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(telling_child).parent))
    made = Group(Settings(), lambda name, line: None)
    yield made
    made.kill()
    await made.stop()


async def begin(group, **told):
    """Children by name (_ for a space), each with what it does."""
    for name, arguments in told.items():
        child = Child(name.replace("_", " "), list(arguments), lambda name, line: None, module="telling_child")
        group.children.append(child)
        await child.start()


async def test_the_router_of_a_serving_group_has_time_to_tell_why(group, monkeypatch, tmp_path):
    """The pool manager knows of a frozen engine a moment after a peer of it has given up: the router is not stopped before it
    has heard."""
    monkeypatch.setattr(supervisor, "FAREWELL", 50.0)
    monkeypatch.setattr(supervisor, "_FOLLOW", 0.1)
    why = "rank 0: rank 1 was silent"
    await begin(group, rank_0=("fail", "rank 1 was silent"), router=("fail-when", str(tmp_path / "told"), why))
    group.serving.set()
    failed = asyncio.create_task(group.failed())
    rank, router = group.children
    await rank.process.wait()
    await asyncio.sleep(0.5)
    assert not failed.done(), "the router is stopped before it has told anybody"
    (tmp_path / "told").touch()
    assert str(await failed) == "rank 0: rank 1 was silent"
    assert router.process.returncode == 1


async def test_a_group_that_does_not_serve_yet_waits_for_nobody(group, monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "FAREWELL", 1000.0)
    await begin(group, rank_0=("fail", "no model"), router=("fail-when", str(tmp_path / "never"), ""))
    assert str(await group.failed()) == "rank 0: no model"


async def test_who_ended_first_is_named_first_and_what_is_passed_on_is_said_once(group, monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "_FOLLOW", 50.0)
    told = tmp_path / "told"
    late = str(told)
    await begin(
        group,
        pool_manager=("fail-when", late, "rank 0: its link broke (its link to rank 1)"),
        rank_1=("fail-when", late, "lost the pool manager"),
        rank_0=("fail", "its link broke"),
    )
    failed = asyncio.create_task(group.failed())
    await group.children[2].process.wait()
    await asyncio.wait({group.children[2].reader})
    await asyncio.sleep(0.2)
    told.touch()
    assert str(await failed) == "rank 0: its link broke\nrank 1: lost the pool manager"


async def test_what_a_killed_process_logged_last_is_no_reason(group):
    await begin(group, pool_manager=("log-and-die", ENTRY))
    assert str(await group.failed()) == "pool manager: ended (killed by SIGKILL)"


async def test_other_last_words_of_a_process_are_shown(group):
    await begin(group, rank_0=("log-and-die", "Fatal Python error: Bus error", ENTRY))
    assert str(await group.failed()) == "rank 0: ended (killed by SIGKILL); its last words: Fatal Python error: Bus error"


def test_last_words():
    assert last_words([ENTRY, "latentpool: no", "room", ENTRY]) == ("no\nroom", "room")
    assert last_words(["[1, 2]", ENTRY, ""]) == ("", "[1, 2]")
    assert last_words([]) == ("", "")


def test_log_lines_on_a_terminal_and_elsewhere():
    assert readable("router", ENTRY, terminal=False).plain == ENTRY
    assert readable("pool-manager", ENTRY, terminal=True).plain.endswith("pool-manager borrowed pages released pages=1")
    assert readable("router", "Killed", terminal=True).plain == "      router Killed"
