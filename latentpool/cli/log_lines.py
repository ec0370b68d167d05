"""What services write to stderr, for people: log entries in words, and the last words of a process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.text import Text

_ERROR = "latentpool: "
"""What every command begins its error with."""


def readable(name: str, line: str, terminal: bool) -> Text:
    """A JSON log line as time, service, event and values; other lines behind the service's name."""
    entry = _entry(line)
    if entry is None:
        return Text(f"{name:>12} {line}")
    if not terminal:
        return Text(line)
    time, level, event = (str(entry.pop(key, "")) for key in ("timestamp", "level", "event"))
    for known in ("service", "rank"):
        entry.pop(known, None)
    text = Text(f"{time[11:19]} ", "dim").append(f"{name:>12} ", "bold")
    text.append(event, {"warning": "yellow", "error": "red"}.get(level, ""))
    return text.append("".join(f" {key}={value}" for key, value in entry.items()), "dim")


def last_words(lines: Sequence[str]) -> tuple[str, str]:
    """(the error that a process ended with, all of its lines; its last line), "" where there is none. Log entries aside: what
    it logged last does not say why it ended."""
    lines = [line for line in lines if line and _entry(line) is None]
    errors = [at for at, line in enumerate(lines) if line.startswith(_ERROR)]
    error = "\n".join(lines[errors[-1] :]).removeprefix(_ERROR) if errors else ""  # it may list many things, a line each
    return error, lines[-1] if lines else ""


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
