"""How many of the GPUs should feed and how many should train: arithmetic on two measured paces.

Feeders work independently, so n of them make n times the rows of one. Drafters share a step's rows: m ranks need
ceil(rows_per_step / m), rounded up to whole micro-batches, each, and what a step costs besides (the optimizer) they all pay. The slower side
sets the run's pace, so the best split has the shortest time per row of its slower side. Every split trains the same global batch: rows that a
rank has no share of are empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """What one feeder and one drafter manage, neither waiting for the other."""

    feeder_rows_per_second: float
    micro_batch_seconds: float  # forward and backward pass of a drafter
    step_seconds: float = 0.0  # what an optimizer step costs besides


@dataclass(frozen=True)
class Batch:
    """`train.rows_per_step` and `train.micro_batch_rows`."""

    rows_per_step: int
    micro_batch_rows: int

    def micro_batches(self, drafters: int) -> int:
        """Those of a step that each of `drafters` ranks computes."""
        return math.ceil(math.ceil(self.rows_per_step / drafters) / self.micro_batch_rows)


@dataclass(frozen=True)
class Split:
    """`feeders` + `drafters` GPUs, and the rows/s that each side could make or take."""

    feeders: int
    drafters: int
    feeders_rows_per_second: float
    drafters_rows_per_second: float

    @property
    def rows_per_second(self) -> float:
        """The pace of the slower side, which is the run's."""
        return min(self.feeders_rows_per_second, self.drafters_rows_per_second)

    @property
    def who_waits(self) -> str:
        return "drafters" if self.feeders_rows_per_second < self.drafters_rows_per_second else "feeders"

    @property
    def wait_share(self) -> float:
        """The share of its time that the faster side waits."""
        faster = max(self.feeders_rows_per_second, self.drafters_rows_per_second)
        return 1 - self.rows_per_second / faster if faster > 0 else 0.0

    def line(self) -> str:
        return (
            f"{self.feeders}:{self.drafters}  feeders make {self.feeders_rows_per_second:.3g} rows/s, drafters take "
            f"{self.drafters_rows_per_second:.3g}: {self.rows_per_second:.3g} rows/s, the {self.who_waits} wait {self.wait_share:.0%}"
        )


def splits(pace: Pace, gpus: int, batch: Batch) -> Iterator[Split]:
    """Every way to share out `gpus` with at least one on each side, fewest feeders first."""
    for feeders in range(1, gpus):
        drafters = gpus - feeders
        seconds = batch.micro_batches(drafters) * pace.micro_batch_seconds + pace.step_seconds
        yield Split(feeders, drafters, feeders * pace.feeder_rows_per_second, batch.rows_per_step / seconds)


def best_split(pace: Pace, gpus: int, batch: Batch) -> Split:
    """The split with the highest pace; of equal ones, that in which the faster side waits least. ValueError for fewer than 2 GPUs."""
    if gpus < 2:
        raise ValueError(f"{gpus} GPUs can't be shared out")
    return max(splits(pace, gpus, batch), key=lambda split: (split.rows_per_second, -split.wait_share))


def pace_of(split: Split, batch: Batch) -> Pace:
    """The paces behind what a running split measured, all of a step's time booked on its micro-batches."""
    seconds = batch.rows_per_step / split.drafters_rows_per_second
    return Pace(split.feeders_rows_per_second / split.feeders, seconds / batch.micro_batches(split.drafters))


def advice(split: Split, batch: Batch) -> str:
    """One sentence: what both sides could do, who waits, and which split of as many GPUs would balance them."""
    best = best_split(pace_of(split, batch), split.feeders + split.drafters, batch)
    text = (
        f"{_count(split.feeders, 'feeder')} could make {split.feeders_rows_per_second:.3g} rows/s, "
        f"{_count(split.drafters, 'drafter')} could take {split.drafters_rows_per_second:.3g}: the {split.who_waits} wait "
        f"{split.wait_share:.0%} of their time"
    )
    if (best.feeders, best.drafters) == (split.feeders, split.drafters):
        return f"{text}; no other split of {split.feeders + split.drafters} would be faster"
    return f"{text}; {best.feeders}:{best.drafters} (feeders:drafters) would balance, with {best.rows_per_second:.3g} rows/s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
