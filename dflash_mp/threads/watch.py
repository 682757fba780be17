"""Watching threads that may hang: who made progress, who stands still, and where.

A hang is a fact, not a guess: for `quiet_seconds` no drafter has done anything *and* this process with its children has used next to no
processor time. Threads that compile or compute are never taken for hung. What is stuck is reported with its Python stack, the autograd
engine's own threads included.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from dflash_mp.process import children_of

_IDLE_SHARE = 0.05  # of one processor
_LINES = 40
_TICKS = os.sysconf("SC_CLK_TCK")


class HangWatch:
    """Ask `hung()` now and then, with the time of the last event."""

    def __init__(self, quiet_seconds: float) -> None:
        self._quiet = quiet_seconds
        self._since, self._used = time.monotonic(), processor_seconds()

    def hung(self, last_event: float) -> bool:
        """Whether nothing has happened, and nothing was computed, for `quiet_seconds`."""
        now = time.monotonic()
        if last_event > self._since:
            self._restart(now)
        if now - self._since < self._quiet:
            return False
        idle = processor_seconds() - self._used < _IDLE_SHARE * (now - self._since)
        self._restart(now)
        return idle

    def _restart(self, now: float) -> None:
        self._since, self._used = now, processor_seconds()


def processor_seconds() -> float:
    """User and system time of this process and of its living descendants."""
    total, parents = time.process_time(), [os.getpid()]
    while parents:
        for child in children_of(parents.pop()):
            parents.append(child)
            try:
                fields = (
                    Path(f"/proc/{child}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                )
            except OSError:  # it ended meanwhile
                continue
            total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def stacks(of: Callable[[str], bool]) -> dict[str, str]:
    """Name → Python stack, of the threads whose name `of` accepts. Threads that Python did not start are "autograd engine N"."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found, foreign = {}, 0
    for ident, frame in sys._current_frames().items():
        name = names.get(ident)
        if name is None:
            name, foreign = f"autograd engine {foreign}", foreign + 1
        if of(name):
            lines = "".join(traceback.format_stack(frame)).splitlines()
            found[name] = "\n".join(lines[-_LINES:])
    return found
