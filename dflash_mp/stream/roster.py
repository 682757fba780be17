"""The feeders' addresses: those of the configuration, and those in a file that is read again when it changes.

The file (`stream.feeders_file`) has one address a line, `#` starts a comment. With it feeders join and leave a running job, at whatever addresses;
a name in an address (`tcp://feeder:5555`) needs no file, it is looked up at every connection. At the start the file must be right;
later a file that is missing, empty (as while it is written in place), or names what may not be used, is reported once and changes nothing. Costs a stat per second.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_mp.errors import StreamError

log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
NO_FEEDER, NAME_A_FEEDER = "no feeder is named", "set feed.endpoints, feed.count or stream.feeders_file"


def named(endpoints: Sequence[str], file: Path | None) -> list[str]:
    """`endpoints` and those that `file` lists, each once. Raises `StreamError` if the file can't be read."""
    if file is None:
        return list(dict.fromkeys(endpoints))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StreamError(
            f"cannot read stream.feeders_file {file}: {getattr(error, 'strerror', None) or error}",
            "give it one address of a feeder a line",
        ) from None
    listed = [line for raw in text.splitlines() if (line := raw.partition("#")[0].strip())]
    return list(dict.fromkeys([*endpoints, *listed]))


class Roster:
    """`check(endpoint)` raises `StreamError` for an address that may not be used."""

    def __init__(self, endpoints: Sequence[str], file: Path | None, check: Callable[[str], None]) -> None:
        """Raises `StreamError` if the file can't be read, an address may not be used, or there is none."""
        self._given, self._file, self._check = list(endpoints), file, check
        self._looked_at = 0.0
        self._version = self._stat()
        self.endpoints = self._read()
        if not self.endpoints:
            raise StreamError(NO_FEEDER, NAME_A_FEEDER)

    def changed(self, now: float) -> bool:
        """Whether `endpoints` is another list than at the last call. Looks at the file at most once a second."""
        if self._file is None or now - self._looked_at < _LOOK_SECONDS:
            return False
        self._looked_at = now
        if (version := self._stat()) == self._version:
            return False
        self._version = version
        try:
            endpoints = self._read()
            if not endpoints or not self._version or not self._version[2]:
                raise StreamError(f"stream.feeders_file {self._file} names no feeder", "name one")
        except StreamError as error:
            log.error("%s; the feeders stay the same until it is right", error.what)
            return False
        before, self.endpoints = self.endpoints, endpoints
        return before != endpoints

    def _stat(self) -> tuple[int, int, int] | None:
        """What differs when the file was written or replaced."""
        if self._file is None:
            return None
        try:
            status = os.stat(self._file)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _read(self) -> list[str]:
        endpoints = named(self._given, self._file)
        for endpoint in endpoints:
            self._check(endpoint)
        return endpoints
