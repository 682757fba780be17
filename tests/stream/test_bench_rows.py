"""`bench rows`, with plain copies in place of those of a GPU."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dflash_mp.bench import rows
from dflash_mp.bench.rows import Copier, bench_rows
from dflash_mp.bench.synthetic import synthetic_plan
from dflash_mp.errors import ConfigError, DflashError


def test_every_way_is_measured_beside_the_plain_copy_in_its_direction() -> None:
    children = set(multiprocessing.active_children())
    found = bench_rows(0.5, rows=8, repeats=2, feeder="cpu", drafter="cpu")
    speed = {rate.way: rate.gigabytes_per_second for rate in found.rates}
    into, out = speed["pinned memory → device"], speed["device → pinned memory"]
    both = speed["pinned memory ⇄ device, both at once"]
    for rate in found.rates:  # the last device named is the one that the way ends at
        if "both at once" in rate.way or rate.way.startswith("device → slot"):
            assert rate.compared == both, rate.way
        else:
            assert rate.compared == (into if rate.way.endswith("→ device") else out), rate.way
    assert min(speed.values()) > 0
    assert found.lines()[1].endswith(" 1.00")
    assert len(found.lines()) == 9
    assert set(multiprocessing.active_children()) <= children


def test_copies_of_plain_memory_and_of_slots_go_through_as_many_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    right = Copier.all

    def count(self: Copier, to: Sequence[torch.Tensor], of: Sequence[torch.Tensor], times: int) -> None:
        seen.append(len({each.data_ptr() for each in of}))
        right(self, to, of, times)

    monkeypatch.setattr(rows.Copier, "all", count)  # in this process only: the drafter's
    bench_rows(0.5, rows=8, repeats=1, feeder="cpu", drafter="cpu")
    assert len(seen) == 2 * 3, "a warm-up and a measurement of plain memory and both kinds of slots"
    assert len(set(seen)) == 1


class _Pipe:
    """The parent's end as the child sees it: one question about slots that don't exist."""

    def __init__(self) -> None:
        self.sent: list[float] = []

    def send(self, value: float) -> None:
        self.sent.append(value)

    def recv(self) -> tuple[str, int]:
        return "no such slots", 1


def test_a_feeder_whose_copy_fails_ends_at_once(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(KeyError, match="no such slots"):
        rows._feed(_Pipe(), f"ipc://{tmp_path}/f.sock", synthetic_plan(64, 32), "cpu")  # type: ignore[arg-type]
    assert threading.active_count() <= before


@pytest.mark.parametrize("name", ["0", "gpu", "cuda", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_first(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}"):
        bench_rows(0.5, rows=2, repeats=1, feeder=name, drafter="cpu")


def test_rows_that_arrive_changed_are_never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Copier.start

    def start(self: Copier, to: torch.Tensor, of: torch.Tensor) -> object:
        arrival = right(self, to, of)
        to[-1] ^= 1
        return arrival

    monkeypatch.setattr(rows.Copier, "start", start)  # in this process only: the drafter's
    with pytest.raises(DflashError, match="a row arrived changed on the device"):
        bench_rows(0.5, rows=2, repeats=1, feeder="cpu", drafter="cpu")
