"""Commands as a person meets them: on a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
import time


class Terminal:
    """A latentpool command on a terminal of its own, 200 columns wide."""

    def __init__(self, *arguments: str) -> None:
        self._end, inner = pty.openpty()
        command = [sys.executable, "-m", "latentpool.cli", *arguments]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
        )
        os.close(inner)
        self.shown = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while piece := os.read(self._end, 4096):
                self.shown += piece.decode(errors="replace")
        except OSError:
            pass  # the command has ended

    def type(self, line: str) -> None:
        os.write(self._end, line.encode())

    def ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def until(self, words: str, times: int = 1) -> None:
        ends = time.monotonic() + 40
        while self.shown.count(words) < times:
            assert time.monotonic() < ends, f"{words!r} did not appear in {self.shown!r}"
            time.sleep(0.02)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)
