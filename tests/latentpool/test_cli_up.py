"""`latentpool up` and `demo` as real processes: what they show, and that nothing of them is left, whenever they are stopped."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from random_checkpoint import random_checkpoint
from typer.testing import CliRunner

from latentpool.cli import supervisor
from latentpool.cli.app import app
from latentpool.cli.supervisor import _with_ports
from latentpool.config import Settings
from latentpool.errors import ConfigError

RANDOM = random_checkpoint()
ADDRESSES = ["--router-bind", "127.0.0.1:0", "--manager-bind", "127.0.0.1:0", "--worker-bind", "127.0.0.1:0"]

FREE = Settings(router_bind="127.0.0.1:0", manager_bind="127.0.0.1:0", worker_bind="127.0.0.1:0")


def start(directory, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LATENTPOOL_")}
    return subprocess.Popen(
        [sys.executable, "-m", "latentpool.cli", *arguments],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=(directory / "stderr").open("wb"),
        text=True,
    )


def start_up(directory, *arguments):
    return start(directory, "up", "--model", str(RANDOM), "--page-rows", "64", "--memory", "512MiB", "--context", "1k",
                 "--state-dir", str(directory / "state"), *ADDRESSES, *arguments)  # fmt: skip


def said(directory):
    return (directory / "stderr").read_text()


def wait_for(condition, process, seconds=90):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "what was waited for did not happen"
        assert process.poll() is None, "the process ended"
        time.sleep(0.05)


def family(process):
    """The process, its children and theirs."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def link_segments():
    """Shared memory segments of the data plane, by the id of the process that made them where the name tells."""
    return {path.name for path in Path("/dev/shm").iterdir() if "ucx" in path.name}


