"""A child process of a group that does as it is told: `python -m telling_child COMMAND` ends as COMMAND says.

fail WORDS: at once, with that error; fail-when FILE WORDS: once FILE is there; log-and-die: in the middle of its work."""

import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    match sys.argv[1:]:
        case "fail", words:
            sys.exit(f"latentpool: {words}")
        case "fail-when", file, words:
            while not Path(file).exists():
                time.sleep(0.02)
            sys.exit(f"latentpool: {words}")
        case "log-and-die", *lines:
            print(*lines, sep="\n", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
