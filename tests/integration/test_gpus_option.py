"""`gpus: N`: `dflash-mp run` measures one process of each side, shares the rest out, trains, and keeps its choice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import make_tiny_run

from dflash_mp.calibration import choose, kept_split
from dflash_mp.config import load_config
from dflash_mp.drafter.checkpoint import steps_of
from dflash_mp.errors import ConfigError
from dflash_mp.run import describe_plan


def test_a_run_shares_out_its_processes_and_trains_with_that_split(tmp_path: Path) -> None:
    file = make_tiny_run(tmp_path)
    command = [sys.executable, "-m", "dflash_mp.cli", "run", "-c", str(file), "--set", "gpus=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one feeder makes" in done.stdout
    split = json.loads((tmp_path / "run" / "split.json").read_text())
    feeders, drafters = split["feeders"], split["drafters"]
    assert feeders + drafters == 3
    assert f"{feeders} of the 3 feed, {drafters} train" in done.stdout
    assert steps_of(tmp_path / "run")[-1] == 4
    resolved = load_config(tmp_path / "run" / "config.yaml").config
    assert (resolved.gpus, resolved.feed.count, resolved.train.drafters) == (None, feeders, drafters)
    assert resolved.feed.devices == ["cpu"] * feeders
    assert not (tmp_path / "run" / "calibration.json").exists()

    again = load_config(file, ["gpus=3"])
    assert kept_split(again.config) == (feeders, drafters)
    assert any(f"{feeders} feed, {drafters} train" in line for line in describe_plan(again, ("gpus=3",)))
    for other in ("gpus=4", "train.anchors_per_row=4", "drafter.layers=2"):
        assert kept_split(load_config(file, ["gpus=3", other]).config) is None


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["train.drafters=2"], "train.drafters"),
        (["feed.count=1"], "feed.count"),
        (["feed.endpoints=['ipc:///tmp/x.sock']", "feed.devices=[cpu]"], "feed.endpoints and feed.devices"),
    ],
)
def test_gpus_and_a_split_by_hand_exclude_each_other(tmp_path: Path, sets: list[str], says: str) -> None:
    tree = {"run_dir": "run", "target": {"path": "t"}, "data": {"path": "d"}, "train": {"steps": 1}, "gpus": 4}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tree), encoding="utf-8")
    assert load_config(file).config.gpus == 4
    with pytest.raises(ConfigError, match=f"gpus leaves the split to `run`, but {says} set it"):
        load_config(file, sets)


def test_two_are_one_of_each_without_measuring(tmp_path: Path) -> None:
    tree = {"run_dir": "run", "target": {"path": "t", "device": "cpu"}, "data": {"path": "d"}}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({**tree, "train": {"steps": 1, "device": "cpu"}, "gpus": 2}), encoding="utf-8")
    resolved, overrides = choose(load_config(file), (), lambda running: None, {})
    assert (resolved.config.gpus, resolved.config.feed.count, resolved.config.train.drafters) == (None, 1, 1)
    assert load_config(file, overrides).config == resolved.config


def test_more_gpus_than_there_are_is_said_before_anything_starts(tmp_path: Path) -> None:
    tree = {
        "run_dir": str(tmp_path),
        "target": {"path": "t"},
        "data": {"path": "d"},
        "train": {"steps": 1},
        "gpus": 999,
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(ConfigError, match="gpus is 999, but PyTorch sees"):
        choose(load_config(file), (), lambda running: None, {})
