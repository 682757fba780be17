"""Commands that make a drafter: prepare, feed, run, and keys for feeders on other hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dflash_mp.options import Command, config_options, load, log_options, profile_option, start_logs


@click.command(
    cls=Command,
    examples=(
        "dflash-mp prepare -c run.yaml --show 3    # and look at what is supervised",
        "dflash-mp prepare -c run.yaml --set data.row_tokens=4096 --force",
    ),
)
@config_options
@log_options
@click.option(
    "--show", default=0, metavar="N", help="Print the first N prepared documents with the supervised part marked."
)
@click.option("--force", is_flag=True, help="Replace a prepared dataset that was made with other settings or sources.")
def prepare(config_file: Path, overrides: tuple[str, ...], show: int, force: bool) -> None:
    """Tokenise the documents of data.sources and pack them into rows, at data.path."""
    config = load(config_file, overrides).config
    from dflash_mp.data.report import prepare_and_report
    from dflash_mp.target.tokenizer import load_tokenizer

    start_logs("prepare")
    prepare_and_report(config.data, load_tokenizer(config.target), seed=config.seed, show=show, force=force)


@click.command(
    cls=Command,
    examples=(
        "dflash-mp feed -c run.yaml",
        "dflash-mp feed -c run.yaml --index 1 --set target.device=cuda:1 --log-format json",
    ),
)
@config_options
@log_options
@click.option(
    "--index", default=0, type=click.IntRange(0), show_default=True, help="Which of the run's feeders this is."
)
def feed(config_file: Path, overrides: tuple[str, ...], index: int) -> None:
    """Be a feeder: run the target and serve its rows to drafters."""
    config = load(config_file, overrides).config
    from dflash_mp.target.feed import feed as serve

    start_logs("feeder", index)
    serve(config, index)


@click.command(
    cls=Command,
    examples=(
        "dflash-mp keygen keys                     # feeder.public/.secret and drafter.public/.secret",
        "dflash-mp keygen keys --name feeder",
    ),
)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", help="Make only this pair; default: feeder and drafter.")
def keygen(directory: Path, name: str | None) -> None:
    """Make key pairs in DIR, for stream.keys: feeders and drafters on different hosts."""
    from dflash_mp.stream.keys import keygen as make

    for file in make(directory) if name is None else make(directory, [name]):
        click.echo(f"{file}: {'stays on this host' if file.suffix == '.secret' else 'to be copied to the others'}")


@click.command(
    cls=Command,
    examples=(
        "dflash-mp run -c run.yaml --plan          # every option with its source; starts nothing",
        "dflash-mp run -c run.yaml                 # Ctrl-C saves, the same command resumes",
        "dflash-mp run -c run.yaml --set train.steps=2000 --set train.drafters=4",
        "dflash-mp run -c run.yaml --profile steps=10..15 --profile ranks=0,2",
        "dflash-mp run -c run.yaml --log-format json -q",
    ),
)
@config_options
@profile_option
@log_options
@click.option("--plan", is_flag=True, help="Print every option with its source and the commands, and start nothing.")
def run(config_file: Path, overrides: tuple[str, ...], profile: tuple[str, ...], plan: bool) -> None:
    """Start feeders and drafters on this machine and see them through. The same command resumes."""
    loaded = load(config_file, overrides)
    from dflash_mp import run as launcher

    if plan:
        for line in launcher.describe_plan(loaded, overrides, profile):
            click.echo(line)
    else:
        launcher.run(loaded, overrides, profile, start_logs("run", out=sys.stdout))
