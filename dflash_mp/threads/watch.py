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
from dataclasses import dataclass
from pathlib import Path

_IDLE_SHARE = 0.05  # of one processor
_SAMPLE_SECONDS = 1.0
_LINES = 40
_TICKS = os.sysconf("SC_CLK_TCK")


class HangWatch:
    """Ask `hung()` now and then, with the time of the last event."""

    def __init__(self, quiet_seconds: float) -> None:
        self._quiet = quiet_seconds
        self._seen, self._used = processor_time(), 0.0
        self._samples = deque([(time.monotonic(), 0.0)])  # one from before the last `quiet_seconds`

    def hung(self, last_event: float) -> bool:
        """Whether nothing has happened, and nothing was computed, in the last `quiet_seconds`."""
        now = time.monotonic()
        if now - self._samples[-1][0] >= min(_SAMPLE_SECONDS, self._quiet):
            self._samples.append((now, self._used_until_now()))
        while len(self._samples) > 1 and now - self._samples[1][0] >= self._quiet:
            self._samples.popleft()
        since, used = self._samples[0]
        if now - max(since, last_event) < self._quiet:
            return False
        return self._used_until_now() - used < _IDLE_SHARE * (now - since)

    def _used_until_now(self) -> float:
        """Processor seconds used since this watch was made."""
        now = processor_time()
        self._used += now.since(self._seen)
        self._seen = now
        return self._used


@dataclass(frozen=True)
class ProcessorTime:
    """User and system seconds of this process and of its descendants."""

    total: float  # those included that have ended and were waited for by one of them
    alive: dict[int, float]  # by pid, without any that have ended

    def since(self, before: ProcessorTime) -> float:
        """Seconds used since `before`, never negative.

        What ended and was waited for by a stranger, or by nobody, leaves the total with all that it ever used; what the living have used since
        then counts nevertheless.
        """
        grown = sum(max(0.0, seconds - before.alive.get(pid, 0.0)) for pid, seconds in self.alive.items())
        return max(self.total - before.total, grown)


def processor_time() -> ProcessorTime:
    """As it is now: a look through /proc, a few milliseconds."""
    children: dict[int, list[tuple[int, list[int]]]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append((int(file.parent.name), [int(ticks) for ticks in fields[11:15]]))
    me, own = os.getpid(), os.times()
    total, alive, parents = sum(own[:4]), {me: own.user + own.system}, [me]
    while parents:
        for child, ticks in children.get(parents.pop(), ()):
            parents.append(child)
            total += sum(ticks) / _TICKS
            alive[child] = sum(ticks[:2]) / _TICKS
    return ProcessorTime(total, alive)


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
