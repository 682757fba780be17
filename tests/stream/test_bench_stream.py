from __future__ import annotations

import pytest
import torch

from dflash_mp.bench import stream
from dflash_mp.bench.stream import bench_stream
from dflash_mp.errors import DflashError


def test_every_way_is_measured_and_compared() -> None:
    speed = bench_stream(row_mib=0.5, rows=4, repeats=2)
    assert list(speed.samples) == [
        "plain copy",
        "raw Unix socket",
        "stream over ipc://",
        "raw TCP socket",
        "stream over tcp://",
    ]
    assert all(len(sample.gigabytes_per_second) == 2 for sample in speed.samples.values())
    lines = speed.lines()
    assert "of the raw socket" in lines[1]
    assert lines[2].split()[-1] == "1.00"


def test_a_row_that_arrives_changed_is_never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "pool_row", lambda number, nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    with pytest.raises(DflashError, match="row 0 arrived changed through ipc://"):
        bench_stream(row_mib=0.5, rows=1, repeats=1)
