"""The commands of the comparison mode: `dflash-mp threads` and `dflash-mp compare`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from dflash_mp.config import RunConfig
from dflash_mp.errors import ConfigError, DflashError
from dflash_mp.threads import report
from dflash_mp.threads.compare import PROCESSES, Limits, compare
from dflash_mp.threads.drafter import Drafter
from dflash_mp.threads.guards import GUARDS, guard_named
from dflash_mp.threads.log import log_file, read_log
from dflash_mp.threads.pipeline import run_threads
from dflash_mp.threads.work import SCALES, RowsFrom, Work, synthetic_plan, synthetic_work

_logger = logging.getLogger(__name__)

_LOG_COLUMNS = 120
MODES = (*GUARDS, PROCESSES)


class SomethingFailed(DflashError):
    """Threads met errors or hang. The report says which."""


def train_threads(
    config: RunConfig,
    *,
    drafters: int,
    guard: str,
    rows: RowsFrom,
    vary: float,
    seconds: float | None,
    gpus: str | None,
    backend: str | None,
    console: Console,
) -> None:
    """Train `drafters` drafters of `config` as threads of this process. Raises `SomethingFailed` after errors; a hang ends the process."""
    devices = devices_for(drafters, gpus, config.train.device)
    work = Work(
        config=config,
        rows=rows,
        plan=synthetic_plan(SCALES["quick"], config.seed, "float32", config.data.row_tokens)
        if rows == "synthetic"
        else None,
        drafters=drafters,
        devices=devices,
        backend=backend or ("inductor" if devices[0] != "cpu" else "aot_eager"),
        vary=vary,
        seconds=seconds,
    )
    directory = config.run_dir / "threads"
    console.print(f"{drafters} drafters as threads on {', '.join(devices)}, guard {guard}: {guard_named(guard).says}")
    shown = _Progress(console, config.train.log_every)
    outcome = run_threads(work, guard_named(guard), range(drafters), directory, progress=shown)
    errors = 0
    for number in range(drafters):
        log = read_log(log_file(directory, number))
        errors += sum(log.errors.values())
        last = f", last loss {log.steps[-1].loss:.4f}" if log.steps else ""
        console.print(f"drafter {number}: {len(log.steps)} steps{last}", markup=False)
        for kind, count in log.errors.items():
            console.print(f"  {count} × {kind}\n{log.tracebacks.get(kind, '')}", markup=False)
    for name, stack in outcome.stacks.items():
        console.print(f"{name} hangs at\n{stack}", markup=False)
    if outcome.hung:
        console.print(f"{', '.join(outcome.hung)} hang; this process ends here", markup=False)
        sys.stdout.flush()
        os._exit(SomethingFailed.exit_code)
    if errors:
        raise SomethingFailed(
            f"{errors} steps failed under the guard {guard}", "see docs/race.md; `dflash-mp run` uses processes"
        )


def run_compare(
    *,
    scale: str,
    modes: Sequence[str],
    drafters: int,
    gpus: str | None,
    seconds: float | None,
    steps: int | None,
    vary: float | None,
    out: Path,
    with_plot: bool,
    console: Console,
) -> None:
    """Compare `modes` (none: all) on synthetic rows, and write table and JSON to `out` after each mode, and a picture at the end."""
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise ConfigError(f"there is no mode {unknown[0]!r}", f"choose from {', '.join(MODES)}")
    if with_plot:
        report.require_plot()
    devices = devices_for(drafters, gpus, "cuda" if scale == "gpu" else "cpu")
    limits: dict[str, int] = {} if steps is None else {"steps": steps}
    work = synthetic_work(
        SCALES[scale], out / "run", drafters=drafters, devices=devices, seconds=seconds, vary=vary, **limits
    )
    report.remove(out)
    results = compare(
        work,
        list(modes) or list(MODES),
        out,
        limits=Limits(),
        say=_logger.info,
        after=lambda results: report.write(out, work, results),
    )
    figures, title = report.all_figures(results), report.heading(work, results)
    if not console.is_terminal:
        console.width = _LOG_COLUMNS
    console.print(report.table(figures, title))
    for note in report.notes(figures):
        console.print(note, markup=False)
    if with_plot:
        report.plot(out / report.PICTURE, results, figures, title)
    console.print(", ".join([str(out / report.JSON), report.TABLE, *[report.PICTURE] * with_plot]), markup=False)


def devices_for(drafters: int, gpus: str | None, device: str) -> tuple[str, ...]:
    """The device of each drafter: `gpus` ("0,1") in turn, else the first GPU, or the CPU. Raises `ConfigError`."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return ("cpu",) * drafters
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device can be used", "compare on the CPU with --quick")
    try:
        numbers = [int(part) for part in (gpus or "0").split(",")]
    except ValueError:
        raise ConfigError(f"--gpus {gpus!r} is not a list of numbers", "for example --gpus 0,1") from None
    missing = [number for number in numbers if not 0 <= number < torch.cuda.device_count()]
    if missing:
        raise ConfigError(f"there is no GPU {missing[0]}: {torch.cuda.device_count()} can be used", "correct --gpus")
    return tuple(f"cuda:{numbers[i % len(numbers)]}" for i in range(drafters))


class _Progress:
    """Prints a line per drafter every `every` steps."""

    def __init__(self, console: Console, every: int) -> None:
        self._console, self._every, self._shown = console, every, dict[int, int]()

    def __call__(self, drafters: list[Drafter]) -> None:
        for drafter in drafters:
            step = drafter.trainer.step
            if step - self._shown.get(drafter.number, 0) >= self._every:
                self._shown[drafter.number] = step
                self._console.print(f"drafter {drafter.number}: step {step}", markup=False)
