"""One feeder and one drafter, measured each by itself through real sockets."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
from synthetic_rows import EMBEDDING, PLAN, make_config, make_row

from dflash_mp.data.row import RowKey
from dflash_mp.drafter.calibrate import calibrate
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.weights import FrozenWeights

SECONDS = 0.25  # of a row


def compute(key: RowKey, buffer: torch.Tensor) -> None:
    time.sleep(SECONDS)
    buffer.copy_(make_row(key).buffer)


def test_a_slow_feeder_is_measured_and_does_not_make_the_drafter_look_slow(tmp_path: Path) -> None:
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
    assert 0 < pace.micro_batch_seconds < SECONDS / 2
    assert pace.step_seconds < SECONDS
    assert not (tmp_path / "run").exists()
