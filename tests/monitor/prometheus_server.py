"""A real Prometheus for tests, with the scrape configuration of docker/prometheus.yml and other targets; and the dashboard's queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "dflash-mp.json"
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


def queries() -> list[tuple[str, str]]:
    """(panel's title, expression) of every target in the dashboard."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bdflash_mp_\w+", expression))


class Prometheus:
    """Asks the Prometheus at `address`, from the calling thread's host."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query; nothing while Prometheus starts."""
        query = urllib.parse.urlencode({"query": expression})
        try:
            answer = urllib.request.urlopen(f"http://{self._address}/api/v1/query?{query}", timeout=10).read()
        except urllib.error.HTTPError as error:
            if error.code != 503:
                pytest.fail(f"{expression}: {error.read().decode()}")
            return []
        except OSError:
            return []
        result: list[dict[str, Any]] = json.loads(answer)["data"]["result"]
        return result

    def without_data(self, run: str, seconds: float) -> list[tuple[str, str]]:
        """The dashboard's queries that return nothing of `run`, however often asked for so long."""
        left = [
            (title, expression.replace("$__rate_interval", "20s").replace("$run", run))
            for title, expression in queries()
        ]
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            time.sleep(0.5)
            left = [(title, expression) for title, expression in left if not self.ask(expression)]
        return left


@contextmanager
def prometheus(
    directory: Path, address: str, targets: Sequence[str], popen: Callable[..., Any] = subprocess.Popen
) -> Iterator[Prometheus]:
    """One that listens at `address` and scrapes `targets` every second; `popen` starts it."""
    tree = yaml.safe_load((DOCKER / "prometheus.yml").read_text(encoding="utf-8"))
    tree["global"]["scrape_interval"] = "1s"
    tree["scrape_configs"][0]["static_configs"] = [{"targets": list(targets)}]
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Prometheus(address)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
