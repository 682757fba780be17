"""A real run, looked at while it goes on: by Prometheus with the dashboard's queries, by `dflash-mp top`, and by `dflash-mp report`."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_ports
from observed_run import ObservedRun, observed_run
from process_trees import SECONDS, eventually, written_metrics
from prometheus_server import needs_prometheus, prometheus, queries

from dflash_mp.monitor.catalogue import BY_NAME, METRICS
from dflash_mp.monitor.scrape import Scraper

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedRun]:
    with observed_run(tmp_path_factory.mktemp("observed")) as run:
        yield run


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
    lines = written_metrics(observed.run_dir)
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


@needs_prometheus
def test_every_query_of_the_dashboard_returns_data_from_a_run(observed: ObservedRun, tmp_path: Path) -> None:
    with prometheus(tmp_path, f"127.0.0.1:{free_ports()[0]}", observed.endpoints) as server:
        assert len(queries()) >= 40
        assert server.without_data(observed.run_dir.name, SECONDS) == []
        assert len(server.ask('up{job="dflash-mp"} == 1')) == 4
        runs = server.ask("count by (run) (dflash_mp_build_info)")
        assert [one["metric"]["run"] for one in runs] == [observed.run_dir.name]


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash_mp.cli", "top", "--once", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_one_picture_of_a_run_shows_feeders_ranks_and_who_waits(observed: ObservedRun) -> None:
    shown = top(*observed.options, "--seconds", "1")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith(f"run {observed.run_dir.name} · step ")
    assert " of 100000 · loss " in lines[0]
    assert "held-out" in lines[0]
    assert "τ" in lines[0]
    assert lines[1].startswith("drafters wait ")
    rows = {" ".join(line.split()[:2]): line for line in lines}
    for name, endpoint in zip(("feeder 0", "feeder 1", "drafter 0", "drafter 1"), observed.endpoints, strict=True):
        assert rows[name].rstrip().endswith(endpoint), shown.stdout
    assert "2 of 2" in rows["drafter 0"]
    assert re.search(r" 2 +0 +[\d.]+ GB ", rows["feeder 0"])  # drafters, errors, memory
    assert "\x1b" not in shown.stdout


def test_an_endpoint_that_cannot_be_reached_is_a_line_among_the_others(observed: ObservedRun) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets it, and nobody listens
        closed = f"127.0.0.1:{taken.getsockname()[1]}"
        shown = top("--endpoint", observed.endpoints[0], "--endpoint", closed, "--seconds", "0.1")
        assert shown.returncode == 0
        assert f"{closed}: Connection refused" in shown.stdout
        assert "feeder 0" in shown.stdout
        assert top("--endpoint", closed).returncode == 1


def test_the_command_writes_a_page_about_a_run_that_goes_on(observed: ObservedRun, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    command = [sys.executable, "-m", "dflash_mp.cli", "report", str(observed.run_dir), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"page.html: \d+ lines of figures up to step \d+", done.stdout)
    html = out.read_text()
    assert {"Loss", "Acceptance length τ", "Throughput", "Waits", "Faults"} <= set(
        re.findall(r"<h3>([^<]*)</h3>", html)
    )
    assert "of 100,000" in html
