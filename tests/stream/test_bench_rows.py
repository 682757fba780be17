"""`bench rows`, with plain copies in place of those of a GPU."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from dflash_mp.bench import rows
from dflash_mp.bench.rows import Copier, bench_rows
from dflash_mp.errors import DflashError


def test_every_way_is_measured_beside_the_plain_copy_in_its_direction() -> None:
    found = bench_rows(0.5, rows=8, repeats=2, feeder="cpu", drafter="cpu")
    speed = {rate.way: rate.gigabytes_per_second for rate in found.rates}
    into, out = speed["pinned memory → device"], speed["device → pinned memory"]
    compared = [rate.compared for rate in found.rates]
    assert compared == [into, into, into, into, out, out, into]
    assert min(speed.values()) > 0
    assert found.lines()[1].endswith(" 1.00")
    assert len(found.lines()) == 8
    assert multiprocessing.active_children() == []


def test_rows_that_arrive_changed_are_never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Copier.start

    def start(self: Copier, to: torch.Tensor, of: torch.Tensor) -> object:
        arrival = right(self, to, of)
        to[-1] ^= 1
        return arrival

    monkeypatch.setattr(rows.Copier, "start", start)  # in this process only: the drafter's
    with pytest.raises(DflashError, match="a row arrived changed on the device"):
        bench_rows(0.5, rows=2, repeats=1, feeder="cpu", drafter="cpu")
