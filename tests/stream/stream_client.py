"""A drafter's client for tests, and what it should receive."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dflash_mp.bench.synthetic import synthetic_expectations, synthetic_plan, synthetic_row
from dflash_mp.config import StreamConfig
from dflash_mp.data.row import RowKey
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.keys import DrafterKeys
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.plan import StreamPlan

SHARED_MEMORY = False  # whether clients ask for it
QUICK = {"connect_seconds": 10.0, "row_seconds": 10.0, "silent_seconds": 1.0}
PATIENT = 30.0  # silent seconds where no row may be asked for twice: a busy machine may leave a process waiting


def keys(start: int, stop: int) -> list[RowKey]:
    return [RowKey("train", ordinal) for ordinal in range(start, stop)]


def client_of(
    endpoints: list[str],
    plan: StreamPlan | None = None,
    *,
    rank: int = 0,
    world: int = 1,
    rows: float = 4,
    keys: DrafterKeys | None = None,
    **stream: float,
) -> RowClient:
    """A client with a window of `rows` rows."""
    plan = plan or synthetic_plan()
    window_mib = rows * RowLayout.of(plan).nbytes / 2**20
    config = StreamConfig(**{**QUICK, "window_mib": window_mib, **stream})
    return RowClient(
        endpoints,
        synthetic_expectations(plan),
        rank=rank,
        world=world,
        stream=config,
        keys=keys,
        shared_memory=SHARED_MEMORY,
    )


def take_all(client: RowClient, wanted: list[RowKey]) -> Iterator[RowKey]:
    """Take the rows and check each; yields the key after each, so that a test can do something in between."""
    for key in wanted:
        with client.take(key) as row:
            right = torch.empty_like(row.buffer)
            synthetic_row(key, right)
            assert row.key == key
            assert torch.equal(row.buffer, right)
        yield key
