"""`python -m dflash_mp.bench.local_drafter --config FILE`: a drafter that waits for nobody, as one rank or several.

It takes the frozen weights and a few rows from the feeders, says goodbye, and trains on those rows, out of pinned memory, with the real training loop,
until it is killed. Nothing is saved; the figures of each step go to `metrics.jsonl` below run_dir. What this reaches is what the same drafter could do
if rows cost nothing.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import torch

from dflash_mp import logs
from dflash_mp.config import RunConfig
from dflash_mp.data.row import RowKey
from dflash_mp.drafter import arithmetic, state
from dflash_mp.drafter.report import Reporter
from dflash_mp.drafter.trainer import train
from dflash_mp.drafter.world import join
from dflash_mp.errors import DflashError
from dflash_mp.monitor.training import TrainingRecord
from dflash_mp.options import Command, config_options, load, log_options, start_logs
from dflash_mp.process import die_with_parent
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.layout import RowLayout

_ROWS = 8
log = logging.getLogger("dflash_mp.drafter")


@click.command(cls=Command)
@config_options
@log_options
def main(config_file: Path, overrides: tuple[str, ...]) -> None:
    """Train on a few rows over and over, as one of the ranks that torchrun started or as the only one."""
    try:
        die_with_parent()
        start_logs("drafter", int(os.environ.get("RANK", "0")))
        run(load(config_file, overrides).config)
    except DflashError as error:
        log.error("%s", error, extra=logs.facts("failed", exit_code=error.exit_code))
        sys.stderr.flush()
        os._exit(error.exit_code)


def run(config: RunConfig) -> None:
    """Train to the last step, which is far away. Raises `DflashError`."""
    world = join(config)
    pin = world.device.type == "cuda"
    with RowClient.of(config, world.rank, world.size) as client:
        plan = client.connect()
        weights = client.fetch_weights()
        rows = LocalRows(client, RowLayout.of(plan), _ROWS, pin)
    with Reporter.of(config, world.rank == 0, TrainingRecord(steps=config.train.steps)) as report:
        trainer = state.build_trainer(config, plan, weights.embedding, weights.head, rows, world, None)
        report.say(
            f"{trainer.shape.parameter_count() / 1e6:.1f} M parameters, {arithmetic.describe(trainer.model, trainer.objective)}, rows of its own",
            "training",
        )
        train(trainer, rows, report, lambda trainer: None, lambda: False)


class LocalRows:
    """A `RowSource` of `count` rows that `client` had, for whichever row is wanted."""

    def __init__(self, client: RowClient, layout: RowLayout, count: int, pin: bool) -> None:
        keys = [RowKey("train", ordinal) for ordinal in range(count)]
        client.schedule(iter(keys))
        self._rows = []
        for key in keys:
            with client.take(key) as row:
                buffer = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=pin)
                self._rows.append(_LocalRow(buffer.copy_(row.buffer), layout))

    def schedule(self, keys: Iterator[RowKey]) -> None:
        """All are here."""

    def take(self, key: RowKey) -> _LocalRow:
        """One of the rows, to be read only."""
        return self._rows[key.ordinal % len(self._rows)]


class _LocalRow:
    def __init__(self, buffer: torch.Tensor, layout: RowLayout) -> None:
        self.buffer, self.tensors = buffer, layout.views(buffer)

    def release(self) -> None:
        """Nothing is lent."""


if __name__ == "__main__":
    main()
