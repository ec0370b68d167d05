"""The tool that asks the bundled model through the services: every way of asking happens, and gives a fresh one's receipts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import latentpool
from tools.train_demo.through_services import main

BUNDLED = Path(latentpool.__file__).parent / "checkpoints" / "demo"
INPROC = ("--transport", "inproc")


def run(sample: str, *arguments: str) -> int:
    """The tool's exit status, for two ranks."""
    return main([str(BUNDLED), "--context", "1024", "--turns", "0", "--sample", sample, *arguments])


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The receipts of two questions, each asked alone."""
    receipts = tmp_path_factory.mktemp("receipts") / "fresh.json"
    assert run("640:2", *INPROC, "--receipts", str(receipts)) == 0
    return receipts


@pytest.mark.parametrize(
    "way",
    [("resumed", *INPROC), pytest.param(("parked",), marks=pytest.mark.full), ("carried", "--split", "on", *INPROC)],
    ids=lambda way: way[0],
)
def test_every_way_happens_and_gives_the_receipts_of_a_fresh_one(way, fresh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(set(json.loads(fresh.read_text()).values())) == 2
    assert run("640:2", "--way", *way, "--same-as", str(fresh)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "640: 2 of 2 exact; % by fifth: 100.0, 100.0",
        f"2 of 2 questions were {way[0]}",
        f"2 of 2 receipts equal those of {fresh}",
    ]


def test_questions_that_share_a_document_go_on_from_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("", "--shared", "700:1:2", "--way", "resumed", *INPROC) == 0
    printed = capsys.readouterr().out
    assert "shared-700: 10 of 10 exact; % by fifth: 100.0, 100.0, 100.0, 100.0, 100.0\n" in printed
    assert "10 of 10 questions were resumed\n" in printed


def test_it_fails_where_no_question_went_the_way_it_was_to_go(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("256:1", "--way", "resumed", *INPROC) == 1  # too short to be kept
    assert "0 of 1 questions were resumed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ({"256/0/0": "another"}, "0 of 1 receipts equal those of {}\ndifferent: 256/0/0\n"),
        ({"512/0/0": ""}, "0 of 0 receipts equal those of {}\n"),
    ],
)
def test_it_fails_where_a_receipt_differs_or_none_is_common(
    before: dict[str, str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "before.json"
    path.write_text(json.dumps(before))
    assert run("256:1", *INPROC, "--same-as", str(path)) == 1
    assert told.format(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("carried", "--split", "off"),
        ("parked", "--split", "on"),
        ("parked", *INPROC),
        ("resumed", "--kv-pages", "off"),
        ("resumed", "--address", "127.0.0.1:1"),
    ],
    ids=" ".join,
)
def test_ways_that_a_group_does_not_offer_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        run("256:1", "--way", *arguments)
