"""What `bench end-to-end` found, as figures, in words and for JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

import torch

from dflash_mp.bench.end_to_end_place import Processes
from dflash_mp.bench.training_watch import Training


@dataclass(frozen=True)
class ProcessFigures:
    """One process of the whole run. Shares are of the time measured; `waits` by what was waited for."""

    name: str
    device: str
    computing: float
    waits: dict[str, float]
    gpu_peak_bytes: int
    compilations: int
    lane: str = ""  # a rank's, to the feeder that it connected to last

    def line(self) -> str:
        waits = ", ".join(f"{share:.1%} {what}" for what, share in self.waits.items())
        memory = f", GPU memory {self.gpu_peak_bytes / 2**30:.1f} GiB at most" if self.gpu_peak_bytes else ""
        lane = f", lane {self.lane}" if self.lane else ""
        return f"{self.name} on {self.device}: computing {self.computing:.1%}; waits: {waits}{memory}, {self.compilations} compilations{lane}"


@dataclass(frozen=True)
class Restart:
    """What killing a feeder and starting it again at once cost. Times in seconds."""

    down: float  # from the kill until it served again
    longest_step: float
    lost: float  # of training at the pace before
    rows_per_second_after: float  # of the steps that began once it served again
    retries: int  # rows that had to be asked for again
    recompilations: int

    def line(self) -> str:
        return (
            f"a feeder killed: it served again after {self.down:.1f} s, the longest step took {self.longest_step:.1f} s, "
            f"{self.lost:.1f} s of training were lost, {self.retries} rows asked for again, then {self.rows_per_second_after:.2f} rows/s; "
            f"{self.recompilations} recompilations"
        )


@dataclass(frozen=True)
class EndToEnd:
    """The result. Rates in rows per second."""

    case: str
    processes: Processes
    gpu: str
    rows_per_step: int
    row_tokens: int
    feeders_alone: float
    drafter_alone: Training
    drafters_together: Training | None
    whole: Training
    figures: tuple[ProcessFigures, ...]
    restart: Restart | None
    start_seconds: dict[str, float] = field(default_factory=dict)  # by what was started
    warnings: tuple[str, ...] = ()  # of the processes' logs, those before a feeder was killed

    @property
    def slower_side(self) -> float:
        """The smaller of the feeders' rate and as many times one drafter's."""
        return min(self.feeders_alone, len(self.processes.drafters) * self.drafter_alone.rows_per_second)

    @property
    def ratio(self) -> float:
        return self.whole.rows_per_second / self.slower_side

    @property
    def sharing_bound(self) -> float:
        """The rate at which the busiest GPU would have no time left, if its processes shared it without loss; at most the slower side's."""
        feeders, drafters = self.processes.feeders, self.processes.drafters
        of_all = len(drafters) * self.drafter_alone.rows_per_second
        seconds_per_row = [
            (1 / self.feeders_alone if device in feeders else 0.0) + drafters.count(device) / of_all
            for device in {*feeders, *drafters} - {"cpu"}
        ]
        return min([self.slower_side, *(1 / seconds for seconds in seconds_per_row)])

    def lines(self) -> list[str]:
        """The result in words."""
        count, alone = len(self.processes.drafters), self.drafter_alone
        lines = [
            f"{self.case}, {self.gpu or 'CPU'}: rows of {self.row_tokens} tokens, {self.rows_per_step} in a step; feeders on "
            f"{', '.join(self.processes.feeders)}, drafters on {', '.join(self.processes.drafters)}",
            f"feeders alone      {self.feeders_alone:9.2f} rows/s",
            f"one drafter alone  {described(alone)}; times {count}: {count * alone.rows_per_second:.2f} rows/s",
        ]
        if self.drafters_together is not None:
            scaling = self.drafters_together.rows_per_second / (count * alone.rows_per_second)
            lines.append(
                f"{count} drafters alone   {described(self.drafters_together)}: {scaling:.1%} of {count} times one"
            )
        lines += [
            f"the whole run      {described(self.whole)}",
            f"ratio to the slower side's {self.slower_side:.2f} rows/s: {self.ratio:.1%} (goal: at least 90%)",
        ]
        if self.sharing_bound < 0.999 * self.slower_side:
            lines.append(
                f"processes share a device, which allows {self.sharing_bound:.2f} rows/s: "
                f"{self.whole.rows_per_second / self.sharing_bound:.1%} of that"
            )
        lines += [f"  {figures.line()}" for figures in self.figures]
        lines.append(
            f"the drafters' devices waited for rows {max(self.whole.wait_shares):.2%} of the time at most (goal, when the "
            f"feeders keep up: 1%); {self.whole.recompilations} recompilations since the warm-up"
        )
        if self.restart is not None:
            lines.append(self.restart.line())
        if self.warnings:
            lines.append("with warnings; a side that is slower than it could be makes a good ratio:")
        lines += [f"  {warning}" for warning in self.warnings]
        return lines

    def tree(self) -> dict[str, Any]:
        """For JSON."""
        derived = {"slower_side": self.slower_side, "ratio": self.ratio, "sharing_bound": self.sharing_bound}
        return {"complete": True, **asdict(self), **derived, "torch": torch.__version__}


class Progress:
    """What is known so far: each find is said when it comes, and all of them are given to `save`."""

    def __init__(
        self, case: str, processes: Processes, say: Callable[[str], None], save: Callable[[dict[str, Any]], None]
    ) -> None:
        self.say = say
        self.start_seconds: dict[str, float] = {}
        self._save = save
        self._tree: dict[str, Any] = {
            "complete": False,
            "case": case,
            "processes": asdict(processes),
            "start_seconds": self.start_seconds,
        }

    def started(self, what: str, seconds: float) -> None:
        """So long it took."""
        self.start_seconds[what] = seconds
        self.say(f"  started in {seconds:.1f} s")
        self._save(self._tree)

    def found(self, name: str, value: Any, text: str) -> None:
        """A figure of the result, in words and as it is."""
        self.say(text)
        self._tree[name] = _plain(value)
        self._save(self._tree)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def described(training: Training) -> str:
    """In words."""
    return (
        f"{training.rows_per_second:9.2f} rows/s; a step takes {training.step_median:.3f} s "
        f"(95th percentile {training.step_p95:.3f}) in {training.steps} steps of {training.seconds:.0f} s"
    )
