"""`latentpool plan` against the design's golden table, through the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from latentpool.cli.app import app

REAL = str(Path(__file__).parents[1] / "data" / "glm-5.3-flash")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def nothing_configured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(arguments, **environment):
    return CliRunner().invoke(app, ["plan", "--model", REAL, *arguments.split()], env=environment)


def planned(arguments):
    result = run(arguments + " --json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "stream_pages", "cache_gib"),
    [
        ("--world 2 --room 15.2GiB --context 1M --parallel 8 --fixed 180MiB --split off", 2056, 1.17),
        ("--world 2 --room 15.2GiB --context 1M --parallel 8 --fixed 180MiB --split on", 4104, 0.443),
        ("--world 2 --room 9.5GiB --context 128k --parallel 4 --fixed 180MiB --plan-order stated --split off", 260, 7.35),
        ("--world 2 --room 9.5GiB --context 128k --parallel 4 --fixed 180MiB --split off", 1028, 2.57),
        ("--world 2 --room 9.5GiB --context 128k --parallel 4 --fixed 180MiB --split on", 1028, 5.58),
        ("--world 2 --room 15.2GiB --context 256k --parallel 8 --fixed 180MiB --split off", 2052, 1.19),
        ("--world 3 --room 37.62GiB --context 1M --parallel 8 --fixed 106.7MiB --split off", 4098, 11.38),
        ("--world 3 --room 37.62GiB --context 1M --parallel 8 --fixed 106.7MiB --split on", 9006, 16),
    ],
)
def test_golden_rows(arguments, stream_pages, cache_gib):
    plan = planned(arguments)
    assert plan["stream_pages"] == stream_pages
    assert plan["stream_tokens"] == stream_pages * 512
    assert plan["cache_bytes"] / GIB == pytest.approx(cache_gib, abs=0.006)


def test_owners_are_the_default_from_two_ranks():
    arguments = "--room 37.62GiB --context 1M --parallel 8 --fixed 106.7MiB --world"
    assert planned(f"{arguments} 3") == planned(f"{arguments} 3 --split on")
    assert planned(f"{arguments} 3")["split"] is True
    assert planned(f"{arguments} 3 --kv-pages off --parallel 2")["split"] is False
    assert planned(f"{arguments} 1 --parallel 2")["split"] is False


def test_every_row_on_every_rank_where_only_that_serves_the_context():
    """A page of an owner holds its index part for every rank: 13,824 bytes a token at W = 2 against 13,056."""
    arguments = "--world 2 --room 14.4GiB --context 1M --parallel 8 --fixed 180MiB"
    shown = run(arguments)
    assert shown.exit_code == 0
    assert "note: rows are kept on every rank, because with owners " in " ".join(shown.stdout.split())
    assert planned(arguments)["split"] is False
    assert run(f"{arguments} --split on").exit_code == 1


def test_no_cache_gives_pages_instead():
    plan = planned("--world 2 --room 15.2GiB --context 1M --parallel 8 --fixed 180MiB --split on --cache 0")
    assert plan["owner_pages"] == 2119


def test_a_refusal_has_numbers_and_exit_code_1():
    result = run("--world 2 --room 15.08GiB --context 1M --parallel 8 --kv-pages off --fixed 180MiB")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "--parallel 8 needs 90.48 GiB for its streams at a 1048576-token window" in result.stderr
    assert "the memory budget leaves 2.33 GiB: serve --parallel 1, or lower --context" in result.stderr
    assert "--kv-pages on would serve" in result.stderr


def test_the_table_for_people():
    result = run("--world 2 --room 15.2GiB --context 1M --parallel 8 --fixed 180MiB --split off")
    assert result.exit_code == 0
    for part in ("2,056", "1,052,672", "2,243", "1.17 GiB", "15.20 GiB", "6.38 MiB"):
        assert part in result.stdout


def test_fp8_rows_and_no_drafts_cost_what_the_design_says():
    plan = planned("--world 1 --kv-pages on --room 20GiB --kv-cache fp8")
    assert plan["ledgers"][0]["page_bytes"] == 512 * (12 * (512 + 4) + 768)
    plan = planned("--world 1 --kv-pages on --room 20GiB --no-drafts")
    assert plan["ledgers"][0]["page_bytes"] == 512 * (11 * 1024 + 704)


def test_windows_on_one_rank_and_pages_from_two():
    assert planned("--world 1 --room 20GiB")["paged"] is False
    assert planned("--world 2 --room 20GiB")["paged"] is True


def test_settings_come_from_variables_and_file_too(tmp_path):
    Path("latentpool.toml").write_text('context = "128k"\nroom = "9.5GiB"\nfixed = "180MiB"\nparallel = 1')
    result = run("--json", LATENTPOOL_PARALLEL="4")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["stream_pages"] == 1028


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--world 9 --room 1GiB", "--ranks 9: ranks must be a whole number from 1 to 8"),
        ("--room lots", "--room lots: room must be a size such as"),
        ("", "--room is missing (or LATENTPOOL_ROOM, or room in the TOML file)"),
        ("--room 1GiB --split on --kv-pages off", "--split on --kv-pages off"),
        ("--room 1GiB --split on --ranks 1", "--split on --ranks 1"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments, message):
    result = run(arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_model_that_is_not_there(tmp_path):
    result = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), "--room", "1GiB"])
    assert result.exit_code == 1
    assert "config.json: no such file" in result.stderr
