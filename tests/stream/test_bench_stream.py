from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from dflash_mp.bench import stream
from dflash_mp.bench.stream import _RAW, WAYS, bench_stream
from dflash_mp.errors import DflashError


def test_every_way_is_measured_and_compared() -> None:
    speed = bench_stream(row_mib=0.5, rows=4, repeats=2)
    assert list(speed.samples) == ["one copy", "a checksum alone", *_RAW, *(way.name for way in WAYS)]
    assert all(len(sample.gigabytes_per_second) == 2 for sample in speed.samples.values())
    lines = speed.lines()
    assert lines[2].split()[-1] == "1.00"  # of one copy
    summed, in_band = (
        next(line for line in lines if line.startswith(way)) for way in ("shared memory, s", "in-band, t")
    )
    assert summed.split()[-3:] == ["0", "both", "sides"]
    assert in_band.split()[-3:] == ["1", "both", "sides"]
    assert float(in_band.split()[-4]) > 0  # of the raw socket


def test_a_row_that_arrives_changed_is_never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "pool_row", lambda number, nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    with pytest.raises(DflashError, match="row 1 arrived changed through the raw socket"):
        bench_stream(row_mib=0.5, rows=1, repeats=1)


def test_the_sending_process_ends_with_the_one_that_started_it_though_its_input_stays_open(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dflash_mp.bench.stream_source", str(tmp_path), "64", "64"]
    program = (
        "import os, subprocess, sys; from dflash_mp.process import MARK, mark_of; "
        "subprocess.run(sys.argv[1:], env={**os.environ, MARK: mark_of(os.getpid())})"
    )
    starter = subprocess.Popen([sys.executable, "-c", program, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert starter.stdout is not None
    assert starter.stdout.readline()  # the source's own line: it serves, and reads what this test could write
    sources = psutil.Process(starter.pid).children()
    starter.kill()
    starter.wait(10)
    assert psutil.wait_procs(sources, timeout=20)[1] == []
