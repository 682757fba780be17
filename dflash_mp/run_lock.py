"""A run directory belongs to one run at a time: `dflash-mp run` holds one lock in it, the drafters' rank 0 another, however it was started.

The kernel drops a lock with the process that holds it, so nothing is ever stale on one host. A network file system keeps the lock of a host
that vanished until its lease ends: a holder on another host is waited for, `_LEASE_SECONDS` at most. A file system that does not know locks of other
hosts keeps only runs of the same host apart, and one without locks none (`dflash_mp.file_lock`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from pathlib import Path

from dflash_mp.errors import DflashError
from dflash_mp.file_lock import take

log = logging.getLogger(__name__)
_AGAIN_SECONDS = 0.1
_LEASE_SECONDS = 120.0  # NFS: a lease of 90 s, and time to notice its end


class RunLock:
    """Holds `run_dir` until it is closed, or the process ends."""

    def __init__(self, run_dir: Path, *, drafters: bool = False, patience: float = 0.0) -> None:
        """Make `run_dir` and lock it, for its `drafters` or for the whole run; wait `patience` seconds for a holder that is just ending.

        Raises `DflashError` when the directory cannot be written, or another has it.
        """
        started, waiting = time.monotonic(), False
        path = run_dir / (".drafters.lock" if drafters else ".lock")
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(run_dir, error) from None
        while not take(self._file, path):
            host, process = self._owner()
            elsewhere = host not in ("", socket.gethostname())
            owner = f"process {process or 'unknown'}" + (f" on {host}" if elsewhere else "")
            seconds = max(patience, _LEASE_SECONDS) if elsewhere else patience
            if time.monotonic() - started > seconds:
                self._file.close()
                raise DflashError(
                    f"another run ({owner}) is using run_dir {run_dir}",
                    "wait for it or stop it, or give this run its own: --set run_dir=...",
                )
            if elsewhere and not waiting:
                waiting = True
                log.warning("waiting up to %.0f s for %s, which has %s", seconds, owner, run_dir)
            time.sleep(_AGAIN_SECONDS)
        try:
            self._say_whose()
        except OSError as error:
            with contextlib.suppress(OSError):  # closing tries again to write the line, and closes
                self._file.close()
            raise _cannot_write(run_dir, error) from None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _say_whose(self) -> None:
        self._file.truncate(0)
        self._file.write(f"{socket.gethostname()}:{os.getpid()}\n")
        self._file.flush()

    def _owner(self) -> tuple[str, str]:
        """Host and process of the holder; empty while it has not said so yet."""
        self._file.seek(0)
        host, _, process = self._file.read().strip().rpartition(":")
        return host, process


def _cannot_write(run_dir: Path, error: OSError) -> DflashError:
    return DflashError(
        f"cannot write to run_dir {run_dir}: {error.strerror or error}",
        "free space or permissions there, or change run_dir",
    )
