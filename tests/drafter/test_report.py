from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from some_figures import some_figures

from dflash_mp.config import RunConfig
from dflash_mp.drafter.report import Reporter
from dflash_mp.errors import ConfigError, DflashError
from dflash_mp.monitor.training import TrainingRecord

FIGURES = some_figures()


class Silent:
    """A tracker that takes everything."""

    name = "silent"

    def open(self) -> str:
        return "here"

    def log(self, kind: str, step: int, moment: float, figures: dict[str, Any]) -> None: ...

    def close(self, failed: bool) -> None: ...


def _fill(small_disk: Path) -> None:
    """Report figures until the disk is full."""
    with Reporter(small_disk / "run", enabled=True) as report:
        (small_disk / "filler").write_bytes(bytes(48 << 10))
        for step in range(1000):
            report.held_out(step, FIGURES)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread fails, too
def test_metrics_on_a_full_disk_are_one_clear_error(small_disk: Path) -> None:
    with pytest.raises(DflashError, match=r"cannot write the figures of the run to .*No space left"):
        _fill(small_disk)


@pytest.mark.parametrize("held_out_rows", [1, 0])
def test_lines_that_cannot_be_written_leave_nothing_open(tmp_path: Path, held_out_rows: int) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    before, report = set(threading.enumerate()), Reporter(tmp_path, True, [Silent()])
    assert len(set(threading.enumerate()) - before) == 2  # TensorBoard's and the tracker's
    with pytest.raises(DflashError, match="cannot write the figures"):
        _report_until_closed(report, held_out_rows)
    assert report._lines.closed
    assert set(threading.enumerate()) <= before


def _report_until_closed(report: Reporter, held_out_rows: int) -> None:
    """Fails at a line, or, without held-out rows, when what is left is written."""
    with report:
        for step in range(held_out_rows):
            report.held_out(step, FIGURES)
        report._lines.write("the last one\n")


def test_figures_that_cannot_be_opened_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(DflashError, match="cannot write the figures"):
        Reporter(tmp_path, enabled=True)


@pytest.mark.parametrize(("option", "package"), [("wandb_project", "wandb"), ("mlflow_experiment", "mlflow")])
def test_a_tracker_without_its_package_is_refused_and_names_the_extra(
    option: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    tree = {
        "run_dir": tmp_path,
        "target": {"path": "t"},
        "data": {"path": "d"},
        "train": {"steps": 1, option: "drafters"},
    }
    config = RunConfig.model_validate(tree)
    with pytest.raises(ConfigError, match=rf"{package} is not installed[\s\S]*dflash-mp\[{package}\]"):
        Reporter.of(config, True, TrainingRecord())
    Reporter.of(config, False, TrainingRecord())
