"""The processes of `bench end-to-end`: started with this one's mark, told about, and killed at the end.

What a log says of how a process works (attention, precision, lanes, compilation) and each of its warnings is told once, as it comes: a
process that takes a slower way all the same would otherwise make a good ratio.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from dflash_mp.errors import DflashError
from dflash_mp.process import MARK, children_of, mark_of, send_signal
from dflash_mp.supervisor import Part, Running

_GONE_SECONDS = 30.0
_LONGEST_NOTE = 400
_MOST_NOTES = 20  # of one process
_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ([a-z]+(?: \d+)?) \| (.*)$")
_WARNING = re.compile(r"^(warning|error|critical): ")
_DEPRECATED = re.compile(r"\b(Future|Deprecation)Warning: ")  # a library's, about its next release
_TELLS = re.compile(r"^the target's rows: |^step \d+, the first here|^\S+ M parameters, |: connected to \S+, lane ")


class Notes:
    """Of one process: the lines of its log, since it started, that warn or say how it works."""

    def __init__(self, running: Running) -> None:
        self._log, self._at = running.part.log, running.log_start
        self._seen: set[str] = set()

    def new(self) -> list[str]:
        """Those that were not given yet, each with the process's name; the same words only once."""
        with self._log.open("rb") as log:
            log.seek(self._at)
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        found = []
        for line in whole.decode(errors="replace").splitlines():
            match = _LINE.match(line)
            if match is None or _DEPRECATED.search(match[2]):
                continue
            if not (_WARNING.search(match[2]) or _TELLS.search(match[2])):
                continue
            note = f"{match[1]}: {match[2]}"[:_LONGEST_NOTE]
            if note not in self._seen and len(self._seen) <= _MOST_NOTES:
                self._seen.add(note)
                found.append(note if len(self._seen) <= _MOST_NOTES else f"{match[1]}: more in {self._log}")
        return found


def is_warning(note: str) -> bool:
    """Whether one of the `Notes` warns."""
    return _WARNING.search(note.partition(": ")[2]) is not None


def lanes_of(running: Running, rank: int) -> dict[str, str]:
    """How a rank gets its rows, by the address of each feeder that it connected to, as its own log has it last."""
    with running.part.log.open("rb") as log:
        log.seek(running.log_start)
        text = log.read().decode(errors="replace")
    return dict(re.findall(rf"\| rank {rank}: connected to (\S+), lane (.*)", text))


class Fleet:
    """Processes that end with this one; leaving the context kills them. `say` is told what their logs note."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._running: list[Running] = []
        self._notes: dict[Running, Notes] = {}
        self.warnings: list[str] = []

    def start(self, part: Part, environment: Mapping[str, str]) -> Running:
        """Start it."""
        running = Running(part, {**environment, MARK: mark_of(os.getpid())})
        self._running.append(running)
        self._notes[running] = Notes(running)
        return running

    def tell(self) -> None:
        """Say what the logs have noted since the last time."""
        for running in self._running:
            for note in self._notes[running].new():
                self._say(f"  {note}")
                if is_warning(note):
                    self.warnings.append(note)

    def kill(self, running: Running) -> None:
        """SIGKILL, and wait until it and the ranks that it started are gone, and with them what they had on a GPU."""
        ranks = children_of(running.process.pid)
        if running.exit_code is None:
            send_signal(running.process.pid, signal.SIGKILL)
        running.process.wait(_GONE_SECONDS)
        deadline = time.monotonic() + _GONE_SECONDS
        while any(map(_lives, ranks)):
            if time.monotonic() > deadline:
                raise DflashError(f"processes {ranks} do not end", "they hang in the kernel; see `dmesg`")
            time.sleep(0.05)
        with suppress(ValueError):
            self._running.remove(running)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.tell()
        for running in list(self._running):
            self.kill(running)


def _lives(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code, which nobody may collect."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False
