from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dflash_mp.drafter.metrics import Figures
from dflash_mp.drafter.report import Reporter
from dflash_mp.errors import ConfigError, DflashError

FIGURES = Figures(1.0, 1.0, 1.0, 0.5, (0.5,), 1.0, 256, 0.0, False)


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


def test_figures_that_cannot_be_opened_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(DflashError, match="cannot write the figures"):
        Reporter(tmp_path, enabled=True)


def test_a_wandb_project_without_wandb_is_refused_and_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"wandb is not installed[\s\S]*dflash-mp\[wandb\]"):
        Reporter(tmp_path, enabled=True, wandb_project="drafters")
    Reporter(tmp_path, enabled=False, wandb_project="drafters")
