"""What a feeder writes into an fp8 row is what the target computes, quantised; what isn't finite is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from target_rows import packed_row

from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.data.row import RowKey, TokenRow
from dflash_mp.errors import TargetError
from dflash_mp.stream.fp8_rows import quantise
from dflash_mp.stream.layout import RowLayout, RowTensors
from dflash_mp.stream.plan import DataPlan, StreamPlan
from dflash_mp.target.capture import Capture
from dflash_mp.target.feed import row_maker
from dflash_mp.target.load import Target, load_target

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]
ROWS = [packed_row([1, 40, 1, 60], padding=11, seed=n) for n in range(3)]  # with documents of one token
KEYS = [RowKey("train", n) for n in range(len(ROWS))]


class Stored:
    """A prepared dataset of `ROWS`."""

    def run_row(self, key: RowKey, seed: int) -> TokenRow:
        return ROWS[key.ordinal]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"))


def load(directory: Path, device: str, dtype: str = "bfloat16") -> Target:
    return load_target(TargetConfig(path=str(directory), device=device, dtype=dtype, layer_ids=[0, 2]))


def maker(target: Target, capture: Capture) -> tuple[Any, RowLayout]:
    tokens = len(ROWS[0].input_ids)
    info = replace(target.info, wire_dtype="fp8", last_hidden=capture.last_hidden)
    plan = StreamPlan(DataPlan("", 0, tokens, len(ROWS), 0, "", "", "default"), info)
    return row_maker(Stored(), capture, plan), RowLayout.of(plan)  # type: ignore[arg-type]


def poisoned(layout: RowLayout, device: str) -> torch.Tensor:
    return torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8, pin_memory=device == "cuda")


def expected(capture: Capture, row: TokenRow, views: RowTensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of what is in the row and what the target's hidden states make of it."""
    target, pairs = capture.target, []
    states = [torch.empty(len(row.input_ids), width, dtype=target.embedding.dtype) for width in (2 * 96, 96)]
    capture.capture(row, states[0], states[1] if capture.last_hidden else None)
    for values, scales, plain in (
        (views.features, views.feature_scales, states[0]),
        (views.last_hidden, views.last_scales, states[1]),
    ):
        if values is not None and scales is not None:
            right = torch.empty_like(values), torch.empty_like(scales)
            quantise(plain, *right)
            pairs += zip((values.view(torch.uint8), scales), (right[0].view(torch.uint8), right[1]), strict=True)
    return pairs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last_hidden", [False, True])
def test_a_row_holds_the_targets_hidden_states_quantised(directory: Path, last_hidden: bool, device: str) -> None:
    """Rows are started one after the other, and only then waited for."""
    target = load(directory, device)
    capture = Capture(target, last_hidden=last_hidden)
    make, layout = maker(target, capture)
    buffers = [poisoned(layout, device) for _ in ROWS]
    for arrival in [make(key, buffer) for key, buffer in zip(KEYS, buffers, strict=True)]:
        arrival.synchronize()
        assert arrival.query()
    for row, buffer in zip(ROWS, buffers, strict=True):
        views = layout.views(buffer)
        pairs = expected(capture, row, views)
        assert len(pairs) == 2 + 2 * last_hidden
        assert all(torch.equal(*pair) for pair in pairs)
        assert views.document_ids.tolist() == row.document_ids.tolist()


def test_what_is_quantised_apart_from_the_row_goes_over_into_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    monkeypatch.setattr(Capture, "near", lambda self, far: torch.empty_like(far))
    capture = Capture(load(directory, "cpu"), last_hidden=True)
    make, layout = maker(capture.target, capture)
    buffer = poisoned(layout, "cpu")
    make(KEYS[1], buffer).synchronize()
    assert all(torch.equal(*pair) for pair in expected(capture, ROWS[1], layout.views(buffer)))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_is_named_by_row_token_and_layer(directory: Path, device: str) -> None:
    target = load(directory, device, "float32")
    make, layout = maker(target, Capture(target, last_hidden=True, keep_target=True))
    layers, norm = target.anatomy.layers, target.anatomy.decoder.norm  # type: ignore[union-attr]
    buffer = poisoned(layout, device)
    with torch.no_grad():
        norm.weight.fill_(torch.inf)
    arrival = make(KEYS[0], buffer)
    with pytest.raises(TargetError, match=r"train row 0: the last hidden state of its token 0 is not finite"):
        arrival.synchronize()
    with torch.no_grad():
        layers[1].mlp.down_proj.weight[5, 7] = torch.nan
    arrival = make(KEYS[2], buffer)
    with pytest.raises(TargetError, match=r"train row 2: the hidden state after layer 2 of its token 0 is not") as got:
        arrival.synchronize()
    assert "set target.dtype" in got.value.remedy
