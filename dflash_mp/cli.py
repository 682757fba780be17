"""`dflash-mp`: the group of all commands, and what becomes of their errors. The commands are in `dflash_mp.commands`."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from dflash_mp import logs
from dflash_mp.commands.bench import bench
from dflash_mp.commands.comparison import compare, threads
from dflash_mp.commands.doctor import doctor
from dflash_mp.commands.health import health, trained
from dflash_mp.commands.pipeline import end_to_end, rows
from dflash_mp.commands.proofs import fuzz, hostile, memory
from dflash_mp.commands.regenerate import regenerate
from dflash_mp.commands.results import demo, evaluate, export, generate
from dflash_mp.commands.training import feed, keygen, prepare, run
from dflash_mp.commands.watching import report, top
from dflash_mp.errors import DflashError
from dflash_mp.options import Group

log = logging.getLogger("dflash_mp.cli")

_EXAMPLES = (
    "dflash-mp doctor -c run.yaml               # is this machine fit for the run?",
    "dflash-mp prepare -c run.yaml --show 3     # documents become rows",
    "dflash-mp run -c run.yaml                  # train; the same command resumes",
    "dflash-mp eval -c run.yaml --untrained     # acceptance length and speed-up",
    "dflash-mp export runs/mine drafter         # for vLLM, SGLang and dflash",
    'eval "$(_DFLASH_MP_COMPLETE=bash_source dflash-mp)"     # completion for this shell: bash_source, zsh_source, fish_source',
)


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


def _print_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from dflash_mp.build_facts import lines

        click.echo("\n".join(lines()))
        context.exit()


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]}, examples=_EXAMPLES)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version, the commit of a checkout, and the versions of what it runs on.",
)
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
for _command in (fuzz, hostile, memory, end_to_end, rows):
    bench.add_command(_command)


if __name__ == "__main__":
    main()
