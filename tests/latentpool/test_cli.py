"""What holds for every command: help by example, errors in a line, exit codes."""

import socket

import pytest
from typer.testing import CliRunner

from latentpool.cli import services
from latentpool.cli.app import app
from latentpool.cli.talk import read_prompt
from latentpool.errors import ConfigError

RUN = ("demo", "up", "router", "pool-manager", "rank-worker")
LOOK = ("plan", "pages", "conversations", "carry", "kept", "top", "ranks")
COMMANDS = (*RUN, "generate", "chat", "score", *LOOK, "bench", "verify")


@pytest.fixture(autouse=True)
def nothing_configured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments, **environment):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", **environment})


def test_help_names_every_command():
    shown = run("--help")
    assert shown.exit_code == 0
    for command in COMMANDS:
        assert command in shown.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_by_example(command):
    shown = run(command, "--help")
    assert shown.exit_code == 0
    assert f"latentpool {command}" in shown.stdout.split("Usage:")[1].split("\n", 1)[1]
    assert "--config" in shown.stdout


@pytest.mark.parametrize("command", [*LOOK, "verify", "generate", "score"])
def test_what_lists_can_print_json(command):
    assert "--json" in run(command, "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "who", "flag"),
    [
        (("pages", "--manager", "127.0.0.1:1"), "pool manager", "--manager"),
        (("ranks", "--manager", "127.0.0.1:1"), "pool manager", "--manager"),
        (("conversations", "--manager", "127.0.0.1:1"), "pool manager", "--manager"),
        (("carry", "7", "--manager", "127.0.0.1:1"), "pool manager", "--manager"),
        (("kept", "--manager", "127.0.0.1:1"), "pool manager", "--manager"),
        (("kept", "--evict-all", "--manager", "127.0.0.1:1"), "pool manager", "--manager"),
        (("top", "--manager", "127.0.0.1:1"), "pool manager", "--manager"),
        (("top", "--json", "--manager", "127.0.0.1:1"), "pool manager", "--manager"),
        (("pages", "--watch", "--manager", "127.0.0.1:1"), "pool manager", "--manager"),
        (("generate", "hello", "--address", "127.0.0.1:1"), "router", "--address"),
        (("chat", "--address", "127.0.0.1:1"), "router", "--address"),
        (("score", "hello", "--address", "127.0.0.1:1"), "router", "--address"),
    ],
)
def test_where_nothing_listens(arguments, who, flag):
    result = run(*arguments)
    assert result.exit_code == 1
    advice = f"start a group with latentpool up, or name another address with {flag}"
    assert result.stderr == f"latentpool: no {who} answers at 127.0.0.1:1: {advice}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate",), "give one prompt"),
        (("generate", "a", "--token-ids", "1"), "give one prompt"),
        (("generate", "--token-ids", "one"), "--token-ids one: must be token ids such as 1 2 3"),
        (("generate", "a", "--temperature", "-1"), "--temperature -1: temperature must be a number from 0 to 100"),
        (("rank-worker", "--model", "."), "--rank is missing (or LATENTPOOL_RANK, or rank in the TOML file)"),
        (("up",), "--model is missing (or LATENTPOOL_MODEL, or model in the TOML file)"),
        (("rank-worker", "--model", ".", "--rank", "0", "--kv-cache", "fp8"), "--kv-cache fp8 is not served yet"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("latentpool: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_variable_that_nobody_knows_stops_every_command():
    result = run("pages", LATENTPOOL_MANGER="127.0.0.1:1")
    assert result.exit_code == 2
    assert "do you mean LATENTPOOL_MANAGER?" in result.stderr


def test_prompts(tmp_path):
    path = tmp_path / "prompt"
    path.write_bytes("Größe".encode())
    assert read_prompt(None, path, None) == "Größe"
    assert read_prompt(None, None, "1, 2 3") == [1, 2, 3]
    assert read_prompt("", None, None) == ""
    path.write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 2 is 0xff\)"):
        read_prompt(None, path, None)
    with pytest.raises(ConfigError, match="No such file"):
        read_prompt(None, tmp_path / "absent", None)


@pytest.mark.parametrize(
    ("arguments", "who"),
    [
        (("pool-manager", "--state-dir", "state", "--manager-bind"), "the pool manager"),
        (("router", "--router-bind"), "router"),
    ],
)
def test_a_service_whose_port_is_taken_says_so(arguments, who):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run(*arguments, address)
    assert result.exit_code == 2
    said = [line for line in result.stderr.splitlines() if line.startswith("latentpool: ")]
    assert len(said) == 1
    assert f"{who} cannot listen on {address}: the address is taken" in said[0]


def test_beyond_loopback_a_secret_is_needed():
    result = run("pool-manager", "--state-dir", "state", "--manager-bind", "0.0.0.0:0")
    assert result.exit_code == 2
    assert "set --secret-file" in result.stderr


def told(monkeypatch, *command):
    """The settings of the service that a command would run."""
    made = []
    monkeypatch.setattr(services, "_run", lambda service, *_: made.append(service))
    assert run(*command).exit_code == 0
    return made[0].settings if command[0] == "router" else made[0]._settings


ROUTER, MANAGER, WORKER = ("router",), ("pool-manager",), ("rank-worker", "--model", "DIR", "--rank", "0")


@pytest.mark.parametrize("command", [ROUTER, MANAGER, WORKER])
def test_every_service_takes_dead_after(command, monkeypatch):
    assert told(monkeypatch, *command, "--dead-after", "7").dead_after == 7


def test_settings_of_the_split_reach_the_services(monkeypatch):
    assert told(monkeypatch, *MANAGER).borrow is True
    assert told(monkeypatch, *MANAGER, "--no-borrow").borrow is False
    worker = told(monkeypatch, *WORKER)
    assert (worker.audit, worker.staging_rows) == (False, 32768)
    worker = told(monkeypatch, *WORKER, "--audit", "--staging-rows", "640")
    assert (worker.audit, worker.staging_rows) == (True, 640)


def test_settings_of_kept_prompts_reach_the_services(monkeypatch):
    manager = told(monkeypatch, *MANAGER)
    assert (manager.cache_bytes, manager.keep_from, manager.carry_from) == (16 << 30, 4096, 2048)
    manager = told(monkeypatch, *MANAGER, "--cache", "0", "--keep-from", "1k", "--carry-from", "64")
    assert (manager.cache_bytes, manager.keep_from, manager.carry_from) == (0, 1024, 64)
    assert told(monkeypatch, *ROUTER).keep_replies is True
    assert told(monkeypatch, *ROUTER, "--no-keep-replies").keep_replies is False


def test_up_takes_the_settings_of_kept_prompts():
    shown = run("up", "--help").stdout
    assert all(flag in shown for flag in ("--cache", "--keep-from", "--carry-from", "--no-keep-replies"))


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("up", ("--no-borrow", "--audit", "--staging-rows", "--split", "--metrics-bind")),
        ("pool-manager", ("--no-borrow", "--split", "--metrics-bind")),
        ("rank-worker", ("--audit", "--staging-rows", "--metrics-bind")),
        ("router", ("--metrics-bind",)),
        ("verify", ("--no-borrow", "--audit", "--staging-rows", "--split")),
        ("bench", ("--no-borrow", "--audit", "--staging-rows", "--split")),
    ],
)
def test_who_takes_the_settings_of_the_split(command, flags):
    shown = run(command, "--help").stdout
    assert all(flag in shown for flag in flags)


@pytest.mark.parametrize(
    ("command", "address"),
    [(ROUTER, "127.0.0.1:7430"), (MANAGER, "127.0.0.1:7431"), ((*WORKER[:-1], "1"), "127.0.0.1:7441")],
)
def test_where_each_service_is_read(command, address, monkeypatch):
    addresses = []
    monkeypatch.setattr(services, "_run", lambda _service, address: addresses.append(address))
    assert run(*command).exit_code == 0
    assert run(*command, "--metrics-bind", "127.0.0.1:7430").exit_code == 0
    assert addresses == [None, address]


def test_metrics_at_an_address_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run("router", "--router-bind", "127.0.0.1:0", "--metrics-bind", address)
    assert result.exit_code == 2
    assert f"latentpool: metrics cannot be served at {address}: address already in use" in result.stderr
