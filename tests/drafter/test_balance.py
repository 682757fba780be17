"""What the run says of both sides' capacity is what they have, whoever waits."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from synthetic_rows import SyntheticRow, SyntheticRows, make_config, make_trainer

from dflash_mp.data.row import RowKey
from dflash_mp.drafter import state
from dflash_mp.drafter.balance import Balance, RowWaits
from dflash_mp.drafter.metrics import StepSums
from dflash_mp.drafter.report import Reporter
from dflash_mp.drafter.trainer import train
from dflash_mp.stream.messages import Pong
from dflash_mp.stream.pace import FeedersPace, PaceMeter


class SlowRows(SyntheticRows):
    """Each row takes `seconds` to come, or longer; `took` is what all took."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.took = seconds, 0.0

    def take(self, key: RowKey) -> SyntheticRow:
        started = time.perf_counter()
        time.sleep(self.seconds)
        row = super().take(key)
        self.took += time.perf_counter() - started
        return row


def test_waits_for_rows_are_not_counted_as_the_drafters_work(tmp_path: Path) -> None:
    said: list[str] = []
    config, rows = make_config(tmp_path, steps=3, held_out_rows=0, log_every=3), SlowRows(0.2)
    trainer = make_trainer(config, rows)
    with Reporter(tmp_path, enabled=True) as report:
        report.say = lambda text, *_, **__: said.append(text)  # type: ignore[method-assign]
        train(trainer, rows, report, state.save, lambda: False, lambda: FeedersPace(1, 5.0))
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    waited = rows.took / 3  # of each step of 3 rows
    assert line["feeders_rows_per_second"] == 5.0
    worked = 3 / line["drafters_rows_per_second"]
    assert worked == pytest.approx(line["step_seconds"] - waited, abs=0.2)
    assert line["drafters_rows_per_second"] > 2 * 3 / line["step_seconds"]
    assert any("1 feeder could make 5 rows/s" in text and "the drafters wait" in text for text in said)


def test_a_step_lost_what_its_longest_waiting_rank_lost() -> None:
    sums = StepSums(4, torch.device("cpu"), ranks=3)
    for rank, seconds in ((0, 1.0), (1, 4.0), (2, 0.5)):
        sums.add_wait(rank, seconds)
    sums.add_blocks(torch.tensor([[False, True, True, True]]), torch.tensor([[False, True, True, True]]))
    figures = sums.figures()
    assert (figures.waits, figures.longest_wait, figures.tau) == ((1.0, 4.0, 0.5), 4.0, 4.0)


def test_advice_comes_once_a_minute_and_at_the_end(tmp_path: Path) -> None:
    balance = Balance(make_config(tmp_path).train, 1, lambda: FeedersPace(1, 6.0))
    assert balance.advice() is None
    balance.add(1.0, 0.5)
    assert balance.advice(at_end=False) is None
    assert "could make 6 rows/s, 1 drafter could take 6" in (balance.advice() or "")


def test_a_feeders_pace_is_its_rows_over_the_time_that_it_computed() -> None:
    meter = PaceMeter()
    assert meter.read({"a": None, "b": None}) == FeedersPace(2, None)
    meter.read({"a": Pong(1, 100, 0, None, 0.0, 50.0), "b": Pong(1, 0, 0, None, 0.0, 0.0)})
    pace = meter.read({"a": Pong(2, 130, 0, None, 0.0, 60.0), "b": Pong(2, 10, 0, None, 0.0, 10.0)})
    assert pace == FeedersPace(2, 3.0 + 1.0)
    restarted = meter.read({"a": Pong(3, 4, 0, None, 0.0, 2.0), "b": None})
    assert restarted == FeedersPace(2, 2 * 2.0)


@pytest.mark.gpu
def test_on_a_gpu_a_wait_counts_only_while_the_gpu_has_nothing_to_do() -> None:
    """The host waits 0.2 s twice: once beside work that takes longer, once with the device idle."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    cycles = int(0.6 * torch.cuda.get_device_properties(device).clock_rate * 1000)
    waits = RowWaits(device)
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    with waits.waiting():
        time.sleep(0.2)
    assert waits.seconds() < 0.1
    torch.cuda.synchronize()
    with waits.waiting():
        time.sleep(0.2)
    assert 0.15 < waits.seconds() < 0.6
