"""Processes that never outlive the one that started them (Linux).

A supervisor marks its children's environment; whatever descends from it, however deep and in whatever session, carries the mark.
Every process of a run calls `die_with_parent` first thing: from then on the kernel kills it when its parent dies, `kill -9` included, and when
the supervisor died before the call the process ends itself. `marked_processes` finds what is left of a run. Costs a few
system calls; the scan reads /proc once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from dflash_mp.errors import DflashError

MARK = "DFLASH_MP_SUPERVISOR"
LEADER = "DFLASH_MP_TORCHRUN"
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_PR_SET_PDEATHSIG = 1
SAME_SIGNAL_SECONDS = 3.0  # a signal to a whole group comes directly, and again from parents that hand it on


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies. Does nothing when neither a supervisor nor torchrun started it.

    The kernel watches the parent's *thread* that started this process: start children from a thread that lives as long as they may.
    When the supervisor or `dflash_mp.torchrun` is already gone this process is killed at once. Under a bare torchrun nothing tells that it
    died before this call; such a worker fails at the rendezvous, whose store went with torchrun.
    """
    marks = [os.environ[name] for name in (MARK, LEADER) if name in os.environ]
    if not marks and _TORCHRUN not in os.environ:
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise DflashError(
            f"the kernel refused PR_SET_PDEATHSIG: {os.strerror(ctypes.get_errno())}",
            "run on Linux, without a filter on the system call prctl",
        )
    if not all(_lives(mark) for mark in marks):
        os.kill(os.getpid(), signal.SIGKILL)


def mark_of(pid: int) -> str:
    """The mark that a supervisor with this `pid` puts into its children's environment: unlike a pid, it is never used again."""
    return f"{pid}.{_stat(pid)[19]}"


def seconds_since_start() -> float:
    """Age of this process."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(_stat(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")


def marked_processes(mark: str) -> list[int]:
    """Pids of all living processes of this user whose environment carries `mark`."""
    entry = f"{MARK}={mark}".encode()
    return [pid for pid in _pids() if entry in _environment(pid)]


def children_of(parent: int) -> list[int]:
    """Pids of the direct children of `parent`, zombies left out."""
    found = []
    for pid in _pids():
        try:
            state, its_parent, *_ = _stat(pid)
        except OSError:  # it ended meanwhile
            continue
        if int(its_parent) == parent and state != "Z":
            found.append(pid)
    return found


def send_signal(pid: int, number: int) -> None:
    """Signal one process; a process that is already gone is fine."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@contextmanager
def unwinding() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `SystemExit` (128 + signal), so that whatever was made is put away; while that goes on, later ones are ignored.

    An ignored SIGHUP (nohup) stays ignored. Outside the main thread, where no signal arrives, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]

    def end(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch_signals(numbers: Iterable[signal.Signals], act: Callable[[signal.Signals], None]) -> None:
    """Have `act` called, in a thread, for each of these signals that comes. Call it from the main thread, once in a process.

    The main thread may be in a collective, a compilation or a kernel for minutes, or hang there: Python's own handlers, which run
    in it, would have to wait.
    """
    watched = set(numbers)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in watched:
        signal.signal(number, lambda number, frame: None)

    def watch() -> None:
        while True:
            number = os.read(reading, 1)[0]
            if number in watched:
                act(signal.Signals(number))

    threading.Thread(target=watch, name="signals", daemon=True).start()


def _lives(mark: str) -> bool:
    pid = int(mark.partition(".")[0])
    try:
        return mark_of(pid) == mark and _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on: [0] state, [1] parent, [19] start time in clock ticks since boot."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended meanwhile, or is another user's
        return []


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
