"""`latentpool verify` on real groups of this process, against the reference data; the UCX runs and large cases are in full."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from latentpool.cli.app import app
from services.rank_worker.front import RankWorker

ORACLE = Path(__file__).parents[1] / "data" / "oracle"
full = pytest.mark.full


@pytest.fixture(autouse=True)
def nothing_configured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def verify(case, ranks, *arguments, expected=None, transport="inproc"):
    model = ORACLE / ("tiny" if case == "edge" else case)
    expected = expected or ORACLE / case / "expected.safetensors"
    command = ["verify", str(model), "--expected", str(expected), "--ranks", str(ranks), "--transport", transport]
    return CliRunner().invoke(app, [*command, "--page-rows", "64", *arguments])


def passed(result):
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["passed"]
    return report["checks"]


CASES = [
    pytest.param("tiny", 1),
    pytest.param("tiny", 3),
    pytest.param("shared_index", 4),
    *(
        pytest.param(case, ranks, marks=full)
        for case in ("tiny", "edge", "shared_index", "long_kpool16")
        for ranks in (1, 2, 3, 4)
    ),
    *(pytest.param("real_ratio", ranks, marks=full) for ranks in (1, 2, 3, 4)),
]


@pytest.mark.parametrize(("case", "ranks"), CASES)
def test_in_process(case, ranks):
    checks = passed(verify(case, ranks, "--json"))
    prompts = 7 if case == "edge" else 1
    assert sum(check["key"].endswith("greedy.ids") and check["passed"] for check in checks) == prompts
    assert sum(check["key"].endswith("greedy.logits") and check["error"] <= 2e-4 for check in checks) == prompts


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        pytest.param("tiny", 2),
        *(pytest.param(c, r, marks=full) for c in ("edge", "shared_index", "long_kpool16", "real_ratio") for r in (1, 2, 3)),
    ],
)
def test_over_ucx(case, ranks):
    passed(verify(case, ranks, "--json", transport="ucx"))


@full
@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_within_its_stated_acceptance(ranks):
    checks = passed(verify("real_ratio", ranks, "--json", "--dtype", "bf16", "--kv-cache", "bf16"))
    assert len(checks) == 6


@full
@pytest.mark.parametrize("kv_pages", ["on", "off"])
def test_pages_and_windows(kv_pages):
    passed(verify("long_kpool16", 2, "--json", "--kv-pages", kv_pages))


WAYS = [
    ("--split", "off"),
    ("--audit",),
    ("--no-borrow", "--audit"),
    ("--no-borrow", "--staging-rows", "1024", "--chunk-rows", "128"),
]


@pytest.mark.parametrize(
    ("case", "ranks", "way"),
    [
        pytest.param("tiny", 2, ("--split", "on", "--no-borrow", "--audit")),
        *(pytest.param("long_kpool16", ranks, way, marks=full) for ranks in (2, 3, 4) for way in WAYS),
    ],
)
def test_wherever_rows_are_kept(case, ranks, way):
    passed(verify(case, ranks, "--json", *way))


def test_a_difference_fails_and_is_named(tmp_path):
    expected = load_file(ORACLE / "tiny" / "expected.safetensors")
    expected["decode.logits"][3, 0] += 0.01 * np.abs(expected["f64.logits"]).max()
    del expected["greedy.ids"], expected["greedy.logits"]
    save_file(expected, tmp_path / "expected.safetensors")
    result = verify("tiny", 1, expected=tmp_path / "expected.safetensors")
    assert result.exit_code == 1
    assert "FAILED (worst row 3)" in result.stdout
    assert "greedy.ids" in result.stdout
    assert "absent" in result.stdout


def test_data_of_another_checkpoint_is_called_that(monkeypatch):
    result = verify("tiny", 1, expected=ORACLE / "long_kpool16" / "expected.safetensors", transport="inproc")
    assert result.exit_code == 1
    assert result.stdout.endswith("FAILED: most rows differ altogether: was it made by another checkpoint?\n")
    monkeypatch.setattr(RankWorker, "start", lambda _: pytest.fail("a worker is started"))
    result = verify("tiny", 1, expected=ORACLE.parent / "demo" / "expected.safetensors")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "latentpool: --expected was made by another checkpoint: its len56.logits are of 2048 tokens"
    )


def test_more_ranks_than_heads_is_refused():
    result = verify("tiny", 5)
    assert result.exit_code == 1
    assert result.stderr == "latentpool: 5 ranks is more than num_attention_heads = 4: serve with --ranks 4 or fewer\n"


def test_what_is_not_served_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(RankWorker, "start", lambda _: pytest.fail("a worker is started"))
    result = verify("tiny", 2, "--staging-rows", "64")
    assert (result.exit_code, result.stderr) == (
        2, "latentpool: --staging-rows 64: the longest selections of this model need 128\n"
    )  # fmt: skip
    result = verify("tiny", 1, "--split", "on")
    assert result.exit_code == 2
    assert "--split on --ranks 1: one rank keeps every row anyway" in result.stderr
    result = verify("tiny", 2, "--kv-cache", "fp8")
    assert result.exit_code == 2
    assert "--kv-cache fp8 is not served yet" in result.stderr


def test_nothing_listens_at_the_address():
    result = verify("tiny", 1, "--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "no router answers at 127.0.0.1:1: start a group with latentpool up" in result.stderr


def test_a_truncated_checkpoint_is_named(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((ORACLE / "tiny" / "config.json").read_bytes())
    whole = (ORACLE / "tiny" / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    command = ["verify", str(model), "--expected", str(ORACLE / "tiny" / "expected.safetensors"), "--ranks", "1"]
    result = CliRunner().invoke(app, [*command, "--transport", "inproc", "--page-rows", "64"])
    assert result.exit_code == 1
    assert "model.safetensors" in result.stderr
    assert "Traceback" not in result.output
