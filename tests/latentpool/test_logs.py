"""Logs go to stderr, and never stop who writes them."""

from __future__ import annotations

import json
import os
import sys

import pytest
import structlog

from latentpool import logs


def test_lines_are_json_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(service="router")
    structlog.get_logger().info("ready", lanes=3)
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["lanes"], line["service"], line["level"]) == ("ready", 3, "router", "info")


def test_a_line_that_nobody_can_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent that read this process's stderr is gone; then stderr itself is."""
    logs.configure()
    log = structlog.get_logger()
    read, write = os.pipe()
    os.close(read)
    broken = os.fdopen(write, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", broken)
    with pytest.raises(BrokenPipeError):
        print("an ordinary line", file=sys.stderr, flush=True)
    log.error("stopping")
    with pytest.raises(BrokenPipeError):
        broken.close()
    log.warning("stopped")
