"""What `dflash-mp run` checks before it starts a process, so that a mistake costs a second and not the loading of a target.

Checks never load a model or touch the network. What only a part can find out (a wrong tokenizer, too little GPU memory) that part reports.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from dflash_mp.config import RunConfig, TargetConfig
from dflash_mp.data.store import open_dataset
from dflash_mp.errors import ConfigError, DflashError, TargetError
from dflash_mp.stream.endpoints import check_available
from dflash_mp.stream.keys import DrafterKeys, FeederKeys

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class RunLock:
    """Holds a run directory for one `run` at a time. The kernel drops the lock with the process, so nothing is ever stale."""

    def __init__(self, run_dir: Path) -> None:
        """Make and lock `run_dir`. Raises `DflashError` when it cannot be written or another run has it."""
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = (run_dir / ".lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise DflashError(f"cannot write to run_dir {run_dir}: {error.strerror}", "change run_dir") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip()
            self._file.close()
            raise DflashError(
                f"another run (process {owner or 'unknown'}) is using run_dir {run_dir}",
                "wait for it or stop it, or give this run its own: --set run_dir=...",
            ) from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def check(config: RunConfig) -> None:
    """Raise a `DflashError` for whatever keeps this run from starting."""
    check_target(config.target)
    open_dataset(config)
    check_endpoints(config)


def check_target(target: TargetConfig) -> None:
    """A local target must exist; what looks like a hub id is left to the feeder."""
    path = Path(target.path)
    if path.exists():
        return
    if target.path.endswith(".gguf") or not _HUB_ID.fullmatch(target.path) or path.parent.is_dir():
        raise TargetError(f"there is no target at {target.path}", "check target.path")


def check_endpoints(config: RunConfig) -> None:
    """Addresses must be distinct, well formed, of this machine, and free; keys, if any, must be readable by this user alone."""
    endpoints = config.feeder_endpoints()
    twice = sorted({endpoint for endpoint in endpoints if endpoints.count(endpoint) > 1})
    if twice:
        raise ConfigError(f"feed.endpoints names {', '.join(twice)} twice", "give each feeder its own address")
    if config.stream.keys is not None:
        FeederKeys.load(config.stream.keys)
        DrafterKeys.load(config.stream.keys)
    for endpoint in endpoints:
        if endpoint.startswith("tcp://") and endpoint.endswith((":*", ":0")):
            raise ConfigError(f"{endpoint} leaves the port open, so drafters cannot find it", "name a port")
        check_available(endpoint, config.feed.insecure_no_auth, config.stream.keys is not None)
