"""Trackers elsewhere: real Weights & Biases (offline) and MLflow (in files), both with their service down, and one that hangs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_ports
from some_figures import some_figures

from dflash_mp.drafter import trackers
from dflash_mp.drafter.report import Reporter
from dflash_mp.drafter.trackers import MlflowService, RemoteTracker

WAIT = 90.0
FIGURES = some_figures()
needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")

# Reports two lines of figures with one tracker, whose client may try to reach its service only when both are written or a minute is over, and
# says how long the training's thread was held up.
_REPORT = """
import json, sys, threading, time
from pathlib import Path
from some_figures import some_figures
from test_trackers import wait_for
from dflash_mp import logs
from dflash_mp.drafter import trackers
from dflash_mp.drafter.report import Reporter
from dflash_mp.drafter.trackers import MlflowService, WandbService
logs.start(logs.Speaker("drafter", 0), logs.Settings())
trackers._OPEN_SECONDS = 3
kind, run_dir = sys.argv[1], Path(sys.argv[2])
run_dir.mkdir(parents=True, exist_ok=True)
service = {"mlflow": MlflowService, "wandb": WandbService}[kind](run_dir, "drafters")
reach, written = service.open, threading.Event()
service.open = lambda: written.wait(60) and reach()
with Reporter(run_dir, True, [service]) as report:
    started = time.monotonic()
    for step in (0, 1):
        report.held_out(step, some_figures())
    held_up = time.monotonic() - started
    written.set()
    if sys.argv[3:] == ["wait"]:
        wait_for(report._trackers[0])
    print("held up", held_up, "closes at", time.time(), flush=True)
"""


def wait_for(tracker: RemoteTracker) -> None:
    """Until it has sent everything or warned, however long the service's client takes."""
    deadline = time.monotonic() + WAIT
    while tracker._lines and not tracker._warned and time.monotonic() < deadline:
        time.sleep(0.01)


def unreachable() -> str:
    """An address of this machine at which nothing listens."""
    (port,) = free_ports()
    return f"http://127.0.0.1:{port}"


def report(kind: str, run_dir: Path, environment: dict[str, str], *more: str) -> tuple[str, float]:
    """Output of a process that reports with a tracker, and its seconds from the end of the training to its own."""
    places = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    path = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _REPORT, kind, str(run_dir), *more],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=2 * WAIT,
    )
    ended = time.time()
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, ended - float(done.stdout.split("closes at")[1].split()[0])


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@needs_mlflow
def test_mlflow_gets_every_figure_and_a_resumed_training_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlflow'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for step in (10, 20):
        with Reporter(tmp_path / "a-run", True, [MlflowService(tmp_path / "a-run", "drafters")]) as reporter:
            reporter.held_out(step, FIGURES)
            wait_for(reporter._trackers[0])
    client = MlflowClient()
    experiment = client.get_experiment_by_name("drafters")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "a-run"
    assert run.info.status == "FINISHED"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "held_out/tau")] == [
        (10, 2.5),
        (20, 2.5),
    ]
    assert run.data.metrics["held_out/accuracy_per_slot/02"] == 0.25


@needs_mlflow
def test_run_directories_of_one_path_are_runs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlflow'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for _ in range(2):  # the second as in another container: the same path, another directory
        with Reporter(tmp_path / "a-run", True, [MlflowService(tmp_path / "a-run", "drafters")]) as reporter:
            reporter.held_out(10, FIGURES)
            wait_for(reporter._trackers[0])
        shutil.rmtree(tmp_path / "a-run")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("drafters")
    assert [run.info.run_name for run in client.search_runs([experiment.experiment_id])] == ["a-run", "a-run"]


