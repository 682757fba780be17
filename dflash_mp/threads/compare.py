"""`dflash-mp compare`: the same drafters, rows and seeds under every guard and as processes, each in processes of their own.

A mode's processes import what they need while the mode before it prepares, begin together, and end by themselves after the work's seconds or steps, or when their threads hang. One
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_mp.errors import DflashError
from dflash_mp.process import MARK, mark_of, marked_processes, send_signal
from dflash_mp.threads.log import DrafterLog, log_file, read_log
from dflash_mp.threads.work import Work

PROCESSES = "processes"
IMPORTED, READY = b"imported", b"ready"  # lines that a worker says, and waits then for a line
_CHUNK = 1 << 16
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
    start_seconds: float  # from its turn until all its processes were ready; the first mode's contain its imports
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
    fleets = [_Fleet(work, work_file, mode, directory / mode, limits) for mode in dict.fromkeys(modes)]
    results: list[ModeResult] = []
    with _nothing_left():
        for fleet, following in zip(fleets, [*fleets[1:], None], strict=True):
            say(f"{fleet.mode} …")
            results.append(_run_mode(fleet, following))
            say(f"{fleet.mode}: {summary(results[-1])}")
            after(results)
    return results


@dataclass
class _Fleet:
    """The processes of a mode. They import what they need as soon as they are started, and wait then."""

    work: Work
    work_file: Path
    mode: str
    directory: Path
    limits: Limits
    workers: list[Worker] = field(default_factory=list)

    @property
    def groups(self) -> list[list[int]]:
        """Drafter numbers by process."""
        numbers = list(range(self.work.drafters))
        return [[number] for number in numbers] if self.mode == PROCESSES else [numbers]

    def start(self) -> None:
        """Start those that are not."""
        threads = str(self.work.config.train.threads or 1)
        environment = {
            **os.environ,
            MARK: mark_of(os.getpid()),
            "OMP_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        # Every mode compiles afresh; what its processes have compiled they may share, as its threads do.
        compiled = self.directory.absolute() / "compiled"
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
        # Otherwise Inductor times several kernels and takes the fastest one, which may add in another order in another mode.
        environment["TORCHINDUCTOR_DETERMINISTIC"] = "1"
        if not self.workers:
            shutil.rmtree(compiled, ignore_errors=True)
        guard = "none" if self.mode == PROCESSES else self.mode
        for index, group in enumerate(self.groups[len(self.workers) :], len(self.workers)):
            place = self.directory / f"process-{index}"
            command = [sys.executable, "-m", "dflash_mp.threads.worker", str(self.work_file), str(place)]
            command += ["--guard", guard, "--quiet-seconds", str(self.limits.quiet)]
            self.workers.append(Worker([*command, *(f"--drafter={n}" for n in group)], place, environment))

    def end(self, but: Sequence[Worker]) -> None:
        """Kill them and what descends from them: all that this process has started, `but` the process groups of those."""
        for worker in self.workers:
            worker.kill()
        spared = {worker.pid for worker in but}
        for pid in marked_processes(mark_of(os.getpid())):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) not in spared:
                    send_signal(pid, signal.SIGKILL)


def _run_mode(fleet: _Fleet, following: _Fleet | None) -> ModeResult:
    """Run one mode to its end, or to a kill. Before it begins, the processes of the `following` one have imported what they need."""
    work, limits, started, failure = fleet.work, fleet.limits, time.monotonic(), ""
    try:
        fleet.start()
        for worker in fleet.workers:
            worker.await_line(IMPORTED, started + limits.ready)
            worker.go()
        if following is not None:
            following.start()
        for worker in fleet.workers:
            worker.await_line(READY, started + limits.ready)
        ready = time.monotonic()
        for worker in following.workers if following is not None else ():
            worker.await_import(ready + limits.ready)
        begun = time.monotonic()
        for worker in fleet.workers:
            worker.go()
        allowed = (limits.steps if work.seconds is None else work.seconds) + limits.over
        for worker in fleet.workers:
            worker.await_end(begun + allowed)
    except DflashError as error:
        ready, failure = time.monotonic(), str(error)
    finally:
        fleet.end(following.workers if following is not None else [])
    workers, places = fleet.workers, [worker.directory for worker in fleet.workers]
    outcomes = [_outcome(place) for place in places]
    for worker, outcome in zip(workers, outcomes, strict=True):
        if outcome is None and not failure:
            failure = worker.last_words()
    logs = {n: read_log(log_file(place, n)) for group, place in zip(fleet.groups, places, strict=True) for n in group}
    return ModeResult(
        mode=fleet.mode,
        start_seconds=ready - started,
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
        for old in (directory / "outcome.json", directory / "stacks.txt", *directory.glob("drafter-*.jsonl")):
            old.unlink(missing_ok=True)
        self.directory, self.killed, self._failure = directory, False, ""
        self._said, self._unfinished = set[bytes](), b""
        with (directory / "output.txt").open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                env=environment,
            )

    def await_line(self, line: bytes, deadline: float) -> None:
        """Wait for what it says when it has got so far, or for an outcome without it. Raises `DflashError`, from then on, when neither
        comes in time."""
        if self._failure:
            raise DflashError(self._failure)
        stdout = self._process.stdout
        if stdout is None:
            raise RuntimeError("the worker has no standard output")
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while line not in self._said and selector.select(max(0.0, deadline - time.monotonic())):
                if not self._hear(stdout.fileno()):
                    self._process.wait(_DUMP_SECONDS)
                    if (self.directory / "outcome.json").exists():
                        return  # it hung in its first pass, and has said so
                    self._failure = f"a process could not begin:\n{self.last_words()}"
                    raise DflashError(self._failure)
        if line not in self._said:
            self.kill()
            self._failure = "a process did not get ready in time"
            raise DflashError(self._failure)

    def _hear(self, stdout: int) -> bool:
        """Take what is there, whole lines or not: what a buffer holds back, a selector does not see. False at the end of its output."""
        said = os.read(stdout, _CHUNK)
        *lines, self._unfinished = (self._unfinished + said).split(b"\n")
        self._said.update(lines)
        return bool(said)

    def await_import(self, deadline: float) -> None:
        """Wait until it has imported what it needs; when it can't, that is told when its turn comes."""
        with contextlib.suppress(DflashError):
            self.await_line(IMPORTED, deadline)

    def go(self) -> None:
        """Let it go on with what comes next."""
        with contextlib.suppress(BrokenPipeError):  # it died; its end is found next
            if self._process.stdin is not None:
                self._process.stdin.write(b"go\n")
                self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

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
def _nothing_left() -> Iterator[None]:
    """At the end, none of the processes is left, nor any child of theirs."""
    try:
        yield
    finally:
        for pid in marked_processes(mark_of(os.getpid())):
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
