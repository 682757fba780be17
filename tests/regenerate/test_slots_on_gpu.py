"""Slots on a CUDA device: recorded forward passes write what launched ones write, and what a CPU writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from slot_runs import prompts, write

from dflash_mp.bench.tiny import Family, write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.decode.sampling import GREEDY, Sampling
from dflash_mp.regenerate import slots
from dflash_mp.regenerate.choice import uniforms
from dflash_mp.regenerate.slot_attention import Way
from dflash_mp.regenerate.slots import SlotOptions, Slots
from dflash_mp.target.load import load_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma2"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, top_p=0.9), Sampling(0.8, top_k=20)])
def test_recorded_passes_write_what_launched_ones_and_a_cpu_write(
    tmp_path: Path, family: Family, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_target(tmp_path, family=family)
    config = {"path": str(tmp_path), "taps": 1, "dtype": "float32"}
    near, far = (load_target(TargetConfig.model_validate({**config, "device": device})) for device in ("cuda", "cpu"))
    notices: list[str] = []
    recorded = write(near, 3, sampling, graphs=True, say=notices.append)
    assert [notice for notice in notices if not (family == "gemma2" and "its attention is eager" in notice)] == []
    assert recorded == write(near, 3, sampling, graphs=False)
    assert recorded == write(near, 3, sampling, own_forward=True)
    assert recorded == write(far, 3, sampling)
    monkeypatch.setattr(slots, "way_of", lambda *_: Way("dflash_plain", "to compare"))
    assert recorded == write(near, 3, sampling)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_a_bfloat16_target_passes_its_self_check_with_the_kernel(tmp_path: Path, family: Family) -> None:
    write_tiny_target(tmp_path, family=family)
    target = load_target(TargetConfig(path=str(tmp_path), taps=1, device="cuda"))
    engine = Slots(target, SlotOptions(4, 8, (), GREEDY), pytest.fail)
    engine.self_check(prompts()[3])
    assert engine.attention == "a kernel that reads each text's own places"


@pytest.mark.parametrize("graphs", [True, False])
def test_with_the_kernel_one_recorded_pass_serves_all_lengths_and_nothing_waits(tmp_path: Path, graphs: bool) -> None:
    write_tiny_target(tmp_path)
    target = load_target(TargetConfig(path=str(tmp_path), taps=1, device="cuda"))
    engine = Slots(target, SlotOptions(4, 300, (), Sampling(0.7, top_k=20), graphs), pytest.fail)
    numbers = [uniforms(0, number, 0, 300) for number in range(4)]
    engine.fill([0, 1], [[1, 2, 3], list(range(100))], numbers[:2])
    engine.advance(2)
    engine.fill([2, 3], [[4], list(range(90))], numbers[2:])
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.advance(100)  # from a width of 128 to one of 256
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine._graphs is None or len(engine._graphs) == 1
    assert engine.take() == []
