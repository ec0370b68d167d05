"""Structured logs: readable on a terminal, JSON lines otherwise. All logs go to stderr."""

from __future__ import annotations

import contextlib
import logging
import sys

import structlog


class _Stderr:
    """Prints lines to this process's stderr. A service whose terminal or parent is gone stops in good order all the same: a
    line that nobody can read is dropped."""

    def msg(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(message, file=sys.stderr, flush=True)

    log = debug = info = warn = warning = error = critical = exception = msg


def configure(level: str = "info", **context: object) -> None:
    """Sets up structlog for this process; `context` (service, rank, ...) is on every line."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: _Stderr(),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(**context)
