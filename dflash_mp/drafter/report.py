"""What rank 0 tells about a run: a line on the terminal, one JSON object per line in `metrics.jsonl`, TensorBoard curves, and
Weights & Biases when a project is configured.

`metrics.jsonl` is appended to; after a resume, steps that are trained again appear again, and the later line counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from dflash_mp.drafter.metrics import Figures
from dflash_mp.errors import ConfigError, DflashError


class Reporter:
    """Writes the figures of a run below `run_dir`. On ranks other than 0 it writes nothing."""

    def __init__(self, run_dir: Path, enabled: bool, wandb_project: str | None = None) -> None:
        self.enabled = enabled
        self.console = Console(highlight=False, soft_wrap=True)
        self._run_dir = run_dir
        if enabled:
            with self._writing():
                run_dir.mkdir(parents=True, exist_ok=True)
                self._lines = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
                self._curves = SummaryWriter(str(run_dir / "tensorboard"))
        self._wandb = _wandb_run(run_dir, wandb_project) if enabled and wandb_project else None

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            with contextlib.suppress(OSError) if error else self._writing():  # the first error is the one to tell
                self._lines.close()
                self._curves.close()
            if self._wandb is not None:
                self._wandb.finish(exit_code=1 if error else 0)

    def say(self, text: str) -> None:
        """One line on the terminal."""
        if self.enabled:
            self.console.print(text, markup=False)

    def step(self, step: int, steps: int, figures: Figures, more: dict[str, float]) -> None:
        """Figures of the last optimizer step, with `more` (rates, waits, learning rate, gradient norm)."""
        if not self.enabled:
            return
        self._write("train", step, {**figures.public(), **more})
        self.say(
            f"step {step}/{steps}  loss {figures.loss:.4f}  τ {figures.tau:.3f}  accuracy {figures.accuracy:.3f}  "
            f"lr {more['learning_rate']:.2e}  |g| {more['gradient_norm']:.2f}  {more['tokens_per_second']:,.0f} tokens/s  "
            f"waiting {more['wait_share']:.0%}"
        )

    def held_out(self, step: int, figures: Figures) -> None:
        """Figures of the held-out rows after `step` optimizer steps."""
        if not self.enabled:
            return
        self._write("held_out", step, figures.public())
        self.say(
            f"held-out after step {step}: loss {figures.loss:.4f}  τ {figures.tau:.3f}  accuracy {figures.accuracy:.3f}"
        )

    def _write(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        with self._writing():
            self._lines.write(json.dumps({"kind": kind, "step": step, "time": time.time(), **figures}) + "\n")
            self._lines.flush()
        if self._wandb is not None:
            self._wandb.log({f"{kind}/{name}": value for name, value in figures.items()}, step=step)
            for name, value in figures.items():
                if isinstance(value, tuple):
                    for slot, slot_value in enumerate(value, start=1):
                        self._curves.add_scalar(f"{kind}/{name}/{slot:02d}", slot_value, step)
                else:
                    self._curves.add_scalar(f"{kind}/{name}", value, step)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DflashError(
                f"cannot write the figures of the run to {self._run_dir}: {error.strerror or error}",
                "free space or permissions there; the same command resumes from the last checkpoint",
            ) from error


def _wandb_run(run_dir: Path, project: str) -> Any:
    """A Weights & Biases run that a resumed training goes on with. Whether it is online is WANDB_MODE's and the login's affair."""
    try:
        import wandb
    except ModuleNotFoundError:
        raise ConfigError(
            "train.wandb_project is set, but wandb is not installed",
            "pip install 'dflash-mp[wandb]', or leave train.wandb_project out",
        ) from None
    identity = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:12]
    return wandb.init(project=project, name=run_dir.name, id=identity, resume="allow", dir=str(run_dir))
