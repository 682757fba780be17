"""`dflash-mp compare`: the same drafters, rows and seeds under every guard and as processes, each in processes of their own.

A mode's processes are started, begin together, and end by themselves after the work's seconds or steps, or when their threads hang. One
that does not end in time is made to write its stacks and killed with its whole process group. Errors and hangs are results; only a
mode that cannot begin is a failure, and it is told as such in its result. `after` is told of every mode that has ended, so that a command that
is stopped leaves what it has. Nothing outlives the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mp.errors import DflashError
from dflash_mp.process import MARK, mark_of, marked_processes, send_signal
from dflash_mp.threads.log import DrafterLog, log_file, read_log
from dflash_mp.threads.work import Work

PROCESSES = "processes"
_DUMP_SECONDS = 3.0
_TAIL_CHARACTERS = 1500


@dataclass(frozen=True)
class Limits:
    """Seconds: to get ready, without any sign of life before a hang is stated, and beyond the work's own seconds before a kill."""

    ready: float = 180.0
    quiet: float = 10.0
    over: float = 120.0
    steps: float = 1800.0  # for work that is limited by steps


@dataclass(frozen=True)
class ModeResult:
    """What one mode did. `logs` by drafter number; `outcomes` of its processes, None for one that was killed or could not begin."""

    mode: str
    start_seconds: float  # until all processes were ready
    seconds: float
    logs: dict[int, DrafterLog]
    outcomes: list[dict[str, Any] | None]
    hung: dict[str, str]  # stuck thread → its stack
    failure: str  # why it could not begin, or how a process died


def compare(
    work: Work,
    modes: Sequence[str],
    directory: Path,
    *,
    limits: Limits = Limits(),
    say: Callable[[str], None] = lambda text: None,
    after: Callable[[Sequence[ModeResult]], None] = lambda results: None,
) -> list[ModeResult]:
    """Run `modes` (names of guards, and PROCESSES), one after the other; everything they wrote is below `directory`.

    `after` gets the results so far whenever a mode has ended.
    """
    directory.mkdir(parents=True, exist_ok=True)
    work_file = directory / "work.json"
    work_file.write_text(work.to_json(), encoding="utf-8")
    results: list[ModeResult] = []
    for mode in modes:
        say(f"{mode} …")
        results.append(run_mode(work, work_file, mode, directory / mode, limits))
        say(f"{mode}: {summary(results[-1])}")
        after(results)
    return results


def run_mode(work: Work, work_file: Path, mode: str, directory: Path, limits: Limits) -> ModeResult:
    """Run one mode to its end, or to a kill."""
    numbers = list(range(work.drafters))
    groups = [[number] for number in numbers] if mode == PROCESSES else [numbers]
    guard = "none" if mode == PROCESSES else mode
    places = [directory / f"process-{index}" for index in range(len(groups))]
    started, failure = time.monotonic(), ""
    with _workers(work, work_file, guard, groups, places, limits.quiet) as workers:
        try:
            for worker in workers:
                worker.await_ready(started + limits.ready)
            begun = time.monotonic()
            for worker in workers:
                worker.go()
            allowed = (limits.steps if work.seconds is None else work.seconds) + limits.over
            for worker in workers:
                worker.await_end(begun + allowed)
        except DflashError as error:
            begun, failure = time.monotonic(), str(error)
    outcomes = [_outcome(place) for place in places]
    for worker, outcome in zip(workers, outcomes, strict=True):
        if outcome is None and not failure:
            failure = worker.last_words()
    logs = {n: read_log(log_file(place, n)) for group, place in zip(groups, places, strict=True) for n in group}
    return ModeResult(
        mode=mode,
        start_seconds=begun - started,
        seconds=_seconds(outcomes, logs),
        logs=logs,
        outcomes=outcomes,
        hung=_hung(workers, outcomes, places),
        failure=failure,
    )


