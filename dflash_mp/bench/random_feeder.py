"""`python -m dflash_mp.bench.random_feeder --config FILE --index I`: `dflash-mp feed` with a target of random weights.

All but the weights is that of the real command: target.path holds config and tokenizer, the dataset is a prepared one.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import click

from dflash_mp import logs
from dflash_mp.errors import DflashError
from dflash_mp.options import Command, config_options, load, log_options, start_logs


@click.command(cls=Command)
@config_options
@click.option("--index", default=0, type=click.IntRange(0), help="Which of the run's feeders this is.")
@log_options
def main(config_file: Path, overrides: tuple[str, ...], index: int) -> None:
    """Be a feeder whose target has random weights."""
    config = load(config_file, overrides).config
    from dflash_mp.bench.random_target import random_target
    from dflash_mp.target.feed import feed

    start_logs("feeder", index)
    try:
        feed(config, index, random_target)
    except DflashError as error:
        logging.getLogger("dflash_mp.feed").error("%s", error, extra=logs.facts("failed", exit_code=error.exit_code))
        sys.stderr.flush()
        os._exit(error.exit_code)


if __name__ == "__main__":
    main()
