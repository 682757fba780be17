"""Watching a training from outside: what `metrics.jsonl` and the metrics endpoints of its processes say, over a window of time.

Nothing is asked of the processes that every run doesn't show anyway. What ends early, or shows nothing in time, is a `DflashError` with
the last lines of its log.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mp.errors import DflashError
from dflash_mp.monitor.scrape import Reading, Scraper
from dflash_mp.supervisor import Running

_TICK_SECONDS = 0.1
_SAY_SECONDS = 15.0  # between two looks at what the processes are at


@dataclass(frozen=True)
class StepLine:
    """What rank 0 wrote after a step. `time`: seconds since the epoch; `waits`: seconds in which each rank's device lacked rows."""

    step: int
    time: float
    waits: tuple[float, ...]
    recompilations: int


@dataclass(frozen=True)
class Training:
    """Steps between two moments. Times in seconds."""

    steps: int
    seconds: float
    rows_per_second: float
    step_median: float
    step_p95: float
    longest_step: float
    wait_shares: tuple[float, ...]  # of the time that each rank's device lacked rows
    recompilations: int  # since the warm-up

    @staticmethod
    def of(lines: Sequence[StepLine], rows_per_step: int) -> Training:
        """From the end of the first of `lines` to that of the last."""
        times = [after.time - before.time for before, after in itertools.pairwise(lines)]
        if not times:
            raise DflashError("no step ended while it was measured", "measure for longer (--seconds)")
        seconds = sum(times)
        return Training(
            steps=len(times),
            seconds=seconds,
            rows_per_second=rows_per_step * len(times) / seconds,
            step_median=statistics.median(times),
            step_p95=sorted(times)[min(len(times) - 1, int(0.95 * len(times)))],
            longest_step=max(times),
            wait_shares=tuple(sum(waits) / seconds for waits in zip(*(line.waits for line in lines[1:]), strict=True)),
            recompilations=lines[-1].recompilations,
        )


def read_steps(run_dir: Path) -> list[StepLine]:
    """All steps so far; a line that is being written is left out."""
    try:
        text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    trees: list[dict[str, Any]] = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [
        StepLine(tree["step"], tree["time"], tuple(tree["wait_seconds_of_ranks"]), int(tree["recompilations"]))
        for tree in trees
        if tree["kind"] == "train"
    ]


class Watch:
    """Of the processes `running`, one of which trains in `run_dir`. While it waits, `say` gets each one's last line every 15 s."""

    def __init__(
        self, run_dir: Path, running: Sequence[Running], say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._run_dir, self._running, self._say = run_dir, list(running), say

    def until_step(self, step: int, seconds: float) -> None:
        """Wait until so many steps are done. Raises `DflashError` after `seconds`."""
        self.until(lambda: len(read_steps(self._run_dir)) >= step, seconds, f"step {step} was not reached")

    def until_serving(self, feeder: Running, seconds: float) -> None:
        """Wait until the feeder's log says that it serves."""

        def serves() -> bool:
            with feeder.part.log.open("rb") as log:
                log.seek(feeder.log_start)
                return b" serving " in log.read()

        self.until(serves, seconds, f"{feeder.part.name} did not serve")

    def until(self, condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
        """Wait until `condition()`. Raises `DflashError` with `otherwise` after `seconds`, and when a process ends."""
        started = told = time.monotonic()
        while not condition():
            self.check()
            now = time.monotonic()
            if now - told > _SAY_SECONDS:
                told = now
                for one in self._running:
                    self._say(
                        f"  after {now - started:.0f} s, {one.part.name}: {one.last_lines().splitlines()[-1].strip()}"
                    )
            if now > started + seconds:
                last = self._running[-1]
                raise DflashError(
                    f"{otherwise} within {seconds:.0f} s; the last lines of {last.part.name}:\n{last.last_lines()}",
                    "see there; a first compilation can take minutes on a busy machine",
                )
            time.sleep(_TICK_SECONDS)

    def pause(self, seconds: float) -> None:
        """Let them work. Raises `DflashError` when one ends."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.check()
            time.sleep(min(_TICK_SECONDS, left))

    def forget(self, one: Running) -> None:
        """It may end."""
        self._running.remove(one)

    def add(self, one: Running) -> None:
        """It was started later."""
        self._running.insert(0, one)

    def check(self) -> None:
        """Raises `DflashError` if a process has ended."""
        for one in self._running:
            if one.exit_code is not None:
                raise DflashError(
                    f"{one.part.name} ended ({one.state}); its last lines:\n{one.last_lines()}", "see there"
                )


def read_figures(endpoints: Sequence[str]) -> dict[tuple[str, int], Reading]:
    """What the processes show, by role (feeder or drafter) and number. Raises `DflashError` if one shows nothing."""
    readings = Scraper(endpoints, seconds=10.0).read()
    for reading in readings:
        if reading.problem:
            raise DflashError(f"the figures at {reading.endpoint} can't be read: {reading.problem}", "measure again")
    return {(reading.role, reading.index): reading for reading in readings}


def growth(after: Reading, before: Reading, name: str, **labels: str) -> float:
    """How much a counter grew between two readings of one process."""
    return (after.value(name, **labels) or 0.0) - (before.value(name, **labels) or 0.0)
