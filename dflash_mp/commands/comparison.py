"""`dflash-mp threads` and `dflash-mp compare`: the thread mode that this project replaces."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import click

from dflash_mp.options import Command, FiniteRange, Group, config_options, load, log_options, start_logs

log = logging.getLogger(__name__)


@click.command(
    cls=Command,
    examples=(
        "dflash-mp threads -c run.yaml --rows synthetic --drafters 2 --seconds 30",
        "dflash-mp threads -c run.yaml --guard shim --gpus 0,1",
    ),
)
@config_options
@log_options
@click.option("--drafters", default=3, show_default=True, type=click.IntRange(1), help="Threads that train a drafter.")
@click.option("--guard", default="none", show_default=True, help="What stands between them; see docs/race.md.")
@click.option(
    "--rows",
    type=click.Choice(["stream", "colocated", "synthetic"]),
    default="stream",
    show_default=True,
    help="From the run's feeders, from a target in this process, or made without a target.",
)
@click.option(
    "--vary-lengths",
    "vary",
    default=0.0,
    show_default=True,
    type=FiniteRange(0, 1),
    help="Share of micro-batches of another length.",
)
@click.option("--seconds", type=FiniteRange(min=0, min_open=True), help="Stop after so long; default: train.steps.")
@click.option("--gpus", help="GPUs of the drafters in turn, such as 0 or 0,1; default: the first.")
@click.option("--backend", help="What compiles the layers; default: inductor on CUDA, aot_eager on a CPU.")
def threads(config_file: Path, overrides: tuple[str, ...], **options: Any) -> None:
    """Train drafters as threads of one process: what this project replaces, for comparison."""
    config = load(config_file, overrides).config
    from rich.console import Console

    from dflash_mp.threads.command import train_threads

    start_logs("threads")
    train_threads(config, **options, console=Console())


@click.group(
    cls=Group,
    invoke_without_command=True,
    examples=(
        "dflash-mp compare --quick",
        "dflash-mp compare --gpu --mode none --mode full-lock --mode processes --seconds 25 --out report",
    ),
)
@log_options
@click.option(
    "--quick", "scale", flag_value="quick", default="quick", help="Small drafters on the CPU, minutes (default)."
)
@click.option("--gpu", "scale", flag_value="gpu", help="Real ones on a GPU.")
@click.option("--mode", "modes", multiple=True, help="A guard, or processes; may be repeated. Default: all.")
@click.option("--drafters", default=3, show_default=True, type=click.IntRange(1))
@click.option("--gpus", help="GPUs of the drafters in turn, such as 0 or 0,1; default: the first.")
@click.option("--seconds", type=FiniteRange(min=0, min_open=True), help="Time of each mode.")
@click.option("--steps", type=click.IntRange(1), help="Steps of each drafter, instead of a time.")
@click.option("--vary-lengths", "vary", type=FiniteRange(0, 1), help="Share of micro-batches of another length.")
@click.option(
    "--out", default="compare", show_default=True, type=click.Path(path_type=Path, file_okay=False), help="Directory."
)
@click.option("--plot/--no-plot", "with_plot", default=True, help="Draw compare.png.")
@click.pass_context
def compare(context: click.Context, **options: Any) -> None:
    """Train the same drafters as threads under every guard and as processes, and compare."""
    if context.invoked_subcommand is None:
        from rich.console import Console

        from dflash_mp.threads.command import run_compare

        start_logs("compare")
        run_compare(**options, console=Console())


@compare.command(
    "races",
    examples=(
        "dflash-mp compare races",
        "dflash-mp compare races --json",
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare_races(as_json: bool) -> None:
    """Reproduce each race on demand in this PyTorch: bare, with the older shim, with the shim."""
    from dflash_mp.threads.reproduce import main as reproduce

    reproduce(as_json)


@compare.command("matrix", examples=("dflash-mp compare matrix 2.11.0 2.13.0 --environments race-matrix",))
@log_options
@click.argument("versions", nargs=-1, required=True)
@click.option("--python", default=sys.executable, help="Interpreter to make the environments with.")
@click.option(
    "--environments",
    type=click.Path(path_type=Path, file_okay=False),
    default="race-matrix",
    show_default=True,
    help="Directory that the environments are made in.",
)
def compare_matrix(versions: tuple[str, ...], python: str, environments: Path) -> None:
    """Make an environment for each PyTorch version and reproduce the races in it (3 to 6 GB each)."""
    from dflash_mp.threads.matrix import run_matrix

    start_logs("compare")
    run_matrix(versions, python, environments, log.info)