def test_a_run_directory_keeps_its_identity_where_it_is_moved_to(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    drawn = trackers._identity(tmp_path / "run")
    assert trackers._identity(tmp_path / "run") == drawn
    (tmp_path / "run").rename(tmp_path / "moved")
    assert trackers._identity(tmp_path / "moved") == drawn
    (tmp_path / "run").mkdir()
    assert trackers._identity(tmp_path / "run") != drawn


@needs_mlflow
def test_mlflow_that_is_down_is_one_warning_and_training_goes_on(tmp_path: Path) -> None:
    output, _ = report("mlflow", tmp_path / "run", {"MLFLOW_TRACKING_URI": unreachable()}, "wait")
    assert output.count("MLflow cannot be used") == output.count("warning:") == 1, output
    assert float(output.split("held up")[1].split()[0]) < 5
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [0, 1]


@needs_wandb
def test_wandb_gets_every_figure(tmp_path: Path) -> None:
    output, _ = report("wandb", tmp_path / "run", {"WANDB_MODE": "offline"}, "wait")
    assert "Weights & Biases: offline, in" in output, output
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    data = written.read_bytes()
    for name in (b"held_out/tau", b"held_out/accuracy_per_slot/02"):
        assert name in data


@needs_wandb
def test_wandb_that_is_down_is_one_warning_and_training_goes_on_and_ends(tmp_path: Path) -> None:
    environment = {"WANDB_BASE_URL": unreachable(), "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}
    output, seconds = report("wandb", tmp_path / "run", environment)
    assert output.count("warning: Weights & Biases") == output.count("warning:") == 1, output
    assert float(output.split("held up")[1].split()[0]) < 5
    assert seconds < 60
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [0, 1]


class Hanging:
    """A service that hangs in its first call until it is let go, then fails as often as told."""

    name = "a service"

    def __init__(self, failures: int = 0) -> None:
        self.let_go, self.failures = threading.Event(), failures
        self.sent: list[int] = []
        self.closed: list[bool] = []

    def open(self) -> str:
        self.let_go.wait(WAIT)
        if self.failures:
            self.failures -= 1
            raise OSError("down")
        return "here"

    def log(self, kind: str, step: int, moment: float, figures: dict[str, Any]) -> None:
        self.sent.append(step)

    def close(self, failed: bool) -> None:
        self.closed.append(failed)


def test_a_service_that_hangs_holds_up_neither_training_nor_the_end(caplog: pytest.LogCaptureFixture) -> None:
    service = Hanging()
    tracker = RemoteTracker(service, close_seconds=0.2)
    started = time.monotonic()
    for step in range(5000):
        tracker.put("train", step, {"loss": 1.0})
    tracker.close(failed=False)
    assert time.monotonic() - started < 20
    (warning,) = caplog.messages
    assert warning == "a service did not take the last figures within 0.2 s; metrics.jsonl has all figures"
    service.let_go.set()
    tracker._thread.join(WAIT)
    assert service.sent == list(range(4000, 5000))  # the newest are what is kept
    assert service.closed == [False]


def test_a_service_that_comes_back_gets_what_it_missed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dflash_mp")
    monkeypatch.setattr("dflash_mp.drafter.trackers._RETRY_SECONDS", 0.05)
    service = Hanging(failures=3)
    service.let_go.set()
    tracker = RemoteTracker(service, close_seconds=5 * WAIT)
    tracker.put("train", 1, {"loss": 1.0})
    deadline = time.monotonic() + WAIT
    while not service.sent and time.monotonic() < deadline:
        time.sleep(0.01)
    tracker.put("train", 2, {"loss": 1.0})
    tracker.close(failed=True)
    assert service.sent == [1, 2]
    assert service.closed == [True]
    warning, found = caplog.messages
    assert warning.startswith(
        "a service cannot be used: OSError: down; metrics.jsonl has all figures; training goes on"
    )
    assert found == "a service: here"


def test_tensorboard_has_the_curves_without_any_tracker(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Reporter(tmp_path, enabled=True) as reporter:
        reporter.held_out(3, FIGURES)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("held_out/tau")] == [(3, 2.5)]
    assert found.Scalars("held_out/accuracy_per_slot/02")[0].value == 0.25
