"""One feeder and one drafter, measured each by itself through real sockets."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from synthetic_rows import EMBEDDING, PLAN, make_config, make_row

from dflash_mp.data.row import RowKey
from dflash_mp.drafter.batch import MicroBatch
from dflash_mp.drafter.calibrate import calibrate
from dflash_mp.drafter.loss import BlockLoss
from dflash_mp.drafter.objective import Objective
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.weights import FrozenWeights

SECONDS = 0.6  # of a row
MICRO_BATCH = 0.1  # of a micro-batch, and a little more


def compute(key: RowKey, buffer: torch.Tensor) -> None:
    time.sleep(SECONDS)
    buffer.copy_(make_row(key).buffer)


def test_a_slow_feeder_is_measured_and_does_not_make_the_drafter_look_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Objective.loss

    def slow(objective: Objective, model: torch.nn.Module, batch: MicroBatch) -> BlockLoss:
        time.sleep(MICRO_BATCH)
        return real(objective, model, batch)

    monkeypatch.setattr(Objective, "loss", slow)
    config = make_config(tmp_path / "run", rows_per_step=20)
    feed = config.feed.model_copy(update={"endpoints": [f"ipc://{tmp_path}/feeder.sock"]})
    config = config.model_copy(update={"feed": feed})
    stop = threading.Event()
    with FeederService(config.feeder_endpoints()[0], PLAN, FrozenWeights(EMBEDDING, EMBEDDING), run="run") as service:
        serving = threading.Thread(target=service.serve, args=(compute, stop))
        serving.start()
        try:
            pace = calibrate(config)
        finally:
            stop.set()
            serving.join()
    assert 0.3 / SECONDS < pace.feeder_rows_per_second <= 1.2 / SECONDS
    assert 0.5 * MICRO_BATCH < pace.micro_batch_seconds < MICRO_BATCH + 0.5 * SECONDS
    assert pace.step_seconds < SECONDS
    assert not (tmp_path / "run").exists()
