"""The command line. `latentpool --help` teaches it; each command group is one file here."""

import sys


def main() -> None:
    """Entry point of the `latentpool` script and of `python -m latentpool.cli`.

    Exit codes: 0 ok, 1 failed or refused, 2 wrong usage or setting, 130 interrupted.
    """
    try:
        from latentpool.cli.app import app

        app(prog_name="latentpool")
    except KeyboardInterrupt:
        sys.exit(130)
