"""Commands that look at a run: `top` while it goes on, `report` at any time."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dflash_mp.options import Command, FiniteRange, load, optional_config_options


@click.command(
    cls=Command,
    examples=(
        "dflash-mp top -c run.yaml    # the feeders, and this host's ranks",
        "dflash-mp top --endpoint 10.0.0.5:17400 --endpoint 10.0.0.6:17500",
        "dflash-mp top -c run.yaml --once | grep waits",
    ),
)
@optional_config_options("Watch this run's processes.")
@click.option(
    "--endpoint", "endpoints", multiple=True, metavar="HOST:PORT", help="Watch these instead; may be repeated."
)
@click.option("--once", "only_once", is_flag=True, help="Print one picture and end; exit code 1 if nothing answers.")
@click.option(
    "--seconds",
    default=2.0,
    show_default=True,
    type=FiniteRange(0.1),
    help="Between two readings, which rates are taken from.",
)
def top(
    config_file: Path | None, overrides: tuple[str, ...], endpoints: tuple[str, ...], only_once: bool, seconds: float
) -> None:
    """Watch a running job: feeders, ranks, who waits, rates, the last warnings and errors."""
    from rich.console import Console

    from dflash_mp.calibration import with_kept_split
    from dflash_mp.monitor.scrape import Scraper, endpoints_of
    from dflash_mp.monitor.top import once, watch

    if not endpoints:
        if config_file is None:
            raise click.UsageError("give --config or --endpoint")
        endpoints = tuple(endpoints_of(with_kept_split(load(config_file, overrides).config)))
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=180)
    scraper = Scraper(endpoints)
    if not only_once:
        watch(scraper, console, seconds)
    elif not once(scraper, console, seconds):
        sys.exit(1)


@click.command(
    cls=Command,
    examples=(
        "dflash-mp report runs/qwen3-8b",
        "dflash-mp report runs/qwen3-8b --eval figures.json -o qwen3-8b.html",
    ),
)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; default: report.html in RUN.",
)
@click.option(
    "--eval",
    "evaluations",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file that `dflash-mp eval --json` wrote; those in RUN and RUN/eval are found anyway.",
)
def report(run: Path, out: Path | None, evaluations: tuple[Path, ...]) -> None:
    """Write one HTML page about RUN, whether it ended, goes on, or was cut short."""
    from dflash_mp.monitor.page import write_report

    file = out or run / "report.html"
    record = write_report(run, file, evaluations)
    click.echo(f"{file}: {len(record.train)} lines of figures up to step {record.last_step}")
