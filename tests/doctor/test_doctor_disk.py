"""Whether the disk has room for the checkpoints that a run will keep."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from test_doctor_finds import about, large_run

from dflash_mp.doctor.checks import _check_files
from dflash_mp.doctor.files import check_directory
from dflash_mp.doctor.fit import Plans
from dflash_mp.doctor.target_size import read_target_size


def test_a_disk_too_small_for_checkpoints(small_disk: Path) -> None:
    finding = check_directory("disk", small_disk / "run", 1 << 20, "a checkpoint")
    assert finding.level == "red"
    assert "a checkpoint takes 1.0 MiB" in finding.found
    assert check_directory("disk", small_disk / "run", 1 << 14, "a checkpoint").level in ("green", "yellow")


def test_checkpoints_that_are_there_need_no_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one more is what a run needs that goes on with all the checkpoints it keeps."""
    config = large_run(tmp_path, train={"keep_checkpoints": 2}).model_copy(update={"run_dir": tmp_path / "run"})
    plans = Plans(config, read_target_size(config.target, "bfloat16"), True, feeds=False)
    one = 12 * plans.shape.parameter_count()

    def level(free: int) -> str:
        monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=free))
        (finding,) = about(list(_check_files(config, plans, False, True)), "disk, run_dir")
        return finding.level

    assert [level(3 * one - 1), level(3 * one)] == ["red", "yellow"]
    for step in (1, 2, 3):
        directory = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        directory.mkdir(parents=True)
        with (directory / "model.safetensors").open("wb") as file:
            file.truncate(one)  # takes no room
        kept = min(step, 2)
        assert [level((3 - kept) * one - 1), level((3 - kept) * one)] == ["red", "yellow"]
