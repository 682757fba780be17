"""A micro-batch of rows in fp8 is that of the same rows after the way through fp8, on either device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from synthetic_rows import PLAN, SyntheticRow, make_row

from dflash_mp.config import DrafterConfig
from dflash_mp.data.row import RowKey
from dflash_mp.drafter.batch import BatchLoader, MicroBatch
from dflash_mp.drafter.rows import RowSource
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.stream.fp8_rows import dequantise, quantise
from dflash_mp.stream.layout import RowLayout, RowTensors
from dflash_mp.stream.plan import StreamPlan

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]
KEYS: list[list[RowKey | None]] = [
    [RowKey("train", 3)],
    [RowKey("train", 1), RowKey("train", 4)],
    [RowKey("train", 2), None],
    [None],
]


def plan_of(dtype: str, wire: str) -> StreamPlan:
    return replace(PLAN, target=replace(PLAN.target, dtype=dtype, last_hidden=True, wire_dtype=wire))


class Rows:
    """The rows of `synthetic_rows` with a last hidden state: in fp8, or in the target's dtype after the way through fp8."""

    def __init__(self, plan: StreamPlan) -> None:
        self._layout, self._fp8 = RowLayout.of(plan), RowLayout.of(plan_of(plan.target.dtype, "fp8"))

    def schedule(self, keys: Iterator[RowKey]) -> None:
        """Any row may be taken."""

    def take(self, key: RowKey) -> SyntheticRow:
        made = make_row(key).tensors
        row, packed = self._row(self._layout), self._row(self._fp8).tensors
        for name in ("input_ids", "position_ids", "document_ids", "loss_mask"):
            getattr(row.tensors, name).copy_(getattr(made, name))
        features = (made.features * torch.logspace(-3, 3, 2).repeat_interleave(32)).to(self._layout.dtype)
        for part, scales, states in (
            ("features", "feature_scales", features),
            ("last_hidden", "last_scales", features[:, 32:].flip(1)),
        ):
            values, factors = getattr(packed, part), getattr(packed, scales)
            quantise(states, values, factors)
            if self._layout == self._fp8:
                getattr(row.tensors, part).copy_(values)
                getattr(row.tensors, scales).copy_(factors)
            else:
                getattr(row.tensors, part).copy_(dequantise([(values, factors)], states.dtype)[0])
        return row

    @staticmethod
    def _row(layout: RowLayout) -> SyntheticRow:
        class Row(SyntheticRow):
            @property
            def tensors(self) -> RowTensors:
                return layout.views(self.buffer)

        return Row(torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8))


def loader(source: RowSource, plan: StreamPlan, device: str) -> BatchLoader:
    shape = DrafterShape.from_config(DrafterConfig(layers=1, block_size=4), plan.target)
    return BatchLoader(
        source, RowLayout.of(plan), shape, seed=0, anchors_per_row=4, device=torch.device(device), ahead=False
    )


def parts(batch: MicroBatch) -> list[torch.Tensor]:
    assert batch.last_hidden is not None
    found = (batch.features, batch.last_hidden, batch.positions, batch.documents, batch.blocks.labels)
    return [part.cpu() for part in found]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_come_out_in_the_targets_dtype(dtype: str, device: str) -> None:
    fp8, plain = plan_of(dtype, "fp8"), plan_of(dtype, "auto")
    in_fp8, unpacked = loader(Rows(fp8), fp8, device), loader(Rows(plain), plain, "cpu")
    for keys in KEYS:
        mine, right = in_fp8.load(keys), unpacked.load(keys)
        assert mine.features.dtype == getattr(torch, dtype)
        assert mine.features.isfinite().all(), "rows that are not there are zeros"
        for got, want in zip(parts(mine), parts(right), strict=True):
            assert torch.equal(got, want)
        assert mine.tokens == right.tokens


def test_a_batch_does_not_need_the_rows_hidden_states_any_more() -> None:
    plan = plan_of("float32", "fp8")
    rows = loader(Rows(plan), plan, "cpu")
    batch = rows.load(KEYS[0])
    before = batch.features.clone()
    rows.release()  # which fills the row with not-a-number
    assert torch.equal(batch.features, before)
