"""The command line. `latentpool --help` teaches it; each command group is one file here."""

import os
import sys

# gRPC's own log lines ("Got goaway ...") are of no use to who runs a command; set before it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def main() -> None:
    """Entry point of the `latentpool` script and of `python -m latentpool.cli`.

    Exit codes: 0 ok, 1 failed or refused, 2 wrong usage or setting, 130 interrupted.
    """
    try:
        from latentpool.cli.app import app

        app(prog_name="latentpool")
    except KeyboardInterrupt:
        sys.exit(130)
