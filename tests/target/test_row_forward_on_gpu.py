"""Rows on a CUDA device: packed attention, compiled layers and a CUDA graph give what the model gives, and the same bits each time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from target_rows import packed_row

from dflash_mp.bench.tiny import Family, write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.data.row import TokenRow
from dflash_mp.target.agreement import TOLERANCE, vector_error
from dflash_mp.target.capture import Capture
from dflash_mp.target.load import Target, load_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS = 1000  # not a multiple of a tile


def rows() -> list[TokenRow]:
    return [
        packed_row([400, 1, 7, 300, 128], padding=TOKENS - 836, seed=1),
        packed_row([TOKENS], seed=2),
        packed_row([1] * 40 + [TOKENS - 40], seed=3),
        packed_row([25] * 40, seed=4),
    ]


def tiny(directory: Path, family: Family = "qwen3", **options: Any) -> Target:
    write_tiny_target(directory, family=family, layers=5)
    return load_target(TargetConfig(path=str(directory), **{"layer_ids": [0, 1, 3], "device": "cuda", **options}))


def features(capture: Capture, row: TokenRow) -> torch.Tensor:
    info = capture.target.info
    out = torch.full((TOKENS, info.feature_width), torch.nan, dtype=torch.bfloat16, device="cuda")
    capture.capture(row, out)
    return out


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", "bfloat16"),
        ("gemma2", "bfloat16"),
        ("mistral", "bfloat16"),
        ("llama", "bfloat16"),
        ("qwen3", "float32"),
    ],
)
def test_each_row_is_one_graph_and_the_models_own_features(tmp_path: Path, family: Family, dtype: str) -> None:
    capture = Capture(tiny(tmp_path, family, dtype=dtype), keep_target=True, row_tokens=TOKENS)
    for row in rows():
        capture.self_check(row)
    assert capture.forward.describe().endswith("each row one CUDA graph")


def test_a_row_has_the_same_bits_whatever_came_before_it_and_whichever_stream_asks(tmp_path: Path) -> None:
    capture = Capture(tiny(tmp_path), row_tokens=TOKENS)
    first, *others = rows()
    capture.self_check(first)
    alone = features(capture, first)
    for other in others:
        features(capture, other)
        assert torch.equal(features(capture, first), alone)
    with torch.cuda.stream(torch.cuda.Stream()):
        again = features(capture, first)
        features(capture, others[0])
        torch.cuda.current_stream().synchronize()
    assert torch.equal(again, alone)


def test_a_model_that_cannot_be_recorded_takes_no_more_memory_with_each_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Buffers that a second stream has used are freed only if no recording counts as under way."""

    def wait(module: Any, given: Any) -> None:
        given[0].sum().item()

    target = tiny(tmp_path)
    target.anatomy.decoder.rotary_emb.register_forward_pre_hook(wait)  # type: ignore[union-attr]
    capture, row = Capture(target, row_tokens=TOKENS), rows()[0]
    far = torch.empty(TOKENS, target.info.feature_width, dtype=torch.bfloat16).pin_memory()
    capture.self_check(row)
    assert "can't be recorded as a CUDA graph" in caplog.text
    assert "CUDA graph" not in capture.forward.describe()
    seen = []
    for _ in range(50):
        capture.start(row, far).synchronize()
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    assert seen[-1] <= seen[5] + far.nbytes


def test_the_graph_gives_what_the_layers_give_without_it(tmp_path: Path) -> None:
    target = tiny(tmp_path)
    fast = Capture(target, keep_target=True, row_tokens=TOKENS)
    slow = Capture(target, keep_target=True, row_tokens=TOKENS, compiled=False)
    for row in rows():
        error = vector_error(features(fast, row), features(slow, row))
        assert error <= TOLERANCE[torch.bfloat16] / 2
    assert slow.forward.describe() == "flex attention without a dense mask, layers not compiled"


def test_rows_into_pinned_memory_follow_one_another_without_waiting_for_the_device(
    tmp_path: Path, no_waiting: None
) -> None:
    capture = Capture(tiny(tmp_path), last_hidden=True, row_tokens=TOKENS)
    capture.self_check(rows()[0])
    width, hidden = capture.target.info.feature_width, capture.target.info.hidden_size
    pinned = [torch.full((TOKENS, width), torch.nan, dtype=torch.bfloat16).pin_memory() for _ in rows()]
    last = [torch.full((TOKENS, hidden), torch.nan, dtype=torch.bfloat16).pin_memory() for _ in rows()]
    capture.start(rows()[0], pinned[0], last[0]).synchronize()
    torch.cuda.set_sync_debug_mode("error")
    arrivals = [capture.start(row, out, end) for row, out, end in zip(rows(), pinned, last, strict=True)]
    torch.cuda.set_sync_debug_mode("default")
    for arrival in arrivals:
        arrival.synchronize()
    for row, out, end in zip(rows(), pinned, last, strict=True):
        near, near_last = out.cuda().fill_(torch.nan), end.cuda().fill_(torch.nan)
        capture.capture(row, near, near_last)
        assert torch.equal(near.cpu(), out)
        assert torch.equal(near_last.cpu(), end)