def summary(result: ModeResult) -> str:
    """A line for people."""
    steps = sum(len(log.steps) for log in result.logs.values())
    errors = sum(sum(log.errors.values()) for log in result.logs.values())
    parts = [f"{steps} steps in {result.seconds:.0f} s", f"{errors} errors", f"{len(result.hung)} threads hung"]
    return ", ".join(parts) + (f"; {result.failure.splitlines()[0]}" if result.failure else "")


class Worker:
    """A process of a mode, in a process group of its own."""

    def __init__(self, command: Sequence[str], directory: Path, environment: dict[str, str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for old in ("outcome.json", "stacks.txt"):
            (directory / old).unlink(missing_ok=True)
        self.directory, self.killed = directory, False
        with (directory / "output.txt").open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                env=environment,
            )

    def await_ready(self, deadline: float) -> None:
        """Wait for its "ready", or for an outcome without it. Raises `DflashError` when neither comes in time."""
        stdout = self._process.stdout
        if stdout is None:
            raise RuntimeError("the worker has no standard output")
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                line = stdout.readline()
                if line == b"ready\n":
                    return
                if not line:
                    self._process.wait(_DUMP_SECONDS)
                    if (self.directory / "outcome.json").exists():
                        return  # it hung in its first pass, and has said so
                    raise DflashError(f"a process could not begin:\n{self.last_words()}")
        self.kill()
        raise DflashError("a process did not get ready in time")

    def go(self) -> None:
        """Let it begin."""
        with contextlib.suppress(BrokenPipeError):  # it died; its end is found next
            if self._process.stdin is not None:
                self._process.stdin.write(b"go\n")
                self._process.stdin.flush()

    def await_end(self, deadline: float) -> None:
        """Wait for its end; after the deadline have it write its stacks, and kill it."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.killed = True
            send_signal(self._process.pid, signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_DUMP_SECONDS)
            self.kill()

    def kill(self) -> None:
        """Kill its process group, if it lives."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def last_words(self) -> str:
        """How it ended, and the end of what it wrote."""
        text = (self.directory / "output.txt").read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:].strip()
        code = self._process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return f"{how}\n{text}"


@contextlib.contextmanager
def _workers(
    work: Work, work_file: Path, guard: str, groups: list[list[int]], places: list[Path], quiet: float
) -> Iterator[list[Worker]]:
    """Start the processes of a mode; none is left at the end, nor any child of theirs."""
    mark = mark_of(os.getpid())
    threads = str(work.config.train.threads or 1)
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    # Every mode compiles afresh; what its processes have compiled they may share, as its threads do.
    compiled = places[0].parent.absolute() / "compiled"
    shutil.rmtree(compiled, ignore_errors=True)
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
    workers: list[Worker] = []
    try:
        for group, place in zip(groups, places, strict=True):
            command = [sys.executable, "-m", "dflash_mp.threads.worker", str(work_file), str(place), "--guard", guard]
            command += ["--quiet-seconds", str(quiet), *(word for n in group for word in ("--drafter", str(n)))]
            workers.append(Worker(command, place, environment))
        yield workers
    finally:
        for worker in workers:
            worker.kill()
        for pid in marked_processes(mark):
            send_signal(pid, signal.SIGKILL)


def _outcome(place: Path) -> dict[str, Any] | None:
    file = place / "outcome.json"
    outcome: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    return outcome


def _hung(workers: list[Worker], outcomes: list[dict[str, Any] | None], places: list[Path]) -> dict[str, str]:
    found: dict[str, str] = {}
    for worker, outcome, place in zip(workers, outcomes, places, strict=True):
        if outcome is not None and outcome["hung"]:
            found |= outcome["stacks"]
        elif worker.killed:
            dump = place / "stacks.txt"
            found[f"all of {place.name}"] = dump.read_text(encoding="utf-8") or "no stacks: the process did not answer"
    return found


def _seconds(outcomes: list[dict[str, Any] | None], logs: dict[int, DrafterLog]) -> float:
    """From the start to the end of the last step, or of the last process that knows its end."""
    ends = [outcome["seconds"] for outcome in outcomes if outcome is not None]
    return max([*ends, *(log.steps[-1].at for log in logs.values() if log.steps)], default=0.0)
