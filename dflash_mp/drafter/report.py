"""What rank 0 tells about a run: a line in its log, one JSON object per line in `metrics.jsonl`, TensorBoard curves, the figures
behind the metrics endpoint, and trackers elsewhere where they are configured (`dflash_mp.drafter.trackers`).

`metrics.jsonl` is appended to; after a resume, steps that are trained again appear again, and the later line counts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from dflash_mp import logs
from dflash_mp.config import RunConfig
from dflash_mp.drafter.metrics import Figures
from dflash_mp.drafter.trackers import MlflowService, RemoteTracker, Service, WandbService, curves
from dflash_mp.errors import DflashError
from dflash_mp.monitor.training import TrainingRecord

log = logging.getLogger(__name__)


class Reporter:
    """Writes the figures of a run below `run_dir`, and hands them to `record`. On ranks other than 0 it writes nothing."""

    def __init__(
        self, run_dir: Path, enabled: bool, services: Sequence[Service] = (), record: TrainingRecord | None = None
    ) -> None:
        self.enabled = enabled
        self._run_dir = run_dir
        self._record = record or TrainingRecord()
        if enabled:
            with self._writing():
                run_dir.mkdir(parents=True, exist_ok=True)
                self._lines = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
                self._curves = SummaryWriter(str(run_dir / "tensorboard"))
        self._trackers = [RemoteTracker(service) for service in services] if enabled else []

    @staticmethod
    def of(config: RunConfig, enabled: bool, record: TrainingRecord) -> Reporter:
        """The reporter of this run's configuration. Raises `ConfigError` when a tracker's package is missing."""
        services: list[Service] = []
        if enabled and config.train.wandb_project:
            services.append(WandbService(config.run_dir, config.train.wandb_project))
        if enabled and config.train.mlflow_experiment:
            services.append(MlflowService(config.run_dir, config.train.mlflow_experiment))
        return Reporter(config.run_dir, enabled, services, record)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as ends:  # the last one first, and each of them, whatever becomes of the others
            for tracker in self._trackers:
                ends.callback(tracker.close, failed=error is not None)
            if self.enabled:
                first = contextlib.suppress(OSError) if error else self._writing()  # the first error is the one to tell
                ends.enter_context(first)
                ends.callback(self._curves.close)
                ends.callback(self._lines.close)

    def say(self, text: str, event: str = "", **fields: Any) -> None:
        """One line in the log; `event` and `fields` are for machines."""
        if self.enabled:
            log.info("%s", text, extra=logs.facts(event, **fields))

    def step(self, step: int, steps: int, figures: Figures, more: dict[str, Any]) -> None:
        """Figures of the last optimizer step, with `more` (rates, waits, learning rate, gradient norm)."""
        if not self.enabled:
            return
        self._write("train", step, {**figures.public(), **more})
        self.say(
            f"step {step}/{steps}  loss {figures.loss:.4f}  τ {figures.tau:.3f}  accuracy {figures.accuracy:.3f}  "
            f"lr {more['learning_rate']:.2e}  |g| {more['gradient_norm']:.2f}  {more['tokens_per_second']:,.0f} tokens/s  "
            f"waiting {more['wait_share']:.0%}",
            "step",
            **{"step": step, "steps": steps, **figures.public(), **more},
        )

    def held_out(self, step: int, figures: Figures) -> None:
        """Figures of the held-out rows after `step` optimizer steps."""
        if not self.enabled:
            return
        self._write("held_out", step, figures.public())
        self.say(
            f"held-out after step {step}: loss {figures.loss:.4f}  τ {figures.tau:.3f}  accuracy {figures.accuracy:.3f}",
            "held_out",
            **{"step": step, **figures.public()},
        )

    def _write(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        with self._writing():
            self._lines.write(json.dumps({"kind": kind, "step": step, "time": time.time(), **figures}) + "\n")
            self._lines.flush()
            for name, value in curves(figures):
                self._curves.add_scalar(f"{kind}/{name}", value, step)
        self._record.update(kind, figures)
        for tracker in self._trackers:
            tracker.put(kind, step, figures)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DflashError(
                f"cannot write the figures of the run to {self._run_dir}: {error.strerror or error}",
                "free space or permissions there; the same command resumes from the last checkpoint",
            ) from error
