"""The short version of `dflash-mp bench chaos`: a few kills of each kind, and a comparison that can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from dflash_mp.bench.chaos import STEPS, ChaosReport, compare


def test_a_few_kills_leave_no_trace(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dflash_mp.cli",
        "bench",
        "chaos",
        "--kills",
        "6",
        "--seed",
        "3",
        "--seconds",
        "90",  # it ends after the last kill; a fast machine may finish a whole run before the first
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "chaos")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "chaos" / "chaos.json").read_text())
    assert report["ok"]
    assert report["kills"]
    assert report["compared_tensors"] > 20
    assert "differing of" in done.stdout


def _checkpoint(run_dir: Path, **tensors: torch.Tensor) -> None:
    directory = run_dir / "checkpoints" / f"step-{STEPS:08d}"
    directory.mkdir(parents=True)
    for name in ("weights", "optimizer"):
        save_file(tensors, directory / f"{name}.safetensors")


def test_one_bit_of_difference_is_found(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "a", w=torch.zeros(3), nan=torch.full((2,), float("nan")))
    _checkpoint(tmp_path / "b", w=torch.tensor([0.0, -0.0, 0.0]), nan=torch.full((2,), float("nan")))
    report = ChaosReport(seed=0, steps=STEPS)
    compare(tmp_path / "a", tmp_path / "b", report)
    assert report.differing == ["b: weights.safetensors: w", "b: optimizer.safetensors: w"]
    assert not report.ok


def test_a_run_without_its_last_checkpoint_differs(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "a", w=torch.zeros(3))
    report = ChaosReport(seed=0, steps=STEPS)
    compare(tmp_path / "a", tmp_path / "b", report)
    assert len(report.differing) == 2
