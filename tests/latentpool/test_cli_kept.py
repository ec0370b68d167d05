"""latentpool kept: what is listed, and what is evicted."""

import json

import grpc
import pytest
from fake_admin import run, serving

from latentpool.v1 import pool_admin_pb2 as pb
from latentpool.v1 import pool_manager_pb2

pytestmark = pytest.mark.timeout(60)

COUNTS = pb.KeptCounts(
    hits=12,
    hit_tokens=34_560,
    carried_hits=2,
    misses_unknown=3,
    misses_room=1,
    misses_short=4,
    kept=20,
    refused=5,
    evicted_for_pages=6,
    evicted_for_budget=7,
    evicted_by_hand=8,
)


@pytest.fixture
def manager(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving() as (service, address):
        monkeypatch.setenv("LATENTPOOL_MANAGER", address)
        yield service


WHY = "its lanes are windows (--kv-pages off, or auto on one rank); --kv-pages on keeps prompts"


def listed(*kept, **fields):
    return pb.ListKeptResponse(kept=kept, **({"bytes": 3 << 29, "budget_bytes": 16 << 30, "counts": COUNTS} | fields))


def test_a_state_a_line_then_what_they_were_good_for(manager):
    manager.replies["kept"] = listed(
        pb.KeptInfo(
            state=7, at=8_960, mark=pool_manager_pb2.MARK_REPLY, owner=1, row_pages=18, fixed_pages=46, bytes=408 << 20,
            age_seconds=700, idle_seconds=37.2, hits=3, pinned=True, request_id="essay",
        ),
        pb.KeptInfo(state=5, at=4_096, mark=pool_manager_pb2.MARK_HISTORY, age_seconds=5.04, idle_seconds=1.26, extended=True),
    )  # fmt: skip
    shown = run("kept")
    assert shown.exit_code == 0
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines() if line.strip()]
    assert lines[0] == "state tokens mark owner pages a rank size a rank last use age hits request"
    assert "7 8,960 reply rank 1 18 + 46 408.00 MiB 37 s ago 12 min 3 in use essay" in lines
    assert "5 4,096 history every rank 0 + 0 0 B 1.3 s ago 5.0 s 0 extended" in lines
    assert lines[-3:] == [
        "2 kept prompts: 1.50 GiB of 16.00 GiB a rank",
        "lookups: 12 of 20 hit (34,560 tokens; 2 carried); missed: 3 unknown, 1 without room, 4 too short to carry",
        "kept 20, refused 5; evicted: 6 for pages, 7 for the budget, 8 by hand",
    ]
    told = json.loads(run("kept", "--json").stdout)
    assert (told["kept"][0]["mark"], told["kept"][1]["extended"], told["counts"]["refused"]) == ("MARK_REPLY", True, "5")


def test_an_empty_list_and_a_group_that_keeps_nothing(manager):
    manager.replies["kept"] = listed(bytes=0, counts=pb.KeptCounts(), keep_from=4096)
    short = "prompts of fewer tokens than --keep-from 4096 are not kept"
    assert run("kept").stdout.startswith(f"0 kept prompts: 0 B of 16.00 GiB a rank; {short}\n")
    assert "last refused" not in run("kept").stdout
    manager.replies["kept"] = listed(last_refusal="64 tokens are fewer than --keep-from 128")
    assert run("kept").stdout.endswith("by hand\nlast refused: 64 tokens are fewer than --keep-from 128\n")
    manager.replies["kept"] = pb.ListKeptResponse(nothing_kept=WHY)
    assert run("kept").stdout == f"nothing is kept: {WHY}\n"


def test_evicting_says_what_went(manager):
    manager.replies["evict"] = pb.EvictResponse(evicted=[7, 9])
    shown = run("kept", "--evict", "7", "--evict", "9")
    assert (shown.exit_code, shown.stdout) == (0, "evicted 2 kept prompts: 7, 9\n")
    assert list(manager.asked.states) == [7, 9]
    assert run("kept", "--evict-all").exit_code == 0
    assert list(manager.asked.states) == []
    assert json.loads(run("kept", "--evict-all", "--json").stdout) == {"evicted": [7, 9]}
    manager.replies["evict"] = pb.EvictResponse()
    assert run("kept", "--evict-all").stdout == "nothing was evicted\n"


def test_what_did_not_go_is_named(manager):
    manager.replies["evict"] = pb.EvictResponse(evicted=[9])
    shown = run("kept", "--evict", "7", "--evict", "9", "--evict", "8")
    assert (shown.exit_code, shown.stdout) == (1, "evicted 1 kept prompt: 9\n")
    assert shown.stderr == "latentpool: not evicted, since in use or no longer kept: 7, 8; see latentpool kept\n"
    manager.replies["evict"] = (grpc.StatusCode.NOT_FOUND, "no state 7 is kept")
    shown = run("kept", "--evict", "7")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (1, "", "latentpool: no state 7 is kept\n")


@pytest.mark.parametrize("arguments", [("--evict",), ("--evict", "0"), ("--evict", "x"), ("--evict", "7", "--evict-all")])
def test_evicting_what_is_no_state_is_wrong_usage(manager, arguments):
    assert run("kept", *arguments).exit_code == 2
    assert manager.asked is None
