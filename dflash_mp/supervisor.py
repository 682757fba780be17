"""Run several processes as one: they start together, end together, and the first failure is the failure of all.

A part either *works* (the run is over when all working parts are done) or *serves* (it runs until it is told to stop). `supervise` returns
when the work is done, or was stopped in order by Ctrl-C, SIGTERM or SIGHUP, to it or to a serving part: every working part then ended with 0,
which says that it saved what it had. It raises `PartFailed` with the first failure's exit code and last log lines, or `Stopped`
(exit code 128 + signal) when the stop lost something. A first signal asks the working parts to stop, then the
serving ones, and waits a bounded time for each; a second signal, three seconds or more after the first (sooner, it is taken for the same one),
does not wait. However it ends, no process of the run is left: whatever still carries the run's mark is killed, in any session. When the supervisor itself is killed, the kernel kills
its children (`dflash_mp.child`). Polling costs a few system calls per tenth of a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from dflash_mp import logs
from dflash_mp.errors import CheckpointError, ConfigError, DataError, DflashError, TargetError
from dflash_mp.process import MARK, SAME_SIGNAL_SECONDS, children_of, mark_of, marked_processes, send_signal

log = logging.getLogger(__name__)
_TICK_SECONDS = 0.1
_KILL_SECONDS = 10.0
_TAIL_LINES = 12
_TAIL_BYTES = 16384
# These come again until something is changed: the configuration, a file, the room on a disk.
_LASTING = tuple(error.exit_code for error in (ConfigError, DataError, TargetError, CheckpointError))


@dataclass(frozen=True)
class Part:
    """A process to run. `log` receives its output, appended."""

    name: str
    command: tuple[str, ...]
    log: Path
    serves: bool = False
    leads: bool = False  # starts the real workers as its children: they are asked to stop, and it ends by itself


@dataclass(frozen=True)
class Patience:
    """Seconds to wait for an end that was asked for, before killing."""

    orderly: float = 300.0  # working parts after a signal: they finish a step and write a checkpoint
    failure: float = 30.0  # working parts after another one failed
    serving: float = 15.0  # serving parts


class PartFailed(DflashError):
    """A part of the run failed; `exit_code` is its own."""

    def __init__(self, what: str, remedy: str, exit_code: int) -> None:
        super().__init__(what, remedy)
        self.exit_code = exit_code


class Stopped(DflashError):
    """A signal ended the run, and the working parts could not save what they had done last."""

    def __init__(self, what: str, remedy: str, signal_number: int) -> None:
        super().__init__(what, remedy)
        self.exit_code = 128 + signal_number


class Running:
    """A started part."""

    def __init__(self, part: Part, environment: Mapping[str, str]) -> None:
        self.part = part
        part.log.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        with part.log.open("ab") as log:
            head = logs.line(
                logs.Speaker("run"), logs.Settings.of(environment), f"starts {part.name}: {shlex.join(part.command)}"
            )
            log.write(f"{head}\n".encode())
            log.flush()
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dflash_mp.child", *part.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + signal when a signal ended it."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def state(self) -> str:
        """For people: running, done, or its exit code."""
        code = self.exit_code
        return "running" if code is None else "done" if code == 0 else f"exit code {code}"

    def ask_to_stop(self) -> None:
        """SIGTERM to the process, or to the workers that it leads."""
        if self.exit_code is None:
            for pid in (children_of(self.process.pid) if self.part.leads else []) or [self.process.pid]:
                send_signal(pid, signal.SIGTERM)

    def last_lines(self) -> str:
        """The end of what it wrote since this start, indented."""
        with self.part.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self.log_start, size - _TAIL_BYTES))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:]) or "    (it wrote nothing)"


class _Asked:
    """The signals that asked for a stop: the `first`, and whether one came `again`, later than any copy of the first."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.again = False
        self._at = 0.0

    def note(self, number: int, frame: FrameType | None = None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._at = signal.Signals(number), now
        elif now - self._at > SAME_SIGNAL_SECONDS:
            self.again = True


def supervise(
    parts: Sequence[Part],
    watch: Callable[[Sequence[Running]], None] = lambda running: None,
    environment: Mapping[str, str] | None = None,
    patience: Patience = Patience(),
) -> signal.Signals | None:
    """Run `parts` to their common end, calling `watch` about ten times a second. Call it from the main thread. What `watch` raises kills the run.

    Returns the signal after an orderly stop, None when the work was done before one came. Raises `PartFailed`, `Stopped`, or `DflashError` when a process survives SIGKILL.
    """
    mark = mark_of(os.getpid())
    child_environment = {**(os.environ if environment is None else environment), MARK: mark}
    running: list[Running] = []
    with _signals() as asked:
        try:
            for part in parts:
                running.append(Running(part, child_environment))
            failed = _until_over(running, asked, watch)
            ended, number = failed.exit_code if failed else None, asked.first
            seconds = patience.failure if failed else patience.orderly
            _stop(running, asked, watch, (seconds, patience.serving))
        finally:
            _kill_all(mark, running)
    if failed is not None:
        raise _failure(failed, ended or 1)
    if number is not None and any(one.exit_code != 0 for one in running if not one.part.serves):
        raise _stopped(running, number)
    return number


def _until_over(
    running: Sequence[Running], asked: _Asked, watch: Callable[[Sequence[Running]], None]
) -> Running | None:
    """Wait for the end of the work or a signal (None), or for the first part that fails.

    A serving part that ends in order was asked to stop, by somebody who meant the run: that counts as a signal.
    """
    while asked.first is None:
        watch(running)
        codes = [(one, one.exit_code) for one in running]
        if all(code == 0 for one, code in codes if not one.part.serves):
            return None
        for one, code in codes:
            if code:
                return one
            if code == 0 and one.part.serves:
                log.warning("%s was stopped, so the run stops", one.part.name)
                asked.note(signal.SIGTERM)
                return None
        time.sleep(_TICK_SECONDS)
    return None


def _stop(
    running: Sequence[Running],
    asked: _Asked,
    watch: Callable[[Sequence[Running]], None],
    patience: tuple[float, float],
) -> None:
    """Ask the working parts, then the serving ones, to stop, and wait for them, but neither for too long nor after a second signal."""
    for serves, seconds in zip((False, True), patience, strict=True):
        group = [one for one in running if one.part.serves == serves]
        for one in group:
            one.ask_to_stop()
        deadline = time.monotonic() + seconds
        while any(one.exit_code is None for one in group):
            if asked.again:
                return
            if time.monotonic() > deadline:
                break
            watch(running)
            time.sleep(_TICK_SECONDS)
    watch(running)


def _kill_all(mark: str, running: Sequence[Running]) -> None:
    deadline = time.monotonic() + _KILL_SECONDS
    while left := marked_processes(mark):
        if time.monotonic() > deadline:
            raise DflashError(
                f"processes {', '.join(map(str, left))} of this run do not end, {_KILL_SECONDS:.0f} s after SIGKILL",
                "they hang in the kernel (often a GPU or a network file system); see `dmesg`",
            )
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        time.sleep(_TICK_SECONDS / 5)
    for one in running:
        one.process.wait(_KILL_SECONDS)


def _failure(failed: Running, code: int) -> PartFailed:
    then = "the same command resumes from the last checkpoint"
    if code in _LASTING:
        then = "once what the last lines ask for is changed, the same command goes on"
    return PartFailed(
        f"{failed.part.name} failed (exit code {code}); the last lines:\n{failed.last_lines()}",
        f"all of the log is in {failed.part.log}; {then}",
        code,
    )


def _stopped(running: Sequence[Running], number: signal.Signals) -> DflashError:
    """What to raise after `number` lost something: `Stopped`, or `PartFailed` when a part failed while it stopped."""
    asked = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
    for one in running:
        if not one.part.serves and one.exit_code not in asked:
            return _failure(one, one.exit_code or 1)
    return Stopped(
        f"stopped by {number.name}, without a checkpoint of the last steps",
        "the same command resumes from the last checkpoint",
        number,
    )


@contextlib.contextmanager
def _signals() -> Iterator[_Asked]:
    """Collect the signals that ask for a stop, instead of dying of them. An ignored SIGHUP (nohup) stays ignored."""
    asked = _Asked()
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, asked.note) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
