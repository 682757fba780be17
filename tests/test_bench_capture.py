"""`dflash-mp bench capture` runs on any target and states the share that a capture skips."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_mp.bench.capture import skipped_share
from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.cli import main
from dflash_mp.config import TargetConfig
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
