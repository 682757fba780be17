"""Experiment trackers elsewhere: Weights & Biases and MLflow, from a thread of their own.

Training never waits for a service: `RemoteTracker.put` only queues. A service that is down, slow or refuses costs one warning; what was not
sent is kept (the newest `_KEPT` lines) and tried again once a minute, and `close` waits `_CLOSE_SECONDS` at most. `metrics.jsonl` has
everything in any case. What a resumed training finds its run there by is in `RUN/tracker_id`, made once: a copy of RUN is the same run to them,
a new RUN in the same place is another one. A package that is configured but not installed is a `ConfigError` at the start.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import textwrap
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from dflash_mp.errors import ConfigError

log = logging.getLogger(__name__)
_KEPT = 1000
_IDENTITY = "tracker_id"
_REASON = 240  # characters
_RETRY_SECONDS = 60.0
_OPEN_SECONDS = 15  # for one attempt to reach a service
_CLOSE_SECONDS = 10.0


class Service(Protocol):
    """A tracker's own client. Called from one thread only; whatever it raises means that the service cannot be had now."""

    name: str

    def open(self) -> str:
        """Start a run there, or go on with the one that this run directory has there. Returns where people find it."""

    def log(self, kind: str, step: int, moment: float, figures: dict[str, Any]) -> None:
        """Send one line of figures, made at `moment` (seconds since the epoch)."""

    def close(self, failed: bool) -> None:
        """End the run there."""


class RemoteTracker:
    """Sends to `service` what `put` queues. The log gets the one warning, and where the run is to be found."""

    def __init__(self, service: Service, close_seconds: float = _CLOSE_SECONDS) -> None:
        self._service, self._close_seconds = service, close_seconds
        self._lines: deque[tuple[str, int, float, dict[str, Any]]] = deque(maxlen=_KEPT)
        self._changed = threading.Condition()
        self._closing = self._failed = self._warned = self._open = False
        self._thread = threading.Thread(target=self._main, name=service.name, daemon=True)
        self._thread.start()

    def put(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        """Queue one line of figures."""
        with self._changed:
            self._lines.append((kind, step, time.time(), figures))
            self._changed.notify()

    def close(self, failed: bool) -> None:
        """Send what is queued, within `close_seconds` (a fifth of it when the training failed: others wait for this rank's end), and end."""
        seconds = self._close_seconds / 5 if failed else self._close_seconds
        with self._changed:
            self._closing, self._failed = True, failed
            self._changed.notify()
        self._thread.join(seconds)
        if self._thread.is_alive() or self._lines:
            self._complain(f"did not take the last figures within {seconds:g} s")

    def _main(self) -> None:
        while self._await_lines():
            try:
                self._send()
            except Exception as error:  # whatever a client of theirs raises must not end the training
                self._complain(f"cannot be used: {type(error).__name__}: {str(error).strip() or 'no reason given'}")
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing, _RETRY_SECONDS):
                        break
        if self._open:
            try:
                self._service.close(self._failed)
            except Exception as error:
                self._complain(f"could not end its run: {type(error).__name__}: {error}")

    def _await_lines(self) -> bool:
        """Wait for lines; False when there are none and none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closing)
            return bool(self._lines)

    def _send(self) -> None:
        if not self._open:
            where = self._service.open()
            self._open = True
            log.info("%s: %s", self._service.name, where)
        while self._lines:
            line = self._lines[0]
            self._service.log(*line)
            with self._changed:
                if self._lines and self._lines[0] is line:  # it may have been pushed out meanwhile
                    self._lines.popleft()

    def _complain(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            reason = textwrap.shorten(what, _REASON, placeholder=" …")
            later = f"; training goes on, and what was not sent is tried again every {_RETRY_SECONDS:.0f} s"
            more = "" if self._closing else later
            log.warning("%s %s; metrics.jsonl has all figures%s", self._service.name, reason, more)


class WandbService:
    """Weights & Biases. Whether it is online is WANDB_MODE's and the login's affair."""

    name = "Weights & Biases"

    def __init__(self, run_dir: Path, project: str) -> None:
        _require("wandb", "train.wandb_project", "wandb")
        self._run_dir, self._project = run_dir, project
        self._run: Any = None

    def open(self) -> str:
        import wandb

        self._run = wandb.init(
            project=self._project,
            name=self._run_dir.name,
            id=_identity(self._run_dir),
            resume="allow",
            dir=str(self._run_dir),
            settings=wandb.Settings(init_timeout=_OPEN_SECONDS, finish_timeout=_CLOSE_SECONDS / 2, silent=True),
        )
        return f"offline, in {self._run.dir}" if self._run.offline else str(self._run.url)

    def log(self, kind: str, step: int, moment: float, figures: dict[str, Any]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in curves(figures)}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class MlflowService:
    """MLflow. The server is MLFLOW_TRACKING_URI's affair, who may write there that of MLflow's other variables."""

    name = "MLflow"

    def __init__(self, run_dir: Path, experiment: str) -> None:
        _require("mlflow", "train.mlflow_experiment", "mlflow")
        self._run_dir, self._experiment = run_dir, experiment
        self._client: Any = None
        self._run_id = ""

    def open(self) -> str:
        # Its own default is to try, and to say so, for half an hour. They are read when a request is made.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_OPEN_SECONDS))
        from mlflow import MlflowClient

        self._client = client = MlflowClient()
        found = client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found is not None else client.create_experiment(self._experiment)
        identity = _identity(self._run_dir)
        runs = client.search_runs([experiment], filter_string=f"tags.dflash_mp_run = '{identity}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {"dflash_mp_run": identity}
            self._run_id = client.create_run(experiment, run_name=self._run_dir.name, tags=tags).info.run_id
        return f"run {self._run_id} of the experiment {self._experiment}"

    def log(self, kind: str, step: int, moment: float, figures: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        at = int(moment * 1000)
        self._client.log_batch(
            self._run_id, metrics=[Metric(f"{kind}/{name}", value, at, step) for name, value in curves(figures)]
        )

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def curves(figures: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Each figure by name; those of slots as `name/01`, `name/02`, …"""
    for name, value in figures.items():
        if isinstance(value, (tuple, list)):
            yield from ((f"{name}/{slot:02d}", float(one)) for slot, one in enumerate(value, start=1))
        else:
            yield name, float(value)


def _require(package: str, option: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{option} is set, but {package} is not installed",
            f"pip install 'dflash-mp[{extra}]', or leave {option} out",
        )


def _identity(run_dir: Path) -> str:
    """What a resumed training finds its run by: 12 hexadecimal digits, drawn when `run_dir` has none."""
    file = run_dir / _IDENTITY
    if file.exists() and (known := file.read_text(encoding="utf-8").strip()):
        return known
    drawn = secrets.token_hex(6)
    scratch = file.with_name(f".{_IDENTITY}")
    scratch.write_text(f"{drawn}\n", encoding="utf-8")
    scratch.replace(file)
    return drawn
