"""Slots on a CUDA device: recorded forward passes write what launched ones write, and what a CPU writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from slot_runs import write

from dflash_mp.bench.tiny import Family, write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.decode.sampling import GREEDY, Sampling
from dflash_mp.regenerate import slots
from dflash_mp.regenerate.choice import uniforms
from dflash_mp.regenerate.slot_attention import Way
from dflash_mp.regenerate.slots import SlotOptions, Slots
from dflash_mp.target.load import Target, load_target

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
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, top_p=0.9), Sampling(0.8, top_k=20)])
def test_in_bfloat16_recorded_passes_write_what_launched_ones_write(
    tmp_path: Path, family: Family, sampling: Sampling
) -> None:
    write_tiny_target(tmp_path, family=family)
    target = load_target(TargetConfig.model_validate({"path": str(tmp_path), "taps": 1, "dtype": "bfloat16"}))
    recorded = write(target, 3, sampling, say=pytest.fail)
    assert recorded == write(target, 3, sampling, graphs=False)
    assert len({tuple(tokens) for tokens, _ in recorded}) > len(recorded) // 2


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_a_bfloat16_target_passes_its_self_check_with_the_kernel(tmp_path: Path, family: Family) -> None:
    write_tiny_target(tmp_path, family=family)
    target = load_target(TargetConfig.model_validate({"path": str(tmp_path), "taps": 1, "dtype": "bfloat16"}))
    engine = Slots(target, SlotOptions(4, 8, (), GREEDY), pytest.fail)
    engine.self_check([place * 7 % 200 for place in range(700)])  # many tiles, and beyond mistral's window
    assert engine.attention == "a kernel that reads each text's own places"


@pytest.mark.parametrize("graphs", [True, False])
def test_with_the_kernel_one_recorded_pass_serves_all_lengths_and_nothing_waits(tmp_path: Path, graphs: bool) -> None:
    write_tiny_target(tmp_path)
    target, far = (
        load_target(
            TargetConfig.model_validate({"path": str(tmp_path), "taps": 1, "dtype": "float32", "device": device})
        )
        for device in ("cuda", "cpu")
    )
    engine = _two_then_four(target, graphs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.advance(100)  # beyond 128 places, where another way would need another recording
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine._by_kernel
    assert engine._steps is None if not graphs else list(engine._steps._graphs) == [engine._cache.capacity]
    twin = _two_then_four(far, graphs)
    twin.advance(100)
    engine.advance(20)
    twin.advance(20)
    found = {text.slot: text.tokens for text in engine.take()}
    assert sorted(found) == [0, 1, 2, 3]
    assert found == {text.slot: text.tokens for text in twin.take()}


def _two_then_four(target: Target, graphs: bool) -> Slots:
    """Two texts, and two steps later two more, of 110 tokens each."""
    numbers = [uniforms(0, number, 0, 110) for number in range(4)]
    engine = Slots(target, SlotOptions(4, 110, (), Sampling(0.7, top_k=20), graphs), print)
    engine.fill([0, 1], [[1, 2, 3], list(range(100))], numbers[:2])
    engine.advance(2)
    engine.fill([2, 3], [[4], list(range(90))], numbers[2:])
    return engine


def test_a_recording_that_fails_leaves_the_current_stream_and_steps_that_are_launched(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    command = [
        sys.executable,
        __file__,
        str(tmp_path),
    ]  # in a process of its own: PyTorch may not forget such a failure
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def _fail_to_record(directory: str) -> None:
    target = load_target(TargetConfig(path=directory, taps=1, device="cuda"))
    expected = write(target, 3, graphs=False)
    written, before = Slots._write, torch.cuda.current_stream()

    def waits(self: Slots, width: int) -> None:
        written(self, width)
        self._live.sum().item()

    Slots._write = waits  # type: ignore[method-assign]
    notices: list[str] = []
    assert write(target, 3, say=notices.append) == expected
    assert torch.cuda.current_stream() == before
    assert len(notices) == 1
    assert "can't be recorded as a CUDA graph" in notices[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_recorded_passes_are_of_the_targets_device_whichever_is_current(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    config = {"path": str(tmp_path), "taps": 1, "dtype": "float32"}
    first, second = (load_target(TargetConfig.model_validate({**config, "device": f"cuda:{n}"})) for n in (0, 1))
    with torch.cuda.device(0):
        assert write(second, 3, say=pytest.fail) == write(first, 3, say=pytest.fail)


if __name__ == "__main__":
    _fail_to_record(sys.argv[1])
