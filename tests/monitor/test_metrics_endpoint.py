"""The endpoint: what it listens on, what it answers, and that nobody who asks can hurt the process that answers."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
import torch

from dflash_mp.config import RunConfig
from dflash_mp.monitor import endpoint as module
from dflash_mp.monitor.endpoint import MetricsEndpoint, Sample
from dflash_mp.monitor.events import EventLog
from dflash_mp.monitor.samples import process_samples

WAIT = 60


def one_sample(events: EventLog) -> Iterator[Sample]:
    yield Sample("dflash_mp_feeder_made_rows_total", 3)


@pytest.fixture
def shown() -> Iterator[MetricsEndpoint]:
    with MetricsEndpoint("127.0.0.1", 0, "a-run", "feeder", 1, one_sample) as endpoint:
        yield endpoint


def get(endpoint: MetricsEndpoint, path: str = "/metrics") -> str:
    return urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}{path}", timeout=WAIT).read().decode()


def config_of(**metrics: object) -> RunConfig:
    tree = {
        "run_dir": "runs/a-run",
        "target": {"path": "t"},
        "data": {"path": "d"},
        "train": {"steps": 1},
        "metrics": metrics,
    }
    return RunConfig.model_validate(tree)


def test_a_sample_is_shown_with_its_name_its_meaning_and_who_shows_it(shown: MetricsEndpoint) -> None:
    page = get(shown)
    assert 'dflash_mp_feeder_made_rows_total{index="1",role="feeder",run="a-run"} 3.0' in page
    assert "# HELP dflash_mp_feeder_made_rows_total rows that the target computed" in page
    assert "# TYPE dflash_mp_feeder_made_rows_total counter" in page


def test_nothing_but_the_two_pages_is_answered(shown: MetricsEndpoint) -> None:
    for path in ("/", "/../etc/passwd", "/metrics/x"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(shown, path)
    posted = urllib.request.Request(f"http://127.0.0.1:{shown.port}/metrics", data=b"x")
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(posted, timeout=WAIT)


def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    defaults = config_of().metrics
    assert defaults.address == "127.0.0.1"
    with MetricsEndpoint(defaults.address, 0, "r", "feeder", 0, one_sample) as endpoint:
        assert endpoint._server is not None
        assert endpoint._server.server_address[0] == "127.0.0.1"


def test_two_feeders_and_two_ranks_of_a_host_get_ports_of_their_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1] - 1  # index 0 and 2 are free most likely, 1 is taken for sure
        config = config_of(feeder_port=first, rank_port=None)
        with MetricsEndpoint.of(config, "feeder", 1, one_sample) as endpoint:
            assert endpoint is not None
            assert endpoint.port is None
        with MetricsEndpoint.of(config, "drafter", 0, one_sample) as none:
            assert none is None


def test_a_taken_port_is_one_warning_with_the_remedy_and_the_process_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING):
        port = taken.getsockname()[1]
        with MetricsEndpoint("127.0.0.1", port, "r", "drafter", 0, one_sample) as endpoint:
            assert endpoint.port is None
            assert "dflash_mp_feeder_made_rows_total" in endpoint.metrics().decode()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"drafter 0 shows no figures: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "set metrics.rank_port or metrics.address, or metrics.rank_port to null to have none"
    )


def test_clients_that_say_nothing_keep_nobody_out_for_long(
    shown: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module._Handler, "timeout", 3.0)  # a thread may take a tenth of a second to start
    most_threads, setup = [0], module._Handler.setup

    def counting(handler: module._Handler) -> None:
        most_threads[0] = max(most_threads[0], threading.active_count())
        setup(handler)

    monkeypatch.setattr(module._Handler, "setup", counting)
    threads = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", shown.port or 0)) for _ in range(module._CLIENTS + 4)]
    try:
        assert all(
            one.recv(1) == b"" for one in silent
        )  # those that found no room at once, the others after the time-out
        assert most_threads[0] - threads <= module._CLIENTS
        deadline = time.monotonic() + WAIT
        while True:
            try:
                assert "dflash_mp_feeder_made_rows_total" in get(shown)
                break
            except OSError:  # the room is full
                assert time.monotonic() < deadline
                time.sleep(0.1)
    finally:
        for one in silent:
            one.close()


def test_clients_that_drip_are_cut_off(shown: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLIENT_SECONDS", 1.0)
    dripping = {socket.create_connection(("127.0.0.1", shown.port or 0)) for _ in range(module._CLIENTS)}
    deadline = time.monotonic() + WAIT / 2
    while dripping:
        assert time.monotonic() < deadline, f"{len(dripping)} still hold their places"
        for client in list(dripping):
            try:
                client.sendall(b"G")  # each well within the time for one that says nothing
                client.settimeout(0.01)
                assert client.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                pass
            client.close()
            dripping.remove(client)
    assert "dflash_mp_feeder_made_rows_total" in get(shown)


def test_figures_that_cannot_be_read_are_an_answer_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def broken(events: EventLog) -> Iterator[Sample]:
        yield Sample("dflash_mp_not_in_the_catalogue", 1)

    with MetricsEndpoint("127.0.0.1", 0, "r", "feeder", 0, broken) as endpoint:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            get(endpoint)
        assert "the figures could not be read" in caplog.text


def test_warnings_and_errors_are_shown_and_counted_without_secrets(
    shown: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "correct-horse-battery")
    logging.getLogger("dflash_mp.stream").warning("lost the feeder tcp://user:pass@host:1 with correct-horse-battery")
    logging.getLogger("dflash_mp.stream").error("gone")
    logging.getLogger("dflash_mp.stream").info("not an event")
    text = get(shown, "/events")
    events = json.loads(text)
    assert [event["level"] for event in events] == ["warning", "error"]
    assert abs(events[0]["time"] - time.time()) < 3600
    assert "lost the feeder" in text
    assert "correct-horse" not in text
    assert "pass@" not in text
    assert shown.events.counts == {"warning": 1, "error": 1}


def test_the_events_kept_are_bounded(shown: MetricsEndpoint) -> None:
    for number in range(200):
        logging.getLogger("dflash_mp").warning("%d %s", number, "x" * 10_000)
    events = json.loads(get(shown, "/events"))
    assert len(events) == 50
    assert events[-1]["text"].startswith("199 ")
    assert max(len(event["text"]) for event in events) == 500


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_memory_shown_is_what_the_process_has() -> None:
    device = torch.device("cuda", 0)
    block = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    shown = {
        sample.labels["kind"]: sample.value
        for sample in process_samples(EventLog(), device)
        if sample.name == "dflash_mp_gpu_memory_bytes"
    }
    assert block.numel() <= shown["allocated"] <= shown["peak"] <= shown["reserved"] <= shown["total"]
    assert shown["total"] == torch.cuda.get_device_properties(device).total_memory
