"""Which side of the run waits: what the drafters could take, measured without their waits, beside what the feeders could make.

A rank that waits for a row holds up all others in the next collective, so a step lost what its longest-waiting rank lost.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from dflash_mp.config import TrainConfig
from dflash_mp.split import Batch, Split, advice
from dflash_mp.stream.pace import FeedersPace

_ADVICE_SECONDS = 60.0


class RowWaits:
    """Seconds of one step in which this rank's device had nothing to do because a row was missing.

    The host runs ahead of a GPU, so there its waits are not the GPU's: what counts is the gap between two pieces of the GPU's work.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for rows."""
        if self._on_cuda:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self._gaps.append((before, after))
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started

    def seconds(self) -> float:
        """The sum so far. On CUDA it waits for the work that was queued before the last gap's end."""
        if self._gaps:
            self._gaps[-1][1].synchronize()
        return self._seconds + sum(before.elapsed_time(after) for before, after in self._gaps) / 1000


class Balance:
    """Both sides' capacity, over the last interval and over the run. `feeding` says what the feeders could make."""

    def __init__(self, train: TrainConfig, ranks: int, feeding: Callable[[], FeedersPace | None]) -> None:
        self._batch, self._ranks, self._feeding = Batch(train.rows_per_step, train.micro_batch_rows), ranks, feeding
        self._said = time.monotonic()
        self._steps = self._busy = 0.0
        self._interval_steps = self._interval_busy = 0.0

    def add(self, seconds: float, waited: float) -> None:
        """A step took `seconds`, of which its longest-waiting rank waited `waited` for rows."""
        busy = max(seconds - waited, 1e-9)
        self._steps, self._busy = self._steps + 1, self._busy + busy
        self._interval_steps, self._interval_busy = self._interval_steps + 1, self._interval_busy + busy

    def take(self) -> dict[str, float]:
        """Figures of the steps since the last call."""
        if not self._interval_steps:
            return {}
        figures = {"drafters_rows_per_second": self._batch.rows_per_step * self._interval_steps / self._interval_busy}
        self._interval_steps = self._interval_busy = 0.0
        feeding = self._feeding()
        if feeding is not None and feeding.rows_per_second is not None:
            figures["feeders_rows_per_second"] = feeding.rows_per_second
            figures["feeders"] = float(feeding.feeders)
        return figures

    def advice(self, at_end: bool = True) -> str | None:
        """Who waits, and which split would balance, over the run so far; None before anything is known, and within a minute unless `at_end`."""
        feeding, now = self._feeding(), time.monotonic()
        if not self._steps or feeding is None or feeding.rows_per_second is None:
            return None
        if not at_end and now - self._said < _ADVICE_SECONDS:
            return None
        self._said = now
        takes = self._batch.rows_per_step * self._steps / self._busy
        return advice(Split(feeding.feeders, self._ranks, feeding.rows_per_second, takes), self._batch)
