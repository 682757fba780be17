"""`python -m dflash_mp.drafter.calibrate --config FILE --out FILE`: measure one feeder and one drafter of a run, each by itself.

The real feeder at `feed.endpoints` first makes rows for nobody who computes; then this process trains on its rows as a rank would, and
the time that it waits for them is left out. Nothing is saved but the paces, as JSON. Steps of one and of three micro-batches tell
what a micro-batch costs and what a step costs besides; adding gradients over ranks is not in it. Takes some twenty micro-batches.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from dflash_mp import logs
from dflash_mp.config import RunConfig
from dflash_mp.data.row import RowKey
from dflash_mp.drafter import schedule, state
from dflash_mp.drafter.trainer import Trainer, train_step, warm_up
from dflash_mp.drafter.world import join
from dflash_mp.errors import DflashError
from dflash_mp.options import Command, config_options, load, log_options, start_logs
from dflash_mp.process import die_with_parent
from dflash_mp.split import Pace
from dflash_mp.stream.client import RowClient

log = logging.getLogger("dflash_mp.drafter")
_FEEDER_ROWS = 8
_FEW, _MANY = 1, 3  # micro-batches of a step
_STEPS = 4  # of each; the first warms up


@click.command(cls=Command)
@config_options
@click.option(
    "--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="Where the paces are written."
)
@log_options
def main(config_file: Path, overrides: tuple[str, ...], out: Path) -> None:
    """Measure one feeder and one drafter of a run, each by itself."""
    try:
        die_with_parent()
        config = load(config_file, overrides).config
        start_logs("drafter", 0)
        pace = calibrate(config)
        temporary = out.with_suffix(".part")
        temporary.write_text(json.dumps(asdict(pace)), encoding="utf-8")
        temporary.replace(out)
    except DflashError as error:
        log.error("%s", error, extra=logs.facts("failed", exit_code=error.exit_code))
        sys.stderr.flush()
        os._exit(error.exit_code)


def calibrate(config: RunConfig) -> Pace:
    """The paces of the feeders that are up and of a drafter in this process, which must be a world of one. Raises `DflashError`."""
    world = join(config)
    with RowClient.of(
        config, world.rank, world.size, held=config.train.micro_batch_rows, pin=world.device.type == "cuda"
    ) as client:
        plan = client.connect()
        weights = client.fetch_weights()
        rows_per_second = _measure_feeders(client)
        trainer = state.build_trainer(config, plan, weights.embedding, weights.head, client, world, None)
        warm_up(trainer)
        few, many = (_measure_steps(trainer, client, micro_batches) for micro_batches in (_FEW, _MANY))
    micro_batch = max((many - few) / (_MANY - _FEW), 1e-9)
    return Pace(rows_per_second, micro_batch, max(0.0, few - _FEW * micro_batch))


def _measure_feeders(client: RowClient) -> float:
    """Rows per second, asked for ahead and thrown away; the first row is not timed."""
    keys = [RowKey("train", ordinal) for ordinal in range(1 + _FEEDER_ROWS)]
    client.schedule(iter(keys))
    client.take(keys[0]).release()
    started = time.perf_counter()
    for key in keys[1:]:
        client.take(key).release()
    return _FEEDER_ROWS / (time.perf_counter() - started)


def _measure_steps(trainer: Trainer, client: RowClient, micro_batches: int) -> float:
    """Seconds of an optimizer step of so many micro-batches, without waits for rows; the median of a few."""
    rows = trainer.config.train.micro_batch_rows
    train = trainer.config.train.model_copy(update={"rows_per_step": micro_batches * rows, "steps": _STEPS})
    trainer.config = trainer.config.model_copy(update={"train": train})
    trainer.step = 0
    keys = [batch for step in range(_STEPS) for batch in schedule.rows_of_step(step, 0, 1, train.rows_per_step, rows)]
    client.schedule(key for batch in keys for key in batch if key is not None)
    seconds = []
    for _ in range(_STEPS):
        started = time.perf_counter()
        figures, _ = train_step(trainer)
        seconds.append(time.perf_counter() - started - figures.longest_wait)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
