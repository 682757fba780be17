"""What a comparison found: figures per mode, as a table, as JSON and as a picture.

Losses are compared step by step and drafter by drafter with those of the processes, over the steps that both completed: bit for bit, with
the largest relative difference when they are not the same. A mode may complete fewer steps than the processes and still have the same losses.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dflash_mp import __version__
from dflash_mp.errors import ConfigError
from dflash_mp.threads.compare import PROCESSES, ModeResult
from dflash_mp.threads.work import Work

JSON, TABLE, PICTURE = "compare.json", "compare.md", "compare.png"
_MIB = 1 << 20


@dataclass(frozen=True)
class Figures:
    """One mode's figures. Rates are of all drafters together; memory in MiB, of all its processes together."""

    mode: str
    steps: int
    steps_per_second: float
    late_steps_per_second: float  # in the second half of the time
    median_milliseconds: float
    p95_milliseconds: float
    errors: dict[str, int]
    tracebacks: dict[str, str]  # the first of each kind
    hung: dict[str, str]
    graphs: int  # compiled by Dynamo, all threads and processes
    graphs_in_backward: int  # of the layers, asked for by a recomputation in a backward pass
    eager_calls: int
    memory: float
    gpu_memory: float
    losses: str
    start_seconds: float
    seconds: float
    failure: str


def figures_of(result: ModeResult, reference: ModeResult | None) -> Figures:
    """The figures of `result`; losses compared with `reference`, the processes."""
    steps = [step for log in result.logs.values() for step in log.steps]
    outcomes = [outcome for outcome in result.outcomes if outcome is not None]
    milliseconds = sorted(step.seconds * 1e3 for step in steps)
    errors: Counter[str] = Counter()
    tracebacks: dict[str, str] = {}
    for log in result.logs.values():
        errors.update(log.errors)
        tracebacks = {**log.tracebacks, **tracebacks}
    half = result.seconds / 2
    return Figures(
        mode=result.mode,
        steps=len(steps),
        steps_per_second=len(steps) / result.seconds if result.seconds else 0.0,
        late_steps_per_second=sum(step.at > half for step in steps) / half if half else 0.0,
        median_milliseconds=statistics.median(milliseconds) if steps else 0.0,
        p95_milliseconds=milliseconds[min(len(steps) - 1, int(0.95 * len(steps)))] if steps else 0.0,
        errors=dict(errors),
        tracebacks=tracebacks,
        hung=result.hung,
        graphs=sum(outcome["all_graphs"] for outcome in outcomes),
        graphs_in_backward=sum(outcome["backward_graphs"] for outcome in outcomes),
        eager_calls=sum(step.eager for step in steps),
        memory=sum(outcome["memory"] for outcome in outcomes) / _MIB,
        gpu_memory=max((outcome["gpu_memory"] for outcome in outcomes), default=0) / _MIB,
        losses=compare_losses(result, reference),
        start_seconds=result.start_seconds,
        seconds=result.seconds,
        failure=result.failure,
    )


def compare_losses(result: ModeResult, reference: ModeResult | None) -> str:
    """How the losses of two modes relate, in a few words.

    Where they are not the same: the lowest step that differs, and the largest difference relative to the reference's loss, with its place.
    """
    if reference is None:
        return "no processes to compare with"
    if result.mode == reference.mode:
        return "the reference"
    differences: dict[tuple[int, int], float] = {}  # by step and drafter
    for number, log in result.logs.items():
        there = {step.step: step.loss for step in reference.logs[number].steps}
        for step in log.steps:
            if step.step in there:
                differences[step.step, number] = _relative(step.loss, there[step.step])
    if not differences:
        return "no step in common"
    apart = [place for place, difference in differences.items() if difference]
    if not apart:
        return f"same bits in {len(differences)} steps"
    worst = max(apart, key=differences.__getitem__)
    return f"differ from {_place(min(apart))} on, by up to {differences[worst]:.1e} ({_place(worst)})"


def _relative(loss: float, reference: float) -> float:
    """0 only for the same number; infinite when one of them is no number."""
    if loss == reference or (math.isnan(loss) and math.isnan(reference)):
        return 0.0
    difference = abs(loss - reference) / max(abs(reference), 1e-30)
    return math.inf if math.isnan(difference) else difference


def _place(place: tuple[int, int]) -> str:
    step, number = place
    return f"drafter {number}, step {step}"


def all_figures(results: Sequence[ModeResult]) -> list[Figures]:
    """Figures of all modes, losses compared with PROCESSES where they were run."""
    reference = next((result for result in results if result.mode == PROCESSES), None)
    return [figures_of(result, reference) for result in results]


_COLUMNS = (
    "mode", "steps", "steps/s", "× full-lock", "median ms", "p95 ms", "errors", "hung",
    "graphs", "in backward", "eager", "MiB", "GPU MiB",
)  # fmt: skip