def assert_gone(members):
    _, alive = psutil.wait_procs([member for member in members if member.is_running()], timeout=15)
    assert [member.pid for member in alive if member.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture
def stopping():
    """Ends what a failed test has left."""
    processes = []
    yield processes.append
    for process in processes:
        if process.poll() is None:
            members = family(process)
            process.kill()
            process.wait()
            for member in members[1:]:
                if member.is_running():
                    member.kill()


MOMENTS = {
    "while the parent starts": lambda process, directory: None,
    "while the pool manager starts": lambda process, directory: wait_for(lambda: len(family(process)) >= 2, process),
    "while engines start": lambda process, directory: wait_for(lambda: len(family(process)) >= 6, process),
    "while it serves": lambda process, directory: wait_for(lambda: "Ctrl-C stops the group" in said(directory), process),
}


SAMPLE = "while it serves"


@pytest.mark.parametrize(
    "moment", [moment if moment == SAMPLE else pytest.param(moment, marks=pytest.mark.full) for moment in MOMENTS]
)
def test_ctrl_c_leaves_nothing(moment, tmp_path, stopping):
    segments = link_segments()
    process = start_up(tmp_path)
    stopping(process)
    MOMENTS[moment](process, tmp_path)
    members = family(process)
    process.send_signal(signal.SIGINT)
    # A parent that has not come to its own handlers yet ends as Python does.
    codes = {"while it serves": (0,), "while the parent starts": (130, -signal.SIGINT)}
    assert process.wait(timeout=40) in codes.get(moment, (130,))
    assert_gone(members)
    assert "Traceback" not in said(tmp_path)
    if moment == SAMPLE:
        assert link_segments() <= segments


@pytest.mark.full
def test_a_parent_that_is_killed_takes_its_children_along(tmp_path, stopping):
    process = start_up(tmp_path)
    stopping(process)
    MOMENTS["while it serves"](process, tmp_path)
    members = family(process)
    assert len(members) == 7  # parent, manager, router, two fronts, two engines
    process.kill()
    process.wait()
    assert_gone(members)


@pytest.mark.full
def test_a_child_that_dies_is_named(tmp_path, stopping):
    process = start_up(tmp_path)
    stopping(process)
    MOMENTS["while it serves"](process, tmp_path)
    members = family(process)
    router = next(member for member in members if "router" in member.cmdline())
    router.kill()
    assert process.wait(timeout=40) == 1
    assert "latentpool: router: ended (killed by SIGKILL)" in said(tmp_path)
    assert_gone(members)


@pytest.mark.full
def test_clients_hear_why_a_group_ends_whose_engine_is_frozen(tmp_path, stopping):
    process = start_up(tmp_path, "--dead-after", "3")
    stopping(process)
    MOMENTS["while it serves"](process, tmp_path)
    words = said(tmp_path).split()
    (tmp_path / "client").mkdir()
    client = start(tmp_path / "client", "generate", "Once", "--max-tokens", "1000", "--ignore-eos", "--address",
                   words[words.index("--address") + 1])  # fmt: skip
    stopping(client)
    wait_for(lambda: "conversation admitted" in said(tmp_path), process)
    commands = {member: " ".join(member.cmdline()) for member in family(process)}
    (engine,) = (one for one, told in commands.items() if "rank_worker.engine " in told and '"rank":1' in told)
    engine.suspend()
    assert client.wait(timeout=60) == 1
    assert process.wait(timeout=60) == 1
    for heard in (said(tmp_path / "client"), said(tmp_path)):
        assert re.search("rank 1 was silent on channel .* for 3 s", heard)
        assert "is stopping" not in heard


def test_a_port_that_is_taken_is_named_before_anything_starts(tmp_path, stopping):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = start_up(tmp_path, "--manager-bind", address)
        stopping(process)
        assert process.wait(timeout=40) == 2
    assert f"pool manager cannot listen on {address}: address already in use (another latentpool, perhaps?)" in said(tmp_path)


def test_free_ports_for_metrics_too():
    told = replace(FREE, ranks=3)
    assert _with_ports(told).metrics_bind is None
    told = _with_ports(replace(told, metrics_bind="127.0.0.1:0"))
    workers = [replace(told, rank=rank) for rank in range(3)]
    addresses = [told.router_bind, told.manager_bind, told.metrics_address("router"), told.metrics_address("pool-manager")]
    addresses += [worker.worker_address(worker.rank) for worker in workers]
    addresses += [worker.metrics_address("rank-worker") for worker in workers]
    assert len(set(addresses)) == 10
    assert not any(address.endswith(":0") for address in addresses)


@pytest.mark.parametrize(("setting", "who"), [("worker_bind", "rank 1"), ("metrics_bind", "metrics of")])
def test_ports_end_where_ports_end(setting: str, who: str):
    with pytest.raises(ConfigError, match=f"^{who}.* cannot listen on 127.0.0.1:65536: ports end at 65535"):
        _with_ports(replace(FREE, ranks=2, **{setting: "127.0.0.1:65535"}))


def test_metrics_do_not_take_a_service_s_own_address():
    router = _with_ports(FREE).router_bind
    with pytest.raises(ConfigError, match=f"^metrics of router cannot listen on {router}: address already in use"):
        _with_ports(replace(FREE, router_bind=router, metrics_bind=router))


TINY = Path(__file__).parents[1] / "data" / "oracle" / "tiny"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--ranks", "5"), 1, "5 ranks is more than num_attention_heads = 4: serve with --ranks 4 or fewer"),
        (("--context", "1M"), 2, "--context 1048576: the model serves 1 to 4096 tokens"),
        (("--staging-rows", "64"), 2, "--staging-rows 64: the longest selections of this model need 128"),
        (("--split", "on", "--ranks", "1"), 2, "--split on --ranks 1: one rank keeps every row anyway"),
        (("--split", "on", "--kv-pages", "off"), 2, "--split on --kv-pages off: windows are whole on every rank"),
        (("--memory", "1000TiB"), 2, "--memory 1000.00 TiB is more than this host has: "),
        (("--kv-cache", "fp8"), 2, "--kv-cache fp8 is not served yet"),
        (("--manager-bind", "0.0.0.0:0"), 2, "the pool manager uses 0.0.0.0:0, which is not loopback: set --secret-file"),
        (("--router-bind", "0.0.0.0:0"), 2, "the router uses 0.0.0.0:0, which is not loopback: set --secret-file"),
        (("--worker-bind", "10.0.0.1:0"), 2, "rank worker uses 10.0.0.1:0, which is not loopback: set --secret-file"),
        (("--worker-bind", "0.0.0.0:0"), 2, "rank worker binds 0.0.0.0:0, which others cannot dial"),
    ],
)
def test_what_the_settings_and_the_model_decide_alone_is_refused_before_anything_starts(arguments, code, words, monkeypatch):
    monkeypatch.setattr(supervisor.Child, "start", lambda _: pytest.fail("a process is started"))
    shown = CliRunner().invoke(app, ["up", "--model", str(TINY), "--state-dir", "state", *arguments])
    assert (shown.exit_code, shown.stderr.count("\n")) == (code, 1)
    assert shown.stderr.startswith(f"latentpool: {words}")


def test_demo_speaks_and_leaves_nothing(tmp_path, stopping):
    process = start(tmp_path, "demo", "Once", "--max-tokens", "8")
    stopping(process)
    assert process.wait(timeout=100) == 0, said(tmp_path)
    assert process.stdout.read().strip()
    report = said(tmp_path)
    for part in (
        "prompt tokens (0 cached, ",
        " on borrowed pages), 8 generated (ended by length)",
        "receipt ",
        "pages of 64 rows",
        "stopped: no process and no port is left",
    ):
        assert part in report.replace("\n", " "), part
    assert list(tmp_path.iterdir()) == [tmp_path / "stderr"]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_demo_finds_a_line_of_a_log_and_another(tmp_path, stopping):
    process = start(tmp_path, "demo")
    stopping(process)
    assert process.wait(timeout=280) == 0, said(tmp_path)
    assert process.stdout.read().splitlines() == ["It is held by Mara Lindt.", "On duty at the upper tower."]
    report = said(tmp_path)
    assert report.count("receipt ") == report.count("pages of 64 rows") == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "stderr"]


