"""Real process trees for tests: a supervisor in a process of its own, and small commands that it runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_mp.process import mark_of, marked_processes, send_signal
from dflash_mp.supervisor import Part, Patience

SECONDS = 90.0  # the longest wait for anything here: torchrun takes seconds to start, on a busy machine tens of them
_PATIENCE = Patience()

_SUPERVISE = """
import json, sys
from pathlib import Path
from dflash_mp.errors import DflashError
from dflash_mp.supervisor import Part, Patience, supervise
given = json.loads(sys.argv[1])
parts = [Part(**{**part, "log": Path(part["log"]), "command": tuple(part["command"])}) for part in given["parts"]]
try:
    if number := supervise(parts, patience=Patience(**given["patience"])):
        print("stopped in order by", number.name)
except DflashError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def python(program: str) -> tuple[str, ...]:
    """A command that runs `program`."""
    return (sys.executable, "-c", program)


def shell(program: str) -> tuple[str, ...]:
    """A command that runs `program` in a POSIX shell."""
    return ("sh", "-c", program)


def part(directory: Path, name: str, command: tuple[str, ...], serves: bool = False, leads: bool = False) -> Part:
    """A part whose log is `directory`/`name`.log."""
    return Part(name, command, directory / f"{name}.log", serves, leads)


class Supervised:
    """A supervisor that runs `parts` in another process."""

    def __init__(self, parts: list[Part], patience: Patience) -> None:
        given = {"parts": [{**asdict(p), "log": str(p.log)} for p in parts], "patience": asdict(patience)}
        self._parts = parts
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SUPERVISE, json.dumps(given)], stdout=subprocess.PIPE, text=True
        )
        self.mark = mark_of(self.process.pid)

    def wait_until_up(self) -> None:
        """Wait until every part printed "up"."""
        eventually(lambda: all("up" in output_of(one).splitlines() for one in self._parts), "every part is up")

    def wait_until_gone(self) -> None:
        """Wait until no process of this run lives."""
        eventually(lambda: self.processes() == [], "every process of the run is gone")

    def processes(self) -> list[int]:
        """Every living process of this run, the supervisor left out."""
        return marked_processes(self.mark)

    def finish(self) -> tuple[int, str]:
        """Wait for the supervisor's end: its exit code and what it printed."""
        output, _ = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, output


def output_of(one: Part) -> str:
    """What a part printed since its last start."""
    log = one.log.read_text() if one.log.exists() else ""
    return log.rpartition(f" run | starts {one.name}: ")[2].partition("\n")[2]


@contextmanager
def supervised(*parts: Part, patience: Patience = _PATIENCE) -> Iterator[Supervised]:
    """Start a supervisor; at the end kill whatever is left of it."""
    run = Supervised(list(parts), patience)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.communicate()
        for pid in run.processes():  # some end by themselves meanwhile
            send_signal(pid, signal.SIGKILL)


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds; fail after `SECONDS`."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {SECONDS:.0f} s: {what}")
        time.sleep(0.02)


def written_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl` of a run that goes on: the last one may be half written."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
