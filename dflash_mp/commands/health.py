"""Commands for what restarts a run: a container engine, a batch system, a service manager."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_mp.options import Command, config_options, load


@click.command(
    cls=Command,
    examples=(
        "dflash-mp health                 # in a container: of what it runs",
        "dflash-mp health --pid 4711      # of a feeder or a torchrun on this host",
    ),
)
@click.option("--pid", default=1, show_default=True, type=click.IntRange(1), help="Process of the feeder or torchrun.")
def health(pid: int) -> None:
    """Say whether a feeder or a group of drafters on this host is well; exit code 1 if it isn't, or isn't ready."""
    from dflash_mp.health import look

    click.echo(look(pid))


@click.command(cls=Command, examples=("dflash-mp trained -c run.yaml || dflash-mp run -c run.yaml",))
@config_options
def trained(config_file: Path, overrides: tuple[str, ...]) -> None:
    """Say whether a run has reached its last step; exit code 75 if it has not, and is to be started again."""
    config = load(config_file, overrides).config
    from dflash_mp.health import trained as look

    click.echo(look(config))
