"""A real run that goes on while tests look at it: two feeders and two ranks, started by the real command, on ports of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from free_ports import ports_in_a_row
from tiny_run import make_tiny_run

from dflash_mp.monitor.scrape import Scraper
from dflash_mp.process import mark_of, marked_processes, send_signal

_START_SECONDS = 180.0  # four processes import torch, on a busy machine


@dataclass(frozen=True)
class ObservedRun:
    run_file: Path
    run_dir: Path
    first_port: int  # of feeder 0; the ranks' are two more
    overrides: tuple[str, ...]

    @property
    def endpoints(self) -> list[str]:
        return [f"127.0.0.1:{self.first_port + i}" for i in range(4)]

    @property
    def options(self) -> list[str]:
        return ["-c", str(self.run_file), *(word for text in self.overrides for word in ("--set", text))]


@contextmanager
def observed_run(directory: Path) -> Iterator[ObservedRun]:
    """Yields when rank 0 has trained a few steps and each feeder has delivered rows."""
    run_file, port = make_tiny_run(directory), ports_in_a_row(4)
    overrides = (
        f"run_dir={directory / 'observed'}",
        "train.steps=100000",
        "train.drafters=2",
        "train.log_every=2",
        "train.checkpoint_every=20",
        "train.held_out_every=10",
        "feed.count=2",
        "stream.window_mib=4",
        f"metrics.feeder_port={port}",
        f"metrics.rank_port={port + 2}",
    )
    run = ObservedRun(run_file, directory / "observed", port, overrides)
    log = directory / "run.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_mp.cli", "run", *run.options], stdout=out, stderr=subprocess.STDOUT
        )
    mark = mark_of(process.pid)
    try:
        scraper = Scraper(run.endpoints, seconds=5.0)

        def reported() -> bool:
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            readings = scraper.read()
            steps = readings[2].value("dflash_mp_train_step") or 0
            delivered = [reading.value("dflash_mp_feeder_delivered_rows_total") for reading in readings[:2]]
            return not any(reading.problem for reading in readings) and steps >= 6 and all(delivered)

        deadline = time.monotonic() + _START_SECONDS
        while not reported():
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
            time.sleep(0.2)
        yield run
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            for pid in marked_processes(mark):
                send_signal(pid, signal.SIGKILL)
