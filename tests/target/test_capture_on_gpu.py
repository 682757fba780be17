"""Tapping a target on a CUDA device: bfloat16, into buffers on either side, the same bits each time."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from target_rows import packed_row

from dflash_mp.bench.tiny import Family, write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.target.capture import Capture
from dflash_mp.target.load import load_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "mistral"])
def test_a_cuda_target_passes_its_self_check_and_fills_buffers_on_either_side(tmp_path: Path, family: Family) -> None:
    write_tiny_target(tmp_path, family=family)
    target = load_target(TargetConfig(path=str(tmp_path), layer_ids=[0, 2]))
    assert (target.device.type, target.info.dtype) == ("cuda", "bfloat16")
    row = packed_row([100, 1, 40, 60], padding=11)
    capture = Capture(target)
    assert capture.forward.one_pass
    capture.self_check(row)
    near = torch.empty(212, 2 * 96, dtype=torch.bfloat16, device="cuda")
    pinned = torch.empty(212, 2 * 96, dtype=torch.bfloat16).pin_memory()
    capture.capture(row, near)
    capture.capture(row, pinned)
    assert torch.equal(near.cpu(), pinned)


def test_the_checksum_does_not_depend_on_the_device(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    infos = [
        load_target(TargetConfig(path=str(tmp_path), layer_ids=[0, 2], dtype="bfloat16", device=device)).info
        for device in ("cpu", "cuda")
    ]
    assert infos[0] == infos[1]


def test_started_rows_arrive_in_pinned_memory_while_the_next_is_queued(tmp_path: Path) -> None:
    """The device is kept busy, so that a start which waited for it would show, and outputs are poisoned. Rows are recorded, since a model's own
    forward may wait; rows before them leave the allocators memory for that many at a time, as asking the driver for some waits."""
    write_tiny_target(tmp_path)
    target = load_target(TargetConfig(path=str(tmp_path), layer_ids=[0, 2]))
    capture = Capture(target, last_hidden=True, row_tokens=128)
    rows = [packed_row([70 + n, 1, 50 - n], padding=7) for n in range(6)]
    shapes = ((128, 2 * 96), (128, 96))
    right = [tuple(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes) for _ in rows]
    for row, (out, last) in zip(rows, right, strict=True):
        capture.capture(row, out, last)
    found = [tuple(torch.empty(shape, dtype=torch.bfloat16).pin_memory() for shape in shapes) for _ in rows]
    torch.cuda._sleep(200_000_000)
    for arrival in [capture.start(row, out, last) for row, (out, last) in zip(rows, found, strict=True)]:
        arrival.synchronize()
    for tensor in itertools.chain(*found):
        tensor.fill_(7.0)
    torch.cuda._sleep(2_000_000_000)  # about a second
    arrivals = [capture.start(row, out, last) for row, (out, last) in zip(rows, found, strict=True)]
    assert not arrivals[-1].query()
    for arrival, pair, wanted in zip(arrivals, found, right, strict=True):
        arrival.synchronize()
        assert arrival.query()
        assert all(torch.equal(*both) for both in zip(pair, wanted, strict=True))
