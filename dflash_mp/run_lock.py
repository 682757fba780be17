"""A run directory belongs to one run at a time: `dflash-mp run` holds one lock in it, the drafters' rank 0 another, however it was started.

The kernel drops a lock with the process that holds it, so nothing is ever stale. On a network file system that does not know locks of
other hosts, only runs of the same host are kept apart.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from dflash_mp.errors import DflashError

_AGAIN_SECONDS = 0.1


class RunLock:
    """Holds `run_dir` until it is closed, or the process ends."""

    def __init__(self, run_dir: Path, *, drafters: bool = False, patience: float = 0.0) -> None:
        """Make `run_dir` and lock it, for its `drafters` or for the whole run; wait `patience` seconds for a holder that is just ending.

        Raises `DflashError` when the directory cannot be written, or another has it.
        """
        deadline = time.monotonic() + patience
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = (run_dir / (".drafters.lock" if drafters else ".lock")).open("a+", encoding="utf-8")
        except OSError as error:
            raise DflashError(f"cannot write to run_dir {run_dir}: {error.strerror}", "change run_dir") from None
        while not self._locked():
            if time.monotonic() > deadline:
                self._file.seek(0)
                owner = self._file.read().strip()
                self._file.close()
                raise DflashError(
                    f"another run (process {owner or 'unknown'}) is using run_dir {run_dir}",
                    "wait for it or stop it, or give this run its own: --set run_dir=...",
                )
            time.sleep(_AGAIN_SECONDS)
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _locked(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
