"""Every query of the Grafana dashboard, every metric, and what Prometheus scrapes: against a real run, with the real Prometheus where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml
from process_trees import SECONDS
from prometheus_server import DASHBOARD, DOCKER, metrics_in, queries

from dflash_mp.config import MetricsConfig
from dflash_mp.monitor.catalogue import BY_NAME, COMMON_LABELS, METRICS

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def test_every_metric_is_on_the_dashboard_and_every_query_asks_for_metrics_that_exist() -> None:
    asked = {name for _, expression in queries() for name in metrics_in(expression)}
    assert asked == set(BY_NAME)


def test_labels_in_queries_and_legends_are_those_of_the_metrics() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    for panel in panels:
        for target in panel.get("targets", ()):
            names = metrics_in(target["expr"])
            known = {label for name in names for label in BY_NAME[name].labels} | {*COMMON_LABELS, "job", "instance"}
            used = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            used += re.findall(r'(\w+)=~?"', target["expr"])
            assert set(used) <= known, (panel["title"], target)


def test_names_follow_the_conventions() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"dflash_mp_[a-z]+(_[a-z]+)*", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not re.search(r"_(ms|milliseconds|mib|mb|kb|percent)(_|$)", metric.name), metric.name


@needs_promtool
def test_what_prometheus_reads_is_valid() -> None:
    check = subprocess.run(
        ["promtool", "check", "config", str(DOCKER / "prometheus.yml")], capture_output=True, timeout=SECONDS
    )
    assert check.returncode == 0, check.stderr.decode()


def test_the_ports_that_are_scraped_are_the_default_ones() -> None:
    tree = yaml.safe_load((DOCKER / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = tree["scrape_configs"]
    targets = [target for config in job["static_configs"] for target in config["targets"]]
    defaults = MetricsConfig()
    assert defaults.feeder_port is not None
    assert defaults.rank_port is not None
    for target in targets:
        host, port = target.split(":")
        first = defaults.rank_port if host == "drafters" else defaults.feeder_port
        assert 0 <= int(port) - first < 16, target
