"""`python -m dflash_mp.threads.worker`: one process of a comparison, with one or more drafters as threads.

It writes "imported" to its standard output and waits for a line on its standard input; then it prepares, writes "ready", and begins when the
next line comes. Its outcome goes to `outcome.json` in its
directory, beside the drafters' logs. SIGUSR1, and a crash, write the stacks of all threads to `stacks.txt`, whatever they do. Exit
code 0 whatever the drafters met, hangs included; another one when they could not begin.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import click

from dflash_mp.errors import DflashError
from dflash_mp.process import die_with_parent, seconds_since_start
from dflash_mp.threads.guards import guard_named
from dflash_mp.threads.pipeline import run_threads
from dflash_mp.threads.work import Work


@click.command()
@click.argument("work_file", type=click.Path(path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--guard", required=True)
@click.option("--drafter", "numbers", type=int, multiple=True, required=True)
@click.option("--quiet-seconds", type=float, required=True)
def main(work_file: Path, directory: Path, guard: str, numbers: tuple[int, ...], quiet_seconds: float) -> None:
    """Train some drafters as threads of this process."""
    die_with_parent()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "stacks.txt").open("w", encoding="utf-8") as dump:
        faulthandler.enable(dump, all_threads=True)
        faulthandler.register(signal.SIGUSR1, dump, all_threads=True)
        try:
            imported = seconds_since_start()
            _say_and_wait("imported")
            work = Work.from_json(work_file.read_text(encoding="utf-8"))
            outcome = run_threads(
                work,
                guard_named(guard),
                numbers,
                directory,
                ready=lambda: _say_and_wait("ready"),
                quiet_seconds=quiet_seconds,
            )
        except DflashError as error:
            click.echo(str(error), err=True)
            os._exit(error.exit_code)
        tree = asdict(outcome)
        tree["start"] = {"imports": imported, **outcome.start}
        text = json.dumps(tree, indent=1)
        (directory / "outcome.json.part").write_text(text, encoding="utf-8")
        (directory / "outcome.json.part").rename(directory / "outcome.json")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads may hang


def _say_and_wait(text: str) -> None:
    print(text, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