def cells(figures: Sequence[Figures]) -> list[tuple[str, ...]]:
    """The table's rows, as text; "?" where a process was killed before it could tell."""
    base = next((f.steps_per_second for f in figures if f.mode == "full-lock"), 0.0)
    return [
        (
            f.mode,
            str(f.steps),
            f"{f.steps_per_second:.2f}",
            f"{f.steps_per_second / base:.2f}" if base else "–",
            f"{f.median_milliseconds:.0f}",
            f"{f.p95_milliseconds:.0f}",
            str(sum(f.errors.values())),
            str(sum(not name.startswith("autograd") for name in f.hung)),
            *((str(f.graphs), str(f.graphs_in_backward)) if f.memory else ("?", "?")),
            str(f.eager_calls),
            *((f"{f.memory:.0f}", f"{f.gpu_memory:.0f}") if f.memory else ("?", "?")),
        )
        for f in figures
    ]


def notes(figures: Sequence[Figures]) -> list[str]:
    """A line per mode: its losses, its kinds of errors, why it could not begin."""
    lines = []
    for f in figures:
        parts = [f"losses: {f.losses}", *(f"{count} × {kind}" for kind, count in sorted(f.errors.items()))]
        lines.append(f"{f.mode}: " + "; ".join(parts) + (f"; {f.failure.splitlines()[0]}" if f.failure else ""))
    return lines


def table(figures: Sequence[Figures], title: str) -> Table:
    """For a terminal of 110 columns."""
    view = Table(title=title, title_justify="left", padding=(0, 0))
    for number, name in enumerate(_COLUMNS):
        view.add_column(name, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in cells(figures):
        view.add_row(*row)
    return view


def markdown(figures: Sequence[Figures], title: str) -> str:
    """For a document: the table and the notes."""
    lines = [title, "", "| " + " | ".join(_COLUMNS) + " |", "|" + " --- |" * len(_COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in cells(figures)]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes(figures))]) + "\n"


def heading(work: Work, results: Sequence[ModeResult]) -> str:
    """What was compared, and on what: the devices as the processes named them, so that the comparison itself uses none."""
    found = {
        k: v for result in results for outcome in result.outcomes if outcome for k, v in outcome["devices"].items()
    }
    names = [found.get(device, _unnamed(device)) for device in dict.fromkeys(work.devices)]
    lengths = f"{work.vary:.0%} of the micro-batches of another length" if work.vary else "fixed lengths"
    until = f"{work.seconds:g} s per mode" if work.seconds else f"{work.config.train.steps} steps per drafter"
    options = work.config.train
    return (
        f"{work.drafters} drafters of {work.config.drafter.layers} layers on {', '.join(names)} ({', '.join(work.devices)}), "
        f"{work.backend}, checkpointing {'on' if options.gradient_checkpointing else 'off'}, {lengths}, {until}; "
        f"dflash-mp {__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}"
    )


def _unnamed(device: str) -> str:
    """A device that no process has named, because none came to an end."""
    return "CPU" if torch.device(device).type == "cpu" else "an unknown GPU"


def remove(directory: Path) -> None:
    """Remove what an earlier comparison reported there."""
    for name in (JSON, TABLE, PICTURE):
        (directory / name).unlink(missing_ok=True)


def write(directory: Path, work: Work, results: Sequence[ModeResult]) -> None:
    """Write JSON (figures, tracebacks, stacks, each drafter's steps) and table of the modes so far; a reader finds whole files."""
    figures, title = all_figures(results), heading(work, results)
    for name, text in (
        (JSON, _json(title, work, results, figures)),
        (TABLE, markdown(figures, title)),
    ):
        part = directory / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(directory / name)


def _json(title: str, work: Work, results: Sequence[ModeResult], figures: Sequence[Figures]) -> str:
    modes: list[dict[str, Any]] = []
    for result, one in zip(results, figures, strict=True):
        logs = {str(number): [asdict(step) for step in log.steps] for number, log in result.logs.items()}
        modes.append({**asdict(one), "drafters": logs, "processes": result.outcomes})
    return json.dumps({"what": title, "work": json.loads(work.to_json()), "modes": modes}, indent=1)


def require_plot() -> None:
    """Raises `ConfigError` when matplotlib is missing: before the work, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "the picture needs matplotlib", "pip install 'dflash-mp[compare]', or give --no-plot"
        ) from None


def plot(file: Path, results: Sequence[ModeResult], figures: Sequence[Figures], title: str) -> None:
    """Left: completed steps over time; a hang is a line that ends. Right: steps per second, with errors and hangs."""
    import textwrap

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(picture)
    over_time, rates = picture.subplots(1, 2)
    for result in results:
        ends = sorted(step.at for log in result.logs.values() for step in log.steps)
        style = {"linewidth": 2.5} if result.mode == PROCESSES else {}
        over_time.step([0.0, *ends], range(len(ends) + 1), where="post", label=result.mode, **style)
    over_time.set(xlabel="seconds", ylabel="steps completed, all drafters")
    over_time.legend()
    names = [one.mode for one in figures]
    bad = [bool(one.errors or one.hung or one.failure) for one in figures]
    bars = rates.barh(names, [one.steps_per_second for one in figures], color=["C3" if b else "C2" for b in bad])
    notes = [
        ", ".join([f"{sum(one.errors.values())} errors"] * bool(one.errors) + ["hung"] * bool(one.hung))
        for one in figures
    ]
    rates.bar_label(bars, notes, padding=4)
    rates.invert_yaxis()
    rates.set(xlabel="steps per second, all drafters")
    rates.margins(x=0.25)
    picture.suptitle("\n".join(textwrap.wrap(title, 150)), fontsize=9)
    picture.savefig(file, dpi=120)
