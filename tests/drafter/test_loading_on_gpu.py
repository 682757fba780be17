"""Rows on their way to a GPU, while it still computes with those before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from synthetic_rows import LAYOUT, PLAN, SyntheticRow, make_config, make_row

from dflash_mp.data.row import RowKey
from dflash_mp.drafter.batch import BatchLoader
from dflash_mp.drafter.shape import DrafterShape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
_LONG = 100_000_000  # cycles: some 50 ms


class PinnedRows:
    """Rows that a device can copy without the host's help; whoever reads a released one reads not-a-number."""

    def schedule(self, keys: Iterator[RowKey]) -> None:
        pass

    def take(self, key: RowKey) -> SyntheticRow:
        return SyntheticRow(make_row(key).buffer.pin_memory())


@pytest.mark.parametrize("rows_at_once", [1, 2])
@pytest.mark.parametrize("ahead", [False, True])
def test_slow_copies_and_slow_work_change_no_row(ahead: bool, rows_at_once: int, tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    shape = DrafterShape.from_config(make_config(tmp_path).drafter, PLAN.target)
    loader = BatchLoader(PinnedRows(), LAYOUT, shape, seed=0, anchors_per_row=4, device=device, ahead=ahead)
    steps = [[RowKey("train", rows_at_once * step + i) for i in range(rows_at_once)] for step in range(5)]
    used = []
    for step, keys in enumerate(steps):
        if not ahead:
            _sleep_on(loader)
        batch = loader.load(keys)
        torch.cuda._sleep(_LONG)  # the work before the batch is read
        used.append((batch.features.clone(), batch.positions.clone(), batch.blocks.packed.clone()))
        del batch
        loader.release()
        if ahead and step + 1 < len(steps):
            _sleep_on(loader)
            loader.load_ahead(steps[step + 1])
    torch.cuda.synchronize()
    on_cpu = BatchLoader(PinnedRows(), LAYOUT, shape, seed=0, anchors_per_row=4, device=torch.device("cpu"))
    for keys, (features, positions, blocks) in zip(steps, used, strict=True):
        right = on_cpu.load(keys)
        assert torch.equal(features.cpu(), right.features)
        assert torch.equal(positions.cpu(), right.positions)
        assert torch.equal(blocks.cpu(), right.blocks.packed)


def _sleep_on(loader: BatchLoader) -> None:
    """Let the next copy begin late."""
    with torch.cuda.stream(loader._copies):
        torch.cuda._sleep(_LONG)
