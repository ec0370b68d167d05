"""Starts an engine in a child process that cannot outlive its front: `python -m services.rank_worker.engine_start MODULE ARGS`.

The kernel kills this process when the front dies, however the front dies and whatever the engine is busy with. It is asked
from here, after exec, because running Python between fork and exec of a process with gRPC's threads may deadlock. Ctrl-C on
a terminal reaches every process of its group; an engine ends when its front says so.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    front, module, *arguments = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(front):  # it died before the kernel was asked
        sys.exit(0)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
