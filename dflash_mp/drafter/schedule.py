"""What happens at which step: pure functions of the step number, so that a resumed run needs no other cursor.

Rows: optimizer step `s` trains rows `s·G … s·G + G − 1` of the run, where `G` is `rows_per_step` over all ranks. Row number `i`
of the step belongs to rank `i mod W`. The global batch therefore holds the same rows on any number of ranks. Every rank runs
the same number of micro-batches; where `G` does not divide evenly, the missing rows are None and train nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dflash_mp.config import TrainConfig
from dflash_mp.data.row import RowKey


def rows_of_step(
    step: int, rank: int, world: int, rows_per_step: int, micro_batch_rows: int
) -> list[list[RowKey | None]]:
    """The micro-batches of `rank` in optimizer step `step` (from 0): lists of `micro_batch_rows` row keys, None where there is no row."""
    keys = [RowKey("train", step * rows_per_step + i) for i in range(rank, rows_per_step, world)]
    return _micro_batches(keys, -(-rows_per_step // world), micro_batch_rows)


def held_out_rows(rank: int, world: int, rows: int, micro_batch_rows: int) -> list[list[RowKey | None]]:
    """The micro-batches of `rank` when `rows` held-out rows are split over `world` ranks."""
    keys = [RowKey("held_out", i) for i in range(rank, rows, world)]
    return _micro_batches(keys, -(-rows // world), micro_batch_rows)


def held_out_due(step: int, train: TrainConfig) -> bool:
    """Whether the held-out loss is measured after `step` optimizer steps: before the first, after the last, and in between."""
    return step in (0, train.steps) or (train.held_out_every > 0 and step % train.held_out_every == 0)


def row_sequence(train: TrainConfig, start: int, rank: int, world: int, held_out: int) -> Iterator[RowKey]:
    """Every row that `rank` takes from optimizer step `start` to the end of the run, in order."""
    held_out_keys = list(_real(held_out_rows(rank, world, held_out, train.micro_batch_rows)))
    if start == 0 and held_out_due(0, train):
        yield from held_out_keys
    for step in range(start, train.steps):
        yield from _real(rows_of_step(step, rank, world, train.rows_per_step, train.micro_batch_rows))
        if held_out_due(step + 1, train):
            yield from held_out_keys


def learning_rate(step: int, train: TrainConfig) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then cosine, or (WSD) stable and a final cosine decay."""
    floor, peak = train.learning_rate * train.min_learning_rate_ratio, train.learning_rate
    warmup = round(train.steps * train.warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / warmup
    decay_from = (
        warmup if train.schedule == "cosine" else max(warmup, train.steps - round(train.steps * train.decay_ratio))
    )
    if step < decay_from:
        return peak
    progress = (step - decay_from) / max(1, train.steps - decay_from)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _micro_batches(keys: Sequence[RowKey], most: int, size: int) -> list[list[RowKey | None]]:
    padded: list[RowKey | None] = [*keys, *[None] * (-(-most // size) * size - len(keys))]
    return [padded[i : i + size] for i in range(0, len(padded), size)]


def _real(batches: list[list[RowKey | None]]) -> Iterator[RowKey]:
    return (key for batch in batches for key in batch if key is not None)
