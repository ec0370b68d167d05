"""The locked state file: the last term and epoch that were granted, so that neither is ever granted twice.

Source: design sections 9 and 12. Both are written before they are handed out.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from latentpool.errors import ConfigError

_EPOCHS = 0xFFFF
"""Message tags of the data plane carry 16 bits of epoch (design section 12), so numbering starts over after this one."""


class State:
    """Term and epoch of one group. With a directory they outlive the process, and no second manager can open it."""

    def __init__(self, directory: Path | None) -> None:
        """Locks and reads the directory, making it if needed. Raises ConfigError naming the process that holds it."""
        self._directory = directory
        self._lock: int | None = None
        self.term = 0
        self.epoch = 0
        if directory is None:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(directory)
            self._read(directory / "state.json")
        except OSError as error:
            self.close()
            raise ConfigError(f"--state-dir {directory}: {error.strerror or error}") from None
        except ConfigError:
            self.close()
            raise

    def next_term(self) -> int:
        """A term above every earlier one, on disk before it is returned."""
        self.term += 1
        self._write()
        return self.term

    def next_epoch(self) -> int:
        """The epoch after the last one (1 follows 65535), on disk before it is returned."""
        self.epoch = self.epoch % _EPOCHS + 1
        self._write()
        return self.epoch

    def close(self) -> None:
        """Releases the lock. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read(self, path: Path) -> None:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            self.term, self.epoch = int(values["term"]), int(values["epoch"])
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} is damaged: it should hold a term and an epoch; restore it, or remove it") from None

    def _write(self) -> None:
        if self._directory is None:
            return
        path, draft = self._directory / "state.json", self._directory / "state.json.new"
        with draft.open("w", encoding="utf-8") as file:
            json.dump({"term": self.term, "epoch": self.epoch}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _lock(directory: Path) -> int:
    """An open, locked file that names this process. It is not state.json, which is replaced at each write."""
    lock = os.open(directory / "manager.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise ConfigError(
            f"--state-dir {directory} belongs to another pool manager (process {holder}): stop it, or choose another directory"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock
