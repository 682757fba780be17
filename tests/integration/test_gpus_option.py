"""`gpus: N`: `dflash-mp run` measures one process of each side, shares the rest out, trains, and keeps its choice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import make_tiny_run

from dflash_mp.calibration import choose, kept_split, with_kept_split
from dflash_mp.config_file import load_config
from dflash_mp.drafter.checkpoint import steps_of
from dflash_mp.errors import ConfigError, DflashError
from dflash_mp.monitor.scrape import endpoints_of
from dflash_mp.run import describe_plan, run


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
    said = [f"127.0.0.1:{17400 + i}" for i in range(feeders)] + [f"127.0.0.1:{17500 + r}" for r in range(drafters)]
    shown = load_config(file, ["gpus=3", "metrics.feeder_port=17400", "metrics.rank_port=17500"]).config
    assert endpoints_of(with_kept_split(shown)) == said
    for other in ("gpus=4", "train.anchors_per_row=4", "drafter.layers=2"):
        assert kept_split(load_config(file, ["gpus=3", other]).config) is None
    (tmp_path / "run" / "split.json").write_text(json.dumps({**split, "feeders": 2, "drafters": 1}))
    with pytest.raises(ConfigError, match="asks for rank 1, but the run has 1 drafter,"):
        run(again, ("gpus=3",), ("steps=1", "ranks=1"))


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
    assert with_kept_split(load_config(file).config).train.drafters == 1
    assert any("1 feed, 1 train" in line for line in describe_plan(load_config(file), ()))


@pytest.mark.parametrize(("ranks", "refused"), [("1,2", None), ("3", "rank 3, but the run has 3 drafters")])
def test_a_profile_may_ask_for_any_rank_that_the_split_may_have(
    tmp_path: Path, ranks: str, refused: str | None
) -> None:
    """What the split then has is checked when it is known; here nothing is prepared, which is said first."""
    file = make_tiny_run(tmp_path)
    loaded = load_config(file, ["gpus=4", f"target.path={tmp_path}/none"])
    with pytest.raises(DflashError, match=refused or "there is no target"):
        run(loaded, (), ("steps=1", f"ranks={ranks}"))


def test_whom_to_watch_is_not_known_before_the_split_is(tmp_path: Path) -> None:
    file = make_tiny_run(tmp_path)
    with pytest.raises(ConfigError, match="how the 3 of gpus are shared out is not known yet"):
        with_kept_split(load_config(file, ["gpus=3"]).config)


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
