"""`dflash-mp`: the group of all commands, and what becomes of their errors. The commands are in `dflash_mp.commands`."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from dflash_mp import __version__, logs
from dflash_mp.commands.bench import bench
from dflash_mp.commands.comparison import compare, threads
from dflash_mp.commands.doctor import doctor
from dflash_mp.commands.health import health, trained
from dflash_mp.commands.regenerate import regenerate
from dflash_mp.commands.results import demo, evaluate, export, generate
from dflash_mp.commands.training import feed, keygen, prepare, run
from dflash_mp.commands.watching import report, top
from dflash_mp.errors import DflashError
from dflash_mp.options import Group

log = logging.getLogger("dflash_mp.cli")


class _Main(Group):
    """Prints a `DflashError` as text, without a traceback, and exits with its code. A part of a run, and a log in JSON, say it in the log."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DflashError as error:
            if logs.tells_errors():
                log.error("%s", error, extra=logs.facts("failed", exit_code=error.exit_code))
            else:
                click.secho(f"dflash-mp: {logs.redacted(str(error))}", fg="red", err=True)
            sys.exit(error.exit_code)


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dflash-mp")
def main() -> None:
    """Train DFlash drafters for your target model."""


for _command in (
    doctor,
    demo,
    regenerate,
    prepare,
    feed,
    keygen,
    run,
    export,
    evaluate,
    generate,
    threads,
    compare,
    bench,
    top,
    report,
    health,
    trained,
):
    main.add_command(_command)


if __name__ == "__main__":
    main()
