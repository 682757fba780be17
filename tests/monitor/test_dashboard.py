"""Every query of the Grafana dashboard, every metric, and what Prometheus scrapes: against a real run, with the real Prometheus where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml
from observed_run import ObservedRun, free_ports
from process_trees import SECONDS, eventually
from prometheus_server import DASHBOARD, DOCKER, metrics_in, needs_prometheus, prometheus, queries

from dflash_mp.config import MetricsConfig
from dflash_mp.monitor.catalogue import BY_NAME, COMMON_LABELS, METRICS
from dflash_mp.monitor.scrape import Scraper

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


def test_the_run_shows_every_metric_and_no_other(observed: ObservedRun) -> None:
    shown: dict[str, set[str]] = {}

    def everything() -> bool:
        for reading in Scraper(observed.endpoints, 5.0).read():
            shown.setdefault(reading.role, set()).update(name for name, _ in reading.samples)
        return set().union(*shown.values()) >= set(BY_NAME)

    eventually(everything, "every metric is shown")
    assert shown["feeder"] | shown["drafter"] == set(BY_NAME)
    for metric in METRICS:
        here = {role for role, names in shown.items() if metric.name in names}
        wanted = {"all": {"feeder", "drafter"}, "feeders": {"feeder"}}.get(metric.on, {"drafter"})
        assert here == wanted, metric.name


def test_the_figures_are_those_of_the_run(observed: ObservedRun) -> None:
    feeders, ranks = (Scraper(observed.endpoints[part], 30.0).read() for part in (slice(0, 2), slice(2, 4)))
    step = ranks[0].value("dflash_mp_train_step")
    lines = [json.loads(line) for line in (observed.run_dir / "metrics.jsonl").read_text().splitlines()]
    loss = ranks[0].value("dflash_mp_loss", split="train")
    (line,) = [line for line in lines if line["kind"] == "train" and line["loss"] == loss]
    assert step is not None
    assert line["step"] <= step <= line["step"] + 2  # a line every two steps
    assert ranks[0].value("dflash_mp_acceptance_length_tokens", split="train") == line["tau"]
    assert list(ranks[0].by_label("dflash_mp_train_step", "index").items()) == [("0", step)]
    slots = [ranks[0].value("dflash_mp_slot_accuracy_ratio", split="train", slot=str(slot)) for slot in (1, 2, 3)]
    assert slots == line["accuracy_per_slot"]
    assert ranks[0].value("dflash_mp_train_tokens_total") == step * 4 * 256
    for feeder in feeders:
        rows, size = (feeder.value(f"dflash_mp_feeder_delivered_{what}_total") for what in ("rows", "bytes"))
        assert rows
        assert size
        row_bytes = size / rows
        made = feeder.value("dflash_mp_feeder_made_rows_total")
        assert made is not None
        assert rows <= made
    for rank in ranks:
        held = rank.value("dflash_mp_stream_window_rows")
        assert held is not None
        assert held * row_bytes == rank.value("dflash_mp_stream_window_bytes")
        assert 0 <= (rank.value("dflash_mp_stream_waited_seconds_total") or 0) < 3600


@needs_promtool
def test_promtool_finds_nothing_to_complain_about(observed: ObservedRun) -> None:
    for endpoint in (observed.endpoints[0], observed.endpoints[2]):
        page = urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=SECONDS).read()
        check = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=SECONDS)
        assert check.returncode == 0, check.stderr.decode()


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


@needs_prometheus
def test_every_query_of_the_dashboard_returns_data_from_a_run(observed: ObservedRun, tmp_path: Path) -> None:
    with prometheus(tmp_path, f"127.0.0.1:{free_ports(1)}", observed.endpoints) as server:
        assert len(queries()) >= 40
        assert server.without_data(observed.run_dir.name, SECONDS) == []
        assert len(server.ask('up{job="dflash-mp"} == 1')) == 4
        runs = server.ask("count by (run) (dflash_mp_build_info)")
        assert [one["metric"]["run"] for one in runs] == [observed.run_dir.name]
