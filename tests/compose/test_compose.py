"""What compose/ ships agrees with the command line: every variable and flag is a setting, and its value is allowed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from latentpool import config

COMPOSE = Path(__file__).parents[2] / "compose"
ENV_FILES = sorted((COMPOSE / "env").glob("*.env"))


@pytest.mark.parametrize("path", ENV_FILES, ids=lambda path: path.name)
def test_environment_files_are_accepted(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    environment = dict(line.split("=", 1) for line in lines)
    assert config.load({}, environment).ranks == 2


@pytest.mark.parametrize("path", [*COMPOSE.glob("*.yml"), *COMPOSE.glob("systemd/*.service")], ids=lambda path: path.name)
def test_variables_and_flags_are_settings(path):
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    assert {name.removeprefix("LATENTPOOL_").lower() for name in re.findall(r"LATENTPOOL_\w+", text)} <= config.TABLE.keys()
    for command in re.findall(r"^\s*(?:command:|ExecStart=\S+)\s+(.*)$", text, re.MULTILINE):
        service, *rest = command.split()
        assert service in ("router", "pool-manager", "rank-worker")
        assert {word[2:].replace("-", "_") for word in rest if word.startswith("--")} <= config.TABLE.keys()


@pytest.mark.parametrize("path", ENV_FILES, ids=lambda path: path.name)
def test_no_two_services_of_a_node_listen_at_one_port(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    settings = config.load({}, {"LATENTPOOL_RANK": "0"} | dict(line.split("=", 1) for line in lines))
    addresses = [settings.router_bind, settings.manager_bind, settings.worker_address(settings.rank)]
    addresses += [settings.metrics_address(service) for service in ("router", "pool-manager", "rank-worker")]
    assert len({address.rpartition(":")[2] for address in addresses}) == 6
