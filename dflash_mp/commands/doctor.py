"""The command that looks before a run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dflash_mp.options import Command, FiniteRange, load, optional_config_options


@click.command(
    cls=Command,
    examples=(
        "dflash-mp doctor                     # this machine",
        "dflash-mp doctor -c run.yaml         # and whether this run fits it, and its feeders go together",
        "dflash-mp doctor -c run.yaml --rows-per-second 20 --details --json",
    ),
)
@optional_config_options("YAML file of a run.")
@click.option(
    "--rows-per-second",
    type=FiniteRange(min=0, min_open=True),
    help="Rows/s that the stream shall carry; default: what the drafters of this run could take when it ran last.",
)
@click.option(
    "--probe/--no-probe", default=True, show_default=True, help="Measure the path between feeder and drafter."
)
@click.option(
    "--role",
    type=click.Choice(["auto", "both", "feeders", "drafters"]),
    default="auto",
    show_default=True,
    help="What runs on this host; auto: as feed.endpoints tell.",
)
@click.option("--details", is_flag=True, help="Show how memory was reckoned for green lines, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    config_file: Path | None,
    overrides: tuple[str, ...],
    rows_per_second: float | None,
    probe: bool,
    role: str,
    details: bool,
    as_json: bool,
) -> None:
    """Look at this machine, a run's configuration and its feeders before the run. Exit code 0 if nothing is red."""
    if config_file is None and overrides:
        raise click.UsageError("--set needs --config")
    config = None if config_file is None else load(config_file, overrides).config
    from rich.console import Console

    from dflash_mp.doctor import report
    from dflash_mp.doctor.checks import examine
    from dflash_mp.doctor.finding import exit_code

    findings = list(examine(config, rows_per_second, probe, role))
    if as_json:
        click.echo(report.as_json(findings))
    else:
        report.show(findings, Console(), details)
    sys.exit(exit_code(findings))
