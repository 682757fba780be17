"""`dflash-mp bench capture` runs on any target and states the share that a capture skips."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dflash_mp.bench.capture import CaptureBench, case_target, row_operations, skipped_share
from dflash_mp.bench.capture_split import SplitBench, SplitWork
from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.cli import main
from dflash_mp.config import TargetConfig
from dflash_mp.errors import ConfigError
from dflash_mp.target.load import load_target


def test_the_skipped_share_is_that_of_later_layers_and_the_head(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    target = load_target(TargetConfig(path=str(tmp_path), layer_ids=[0, 2], device="cpu"))
    layer = 96 * 96 * 2 + 96 * 32 * 2 + 3 * 96 * 256
    head = 288 * 96
    assert skipped_share(target) == pytest.approx((layer + head) / (4 * layer + head))


def test_the_command_prints_both_times_and_the_verdict(tmp_path: Path) -> None:
    write_tiny_target(tmp_path, layers=9)
    result = CliRunner().invoke(
        main, ["bench", "capture", "--target", str(tmp_path), "--tokens", "64", "--rounds", "2"]
    )
    assert result.exit_code == 0, result.output
    assert "plain forward" in result.output
    assert "runs 7 of 9 layers" in result.output
    assert "goal: at least" in result.output


def test_a_shape_with_random_weights_needs_no_checkpoint_and_its_products_are_counted() -> None:
    target = case_target("tiny", "cpu")
    layer = 96 * (3 * 32) * 2 + 96 * 32 * 2 + 3 * 96 * 192
    layers_run = target.info.layer_ids[-1] + 1
    assert row_operations(target, 100) == 2 * 100 * layers_run * layer
    result = CliRunner().invoke(main, ["bench", "capture", "--case", "tiny", "--tokens", "64", "--rounds", "2"])
    assert result.exit_code == 0, result.output
    assert "rows of 64 tokens in 12 documents" in result.output
    assert "of a plain matrix product's" in result.output


def test_the_goal_of_a_gpu_is_both_rate_and_speed_up() -> None:
    facts = {"tokens": 1, "documents": 1, "layers_run": 1, "layers": 2, "how": "", "first_seconds": 0.0}
    bench = CaptureBench(
        **facts,  # type: ignore[arg-type]
        plain_seconds=1.2,
        capture_seconds=1.0,
        skipped_share=0.1,
        operations=60.0,
        matmul_rate=100.0,
        on_gpu=True,
    )
    assert bench.ok
    assert not replace(bench, operations=59.0).ok
    assert not replace(bench, plain_seconds=1.19).ok


@pytest.mark.parametrize("words", [[], ["--case", "tiny", "--target", "x"]])
def test_exactly_one_target_is_measured(words: list[str]) -> None:
    result = CliRunner().invoke(main, ["bench", "capture", *words])
    assert result.exit_code == 2
    assert "either --target or --case" in result.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["capture", "--case", "tiny", "--rounds", "0"], "0 is not in the range"),
        (["capture", "--case", "tiny", "--threads", "0"], "0 is not in the range"),
        (["capture", "--case", "tiny", "--device", "cpu", "--compile"], "on a CPU the target has its own attention"),
        (["step", "--repeats", "0"], "0 is not in the range"),
        (["step", "--device", "cuda:1"], "'cuda:1' is not one of"),
        (["stream", "--rows", "0"], "0 is not in the range"),
        (["stream", "--repeats", "0"], "0 is not in the range"),
        (["stream", "--row-mib", "0"], "0.0 is not in the range"),
        (["prepare", "--rounds", "0"], "0 is not in the range"),
        (["prepare", "--megabytes", "0"], "0.0 is not in the range"),
        (["hostile", "--seconds", "0"], "0.0 is not in the range"),
    ],
)
def test_what_measures_nothing_is_refused(words: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["bench", *words])
    assert result.exit_code == 2
    assert says in result.output


def test_several_devices_begin_with_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def measure(work: SplitWork, devices: list[torch.device], rounds: int) -> SplitBench:
        asked.extend(map(str, devices))
        asked.extend((work.threads, rounds))
        return SplitBench(2, 1.0, 1.0, 0.0, 1e-4, "")

    monkeypatch.setattr("dflash_mp.bench.capture_split.bench_split", measure)
    monkeypatch.setattr("dflash_mp.target.model.target_device", torch.device)
    words = ["--case", "tiny", "--device", "cuda:2", "--tensor-parallel", "2", "--rounds", "2", "--threads", "1"]
    result = CliRunner().invoke(main, ["bench", "capture", *words])
    assert result.exit_code == 0, result.output
    assert asked == ["cuda:2", "cuda:3", 1, 2]


def test_an_unknown_shape_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        case_target("9b")
    assert "8b, 0.6b, tiny" in caught.value.remedy


def test_a_target_that_two_processes_share_is_compared_with_the_whole_one(tmp_path: Path) -> None:
    write_tiny_target(tmp_path, layers=6, heads=4, kv_heads=2)
    words = ["--target", str(tmp_path), "--tokens", "64", "--rounds", "2", "--tensor-parallel", "2"]
    command = [sys.executable, "-m", "dflash_mp.cli", "bench", "capture", *words, "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "split over 2 processes" in done.stdout
    assert "(allowed 0.0001): ok" in done.stdout
