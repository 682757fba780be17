"""`torchrun --nproc-per-node N -m dflash_mp.drafter --config FILE`: one process per drafter GPU.

A rank connects to the feeders, takes the target's embedding and head from them, resumes from the newest checkpoint of the run directory if
there is one, and trains to the last step. SIGTERM or SIGINT to any rank: all finish the step, save, and exit 0; a step for which a row
doesn't come in seconds is dropped, a held-out measurement is cut short. A second signal (three seconds or more later), or one before training begins, ends the
process at once, with 128 + signal. Other exit codes are those of `dflash_mp.errors`.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path

import click

from dflash_mp import logs
from dflash_mp.errors import DflashError
from dflash_mp.options import Command, config_options, load, log_options, profile_option, start_logs
from dflash_mp.process import die_with_parent
from dflash_mp.profiling import parse_profile

log = logging.getLogger("dflash_mp.drafter")


@click.command(
    cls=Command,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples=(
        "torchrun --nproc-per-node 4 -m dflash_mp.drafter -c run.yaml",
        "python -m dflash_mp.drafter -c run.yaml --set train.steps=100    # a single rank",
        "torchrun --nproc-per-node 4 -m dflash_mp.drafter -c run.yaml --profile steps=10..15 --profile ranks=0,3",
    ),
)
@config_options
@profile_option
@log_options
def main(config_file: Path, overrides: tuple[str, ...], profile: tuple[str, ...]) -> None:
    """Train a drafter as one of the ranks that torchrun starts."""
    try:
        die_with_parent()
        start_logs("drafter", int(os.environ.get("RANK", "0")))
        config, request = load(config_file, overrides).config, parse_profile(profile)
        gc.disable()  # a seventh of the imports' time, for next to no garbage; `run` enables it again
        from dflash_mp.drafter.rank import run

        run(config, request)
    except DflashError as error:
        log.error("%s", error, extra=logs.facts("failed", exit_code=error.exit_code))
        # Other ranks may sit in a collective that this one will never join; torchrun ends them when this process is gone.
        sys.stderr.flush()
        os._exit(error.exit_code)


if __name__ == "__main__":
    main()
