"""Watching threads that may hang: who made progress, who stands still, and where.

A hang is a fact, not a guess: in the last `quiet_seconds` no drafter has done anything *and* this process with its children has used next to
no processor time. Threads that compile or compute are never taken for hung. What is stuck is reported with its Python stack, the autograd
engine's own threads included.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

_IDLE_SHARE = 0.05  # of one processor
_SAMPLE_SECONDS = 1.0
_LINES = 40
_TICKS = os.sysconf("SC_CLK_TCK")


class HangWatch:
    """Ask `hung()` now and then, with the time of the last event."""

    def __init__(self, quiet_seconds: float) -> None:
        self._quiet = quiet_seconds
        self._samples = deque([(time.monotonic(), processor_seconds())])  # one from before the last `quiet_seconds`

    def hung(self, last_event: float) -> bool:
        """Whether nothing has happened, and nothing was computed, in the last `quiet_seconds`."""
        now = time.monotonic()
        if now - self._samples[-1][0] >= min(_SAMPLE_SECONDS, self._quiet):
            self._samples.append((now, processor_seconds()))
        while len(self._samples) > 1 and now - self._samples[1][0] >= self._quiet:
            self._samples.popleft()
        since, used = self._samples[0]
        if now - max(since, last_event) < self._quiet:
            return False
        return processor_seconds() - used < _IDLE_SHARE * (now - since)


def processor_seconds() -> float:
    """User and system time of this process and of its descendants, those included that have ended and were waited for."""
    children: dict[int, list[tuple[int, int]]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append((int(file.parent.name), sum(map(int, fields[11:15]))))
    ticks, parents, own = 0, [os.getpid()], os.times()
    while parents:
        for child, used in children.get(parents.pop(), ()):
            parents.append(child)
            ticks += used
    return own.user + own.system + own.children_user + own.children_system + ticks / _TICKS


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