@pytest.mark.full
def test_the_commands_that_use_a_group(tmp_path, stopping):
    process = start_up(tmp_path, "--metrics-bind", "127.0.0.1:0", "--keep-from", "64")
    stopping(process)
    MOMENTS["while it serves"](process, tmp_path)
    words = said(tmp_path).split()
    router, manager = words[words.index("--address") + 1], words[words.index("--manager") + 1]

    def ended(*arguments, typed=""):
        command = [sys.executable, "-m", "latentpool.cli", *arguments]
        return subprocess.run(command, cwd=tmp_path, input=typed, capture_output=True, text=True, timeout=60, check=False)

    def run(*arguments, typed=""):
        done = ended(*arguments, typed=typed)
        assert done.returncode == 0, done.stderr
        return done.stdout

    reply = json.loads(run("generate", "Once", "--max-tokens", "5", "--ignore-eos", "--json", "--address", router))
    assert len(reply["token_ids"]) == 5
    assert reply["usage"]["generated_tokens"] == 5
    again = json.loads(run("generate", "Once", "--max-tokens", "5", "--ignore-eos", "--json", "--address", router))
    assert again["token_ids"] == reply["token_ids"]
    assert again["receipt"] == reply["receipt"]
    scored = json.loads(run("score", "--token-ids", "1 2 3", "--json", "--address", router))
    assert [row["position"] for row in scored["rows"]] == [0, 1, 2]
    assert scored["rows"][2]["log_prob"] is None
    assert json.loads(run("ranks", "--json", "--manager", manager))["group_state"] == "ready"
    assert "all " in run("pages", "--check", "--manager", manager)
    assert json.loads(run("conversations", "--json", "--manager", manager)) == []
    carry = ended("carry", "99", "--manager", manager)
    assert carry.returncode == 1
    assert carry.stderr.startswith("latentpool: no conversation 99: ")
    assert carry.stderr.count("\n") == 1
    talk = ended("chat", "--max-tokens", "3", "--address", router, typed=f"{'Tell me. ' * 30}\nAnd then?\n")
    assert talk.returncode == 0, talk.stderr
    first, second = talk.stderr.splitlines()
    assert "(0 cached, " in first
    assert "(256 cached from a history mark, " in second
    kept = json.loads(run("kept", "--json", "--manager", manager))
    assert ([state["at"] for state in kept["kept"]], kept["counts"]["hits"]) == ([256], "1")
    assert "lookups: 1 of " in run("top", "--once", "--interval", "0.2", "--manager", manager)
    assert " kept" in run("pages", "--check", "--manager", manager)
    assert run("kept", "--evict-all", "--manager", manager) == f"evicted 1 kept prompt: {kept['kept'][0]['state']}\n"
    assert run("kept", "--manager", manager).startswith("0 kept prompts: ")
    metrics = [int(port) for port in re.findall(r'"127.0.0.1:(\d+)", "event": "metrics"', said(tmp_path))]
    assert len(metrics) == 4
    read = "".join(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode() for port in metrics)
    decoded = re.search(r"^latentpool_router_decode_rows_total (\S+)$", read, re.MULTILINE)
    assert float(decoded[1]) >= 8  # two replies of five tokens, the first of which comes with the prompt
    assert len(re.findall(r'link_sent_bytes_total{kind="sums",rank="[01]"} [1-9]', read)) == 2
    assert f"metrics: http://127.0.0.1:{min(metrics)}/metrics of the router" in said(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=40) == 0


@pytest.mark.full
def test_ctrl_c_stops_the_demo(tmp_path, stopping):
    process = start(tmp_path, "demo")
    stopping(process)
    wait_for(lambda: len(family(process)) >= 4, process)
    members = family(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=40) == 130
    assert_gone(members)


def test_a_rank_that_cannot_load_ends_the_group_and_is_named(tmp_path, stopping):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((RANDOM / "config.json").read_bytes())
    whole = (RANDOM / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    process = start(
        tmp_path, "up", "--model", str(model), "--state-dir", str(tmp_path / "state"), "--log-dir", "logs", *ADDRESSES
    )
    stopping(process)
    members = family(process)
    assert process.wait(timeout=60) == 1
    assert said(tmp_path).startswith(("latentpool: rank 0", "latentpool: rank 1"))
    assert f"{model}: the checkpoint is not what its config.json promises" in said(tmp_path)
    assert "model.safetensors: truncated" in said(tmp_path)
    assert_gone(members)
    assert {path.name for path in (tmp_path / "logs").iterdir()} >= {"rank-0.log", "pool-manager.log"}


def test_a_log_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "taken").touch()
    process = start_up(tmp_path, "--log-dir", "taken")
    assert process.wait(60) == 2
    assert said(tmp_path) == "latentpool: --log-dir taken: File exists\n"
