"""`dflash-mp bench chaos`: kill anything, any number of times, and compare with a run that nothing disturbed.

A tiny run is trained once in peace. Then the same run is started again and again while SIGKILL hits a feeder, a drafter rank, torchrun or the
supervisor, in a phase that a seeded generator chose (`chaos_kills`; the timing of the machine doesn't repeat). When a run is done before
all kills were made, the next begins; every third one compiles its layers. Each must end with the same weights and optimizer tensors, bit
for bit, with no process, socket, or temporary file left. Several fleets of processes, each with runs of its own, may be
disturbed at once. The report says what was killed where and what that cost. Costs about ten seconds of one or two cores per kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_mp.bench.chaos_fleet import FleetJob, leftovers
from dflash_mp.bench.chaos_report import STEPS, ChaosReport
from dflash_mp.bench.tiny_run import make_tiny_run
from dflash_mp.errors import DflashError
from dflash_mp.process import MARK, mark_of, marked_processes, send_signal
from dflash_mp.run_view import LogTail
from dflash_mp.supervisor import Part, Running

Say = Callable[[str], None]
# Two ranks, checkpoints and held-out measurements so often that kills find them.
_SECTIONS: dict[str, dict[str, Any]] = {
    "data": {"held_out": 0.2},
    "train": {
        "drafters": 2,
        "steps": STEPS,
        "checkpoint_every": 2,
        "held_out_every": 3,
        "held_out_rows": 8,
    },
}


def chaos(
    kills: int,
    seed: int,
    out: Path,
    seconds: float | None,
    say: Say = lambda text: None,
    *,
    parallel: int = 1,
    compiled: bool | None = None,
) -> ChaosReport:
    """Make `kills` kills, or as many as fit into `seconds` after the undisturbed run, below `out`; then finish and compare. Raises `DflashError`.

    `compiled`: whether every third run compiles; default: where there is a C++ compiler.
    """
    begun, out = time.monotonic(), out.absolute()
    if out.exists() and any(out.iterdir()):
        raise DflashError(f"{out} is not empty", "give another directory with --out")
    out.mkdir(parents=True, exist_ok=True)
    if compiled is None:
        compiled = shutil.which("g++") is not None
    make_tiny_run(out, documents=200, seed=seed, sections=_SECTIONS)
    shared_memory = set(os.listdir("/dev/shm"))
    report = ChaosReport(seed)
    say(f"undisturbed run{', plain and compiled' if compiled else ''}")
    with _workers(out, [FleetJob("undisturbed", str(out), 0, seed, None, compiled)], say) as reference:
        (undisturbed,) = reference
    share, rest = divmod(kills, parallel)
    jobs = [
        FleetJob(f"fleet-{n + 1}", str(out), share + (n < rest), seed, seconds, compiled)
        for n in range(min(parallel, kills))
    ]
    with _workers(out, jobs, say) as found:
        for fleet in found:
            report.add(fleet)
    report.left += leftovers([], shared_memory) + undisturbed.left
    report.wall_seconds = time.monotonic() - begun
    report.write_json(out / "chaos.json")
    return report


@contextlib.contextmanager
def _workers(out: Path, jobs: list[FleetJob], say: Say) -> Iterator[list[ChaosReport]]:
    """Have each job done by a process of its own; their reports, when all have ended."""
    environment = {**os.environ, MARK: mark_of(os.getpid()), "PYTHONUNBUFFERED": "1"}
    running: list[Running] = []
    try:
        for job in jobs:
            command = (sys.executable, "-m", "dflash_mp.bench.chaos_kills", json.dumps(asdict(job)))
            running.append(Running(Part(job.name, command, out / f"{job.name}.log"), environment))
        tails = {one.part.name: LogTail(one.part.log, one.log_start) for one in running}
        while True:
            over = all(one.exit_code is not None for one in running)
            for name, tail in tails.items():
                for line in tail.new_lines():
                    say(f"{name}: {line}" if len(jobs) > 1 else line)
            if over:
                break
            time.sleep(0.1)
        for one in running:
            if one.exit_code != 0:
                raise DflashError(f"{one.part.name} failed:\n{one.last_lines()}", f"all of it is in {one.part.log}")
        yield [ChaosReport.read_json(out / job.name / "chaos.json") for job in jobs]
    finally:
        for pid in marked_processes(environment[MARK]):  # theirs die with them
            send_signal(pid, 9)
        for one in running:
            one.process.wait(30.0)
