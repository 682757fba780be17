"""Slots on a CUDA device: recorded forward passes write what launched ones write, and what a CPU writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from slot_runs import prompts, write

from dflash_mp.bench.tiny import Family, write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.decode.sampling import GREEDY, Sampling
from dflash_mp.regenerate.slots import SlotOptions, Slots
from dflash_mp.target.load import load_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma2"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, top_p=0.9), Sampling(0.8, top_k=20)])
def test_recorded_passes_write_what_launched_ones_and_a_cpu_write(
    tmp_path: Path, family: Family, sampling: Sampling
) -> None:
    write_tiny_target(tmp_path, family=family)
    config = {"path": str(tmp_path), "taps": 1, "dtype": "float32"}
    near, far = (load_target(TargetConfig.model_validate({**config, "device": device})) for device in ("cuda", "cpu"))
    notices: list[str] = []
    recorded = write(near, 3, sampling, graphs=True, say=notices.append)
    assert notices == []
    assert recorded == write(near, 3, sampling, graphs=False)
    assert recorded == write(far, 3, sampling)


def test_a_bfloat16_target_passes_its_self_check(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    target = load_target(TargetConfig(path=str(tmp_path), taps=1, device="cuda"))
    Slots(target, SlotOptions(4, 8, (), GREEDY), print).self_check(prompts()[3])
