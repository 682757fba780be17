"""Drafters as threads of one process: the pipeline that process mode replaces, with a guard of choice.

`run_threads` builds the drafters, starts one thread and one feeder thread for each, has every thread do a first pass, and lets them go at once. It
returns when they have ended or hang, with what the process as a whole did; what each drafter did is in its log. A thread that hangs
is left behind: the caller must end the process then (`os._exit`). The same function with one drafter is a process of process mode.
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from dflash_mp.threads import drafter as one
from dflash_mp.threads.compilations import CountingBackend
from dflash_mp.threads.drafter import Drafter
from dflash_mp.threads.guards import Guard
from dflash_mp.threads.log import LogWriter, log_file
from dflash_mp.threads.sources import open_rows
from dflash_mp.threads.watch import HangWatch, stacks
from dflash_mp.threads.work import Work

_TICK_SECONDS = 0.2
_abandoned: list[contextlib.ExitStack] = []  # kept, because the end of a generator runs what it has still to do


@dataclass(frozen=True)
class Outcome:
    """What a process with one or more drafter threads did. Memory in bytes, the most it ever had; `gpu_memory` is that in use on the devices, by anyone."""

    devices: dict[str, str]  # device → its name
    start: dict[str, float]  # what came before the common start → its seconds
    seconds: float  # from the common start (after the first passes) to the end of the last drafter, or to the hang
    forward_graphs: int
    backward_graphs: int
    all_graphs: int
    hung: list[str]  # names of drafter threads
    stacks: dict[str, str]
    memory: int
    gpu_memory: int
    gpu_reserved: int


def run_threads(
    work: Work,
    guard: Guard,
    numbers: Sequence[int],
    directory: Path,
    *,
    ready: Callable[[], None] = lambda: None,
    quiet_seconds: float = 15.0,
    progress: Callable[[list[Drafter]], None] = lambda drafters: None,
) -> Outcome:
    """Train the drafters `numbers`. `ready` is called when all have done a first pass; they begin when it returns.

    Logs go to `directory`. Raises `DflashError` when they cannot begin.
    """
    directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(work.config.train.threads or 1)
    start, clock = {}, _Laps()
    backend, turns = CountingBackend(work.backend), guard.turns()
    with contextlib.ExitStack() as stack:
        stack.enter_context(guard.installed())
        start["guard"] = clock.lap()
        rows = stack.enter_context(open_rows(work, list(numbers)))
        drafters = [one.build(work, number, rows, turns(), backend) for number in numbers]
        for drafter in drafters:
            stack.enter_context(drafter.rows)
            rows.sources[drafter.number].schedule(one.rows_of(work))
        start["drafters"] = clock.lap()
        crew = _Crew(drafters, guard, directory)
        graphs = counters["stats"]["unique_graphs"]
        hung = crew.warm_up(HangWatch(quiet_seconds))
        if not hung:
            start["first passes"] = clock.lap()
            ready()
            crew.begin(work.seconds)
            hung = crew.wait(HangWatch(quiet_seconds), progress)
        outcome = Outcome(
            devices={work.devices[number]: _name(work.devices[number]) for number in numbers},
            start=start,
            seconds=crew.seconds,
            forward_graphs=backend.forward,
            backward_graphs=backend.backward,
            all_graphs=counters["stats"]["unique_graphs"] - graphs,
            hung=hung,
            stacks=stacks(lambda name: name in hung or name.startswith("autograd")) if hung else {},
            memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            **_gpu(work, numbers),
        )
        if hung:  # nothing of it can be closed any more: a stuck thread may hold the very lock that closing needs
            _abandoned.append(stack.pop_all())
    return outcome


class _Laps:
    """Seconds since the lap before."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def lap(self) -> float:
        before, self._since = self._since, time.monotonic()
        return self._since - before


class _Crew:
    """The drafter threads: they warm up, wait for each other, and train."""

    def __init__(self, drafters: list[Drafter], guard: Guard, directory: Path) -> None:
        self._drafters, self._guard = drafters, guard
        self._logs = {d.number: LogWriter(log_file(directory, d.number)) for d in drafters}
        self._warm = threading.Semaphore(0)
        self._go = threading.Event()
        self._started, self._deadline = time.monotonic(), float("inf")
        self._failed: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(drafter,), name=f"drafter {drafter.number}", daemon=True)
            for drafter in drafters
        ]

    def warm_up(self, watch: HangWatch) -> list[str]:
        """Start all threads and wait until each has done its first pass. Names of those that hang."""
        for drafter in self._drafters:
            one.prepare_device(drafter.trainer.world.device)
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            while not self._warm.acquire(timeout=_TICK_SECONDS):
                if self._hang(watch):
                    return self._alive()
        self._raise_failure()
        return []

    def begin(self, seconds: float | None) -> None:
        """Let them go together."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._started = time.monotonic()
        if seconds is not None:
            self._deadline = self._started + seconds
        for log in self._logs.values():
            log.begin(self._started)
        self._go.set()

    def wait(self, watch: HangWatch, progress: Callable[[list[Drafter]], None]) -> list[str]:
        """Wait for the end of all. Names of the threads that hang."""
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_TICK_SECONDS)
                progress(self._drafters)
                if self._hang(watch):
                    return self._alive()
        self._raise_failure()
        return []

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def _hang(self, watch: HangWatch) -> bool:
        return watch.hung(max(log.last_event for log in self._logs.values()))

    def _alive(self) -> list[str]:
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _raise_failure(self) -> None:
        if self._failed:
            raise self._failed[0]

    def _run(self, drafter: Drafter) -> None:
        log = self._logs[drafter.number]
        try:
            with log:
                one.prepare_thread(drafter.trainer.world.device)
                warm = one.warm_up_first(drafter, self._guard, log)
                self._warm.release()
                self._go.wait()
                if warm:
                    one.train(drafter, log, lambda: time.monotonic() >= self._deadline)
        except BaseException as error:
            self._failed.append(error)
            self._warm.release()


def _name(device: str) -> str:
    return "CPU" if device == "cpu" else torch.cuda.get_device_name(device)


def _gpu(work: Work, numbers: Sequence[int]) -> dict[str, int]:
    devices = {torch.device(work.devices[number]) for number in numbers}
    used = reserved = 0
    for device in devices:
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            used += total - free
            reserved += torch.cuda.max_memory_reserved(device)
    return {"gpu_memory": used, "gpu_reserved": reserved}
