"""What `latentpool demo` asks, and what README.md says of it. That it speaks is in test_cli_up."""

import io
from pathlib import Path

from rich.console import Console

from latentpool.cli.demo import _questions

README = Path(__file__).parents[2] / "README.md"


def test_the_log_has_as_many_lines_as_the_readme_says():
    told = io.StringIO()
    log, _ = _questions(Console(file=told, width=200))
    lines = log.splitlines()
    size = f"a log of {len(lines) - 3} lines"  # without the sentence before it, and the empty line and the question behind it
    assert told.getvalue().startswith(f"{size}; line 83 says: {lines[83]}\n")
    assert size in " ".join(README.read_text(encoding="utf-8").split())
