"""`doctor` finds what would break a run, says what to do, and ends with the code that the run would have ended with."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from free_ports import free_ports
from header_only_target import write_qwen3_8b

from dflash_mp.bench.synthetic import synthetic_expectations, synthetic_plan, synthetic_row, synthetic_weights
from dflash_mp.bench.tiny_run import tiny_tree
from dflash_mp.cli import main
from dflash_mp.config import RunConfig
from dflash_mp.data.row import RowKey
from dflash_mp.doctor.bandwidth import check_bandwidth, measured_rate
from dflash_mp.doctor.checks import examine
from dflash_mp.doctor.devices import Gpu, check_fp8, check_gpus
from dflash_mp.doctor.feeders import check_feeders
from dflash_mp.doctor.files import check_keys, check_other_clock
from dflash_mp.doctor.finding import Finding, exit_code, green, red, yellow
from dflash_mp.doctor.fit import Plans, check_fit, largest_row
from dflash_mp.doctor.report import lines
from dflash_mp.doctor.target_size import read_target_size
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.inquiry import ask
from dflash_mp.stream.keys import keygen
from dflash_mp.stream.plan import StreamPlan
from dflash_mp.stream.software import Package, own_software

GIB = 2**30


def config_of(directory: Path, **changes: Any) -> RunConfig:
    tree = tiny_tree(directory)
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return RunConfig.model_validate(tree)


def about(findings: list[Finding], text: str) -> list[Finding]:
    return [finding for finding in findings if text in finding.about]


def test_a_small_dev_shm_and_too_few_open_files() -> None:
    """In a mount namespace of its own, where /dev/shm has 1 MiB as in a container started carelessly."""
    command = "mount -t tmpfs -o size=1m tmpfs /dev/shm && ulimit -n 128 && exec %s -m dflash_mp.cli doctor --json"
    try:
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", command % sys.executable],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    report = json.loads(done.stdout)
    found = {finding["about"]: finding for finding in report["findings"]}
    assert found["/dev/shm"]["level"] == "red"
    assert "1.0 MiB" in found["/dev/shm"]["found"]
    assert "--shm-size" in found["/dev/shm"]["remedy"]
    assert found["open files"]["level"] == "red"
    assert found["shared memory"]["level"] == "green", "rows don't go through /dev/shm"
    assert done.returncode == report["exit_code"] == 1


def test_a_port_that_something_else_has(tmp_path: Path) -> None:
    (port,) = free_ports()  # nobody else's when it is free again
    endpoint = f"tcp://127.0.0.1:{port}"
    with socket.create_server(("127.0.0.1", port)):
        (asked,) = check_feeders(config_of(tmp_path, feed={"endpoints": [endpoint]}), 0.5, 0.0)
    (finding,) = asked.findings
    assert (finding.level, finding.about, finding.exit_code) == ("red", endpoint, 5)
    assert f"(process {os.getpid()})" in finding.found
    (asked,) = check_feeders(config_of(tmp_path, feed={"endpoints": [endpoint]}), 0.5, 0.0)
    assert asked.findings[0].level == "green", "now it is free"


def test_a_unix_socket_that_something_else_has(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "feeder.sock"))
        server.listen()
        (asked,) = check_feeders(config_of(tmp_path, feed={"endpoints": [f"ipc://{tmp_path}/feeder.sock"]}), 0.5, 0.0)
    assert asked.findings[0].level == "red"
    assert f"(process {os.getpid()})" in asked.findings[0].found


def test_a_feeder_of_another_host_that_is_not_there_yet(tmp_path: Path) -> None:
    config = config_of(tmp_path, feed={"endpoints": ["tcp://192.0.2.1:5555"], "insecure_no_auth": True})
    (asked,) = check_feeders(config, 0.3, 0.0)
    assert asked.findings[0].level == "yellow"
    assert "start its feeder" in asked.findings[0].remedy


@pytest.mark.parametrize("role", ["feeder", "drafter"])
def test_a_secret_key_that_others_can_read(tmp_path: Path, role: str) -> None:
    keys = tmp_path / "keys"
    keygen(keys)
    assert {finding.level for finding in check_keys(keys)} == {"green"}
    (keys / f"{role}.secret").chmod(0o644)
    found = [finding for finding in check_keys(keys) if finding.level == "red"]
    assert len(found) == 1
    assert f"{role}.secret can be read by other users" in found[0].found
    assert "chmod 600" in found[0].remedy
    assert exit_code(found) == 5


def gpus_of(gibibytes: int, count: int, used: int = 0) -> list[Gpu]:
    free = (gibibytes - used) * GIB
    return [Gpu(i, "a GPU", gibibytes * GIB, free, "sm_90", ("process 7 python (9.0 GiB)",)) for i in range(count)]


def large_run(directory: Path, **changes: Any) -> RunConfig:
    """The drafter of an 8 B target on cuda:0, its feeder on cuda:1."""
    target = {"path": str(write_qwen3_8b(directory / "Qwen3-8B")), "device": "auto", "taps": 5}
    base: dict[str, Any] = {
        "target": target,
        "feed": {"devices": ["cuda:1"]},
        "stream": {"window_mib": 640},
        "data": {"row_tokens": 4096},
        "drafter": {"layers": 5, "block_size": 16},
        "train": {"device": "auto", "anchors_per_row": 512},
    }
    return config_of(directory, **{key: {**value, **changes.get(key, {})} for key, value in base.items()})


def test_a_gpu_too_small_for_the_configuration(tmp_path: Path) -> None:
    config = large_run(tmp_path)
    findings = list(examine(config, probe=False, gpus_of=lambda: gpus_of(24, 2)))
    (drafter,), (feeder,) = about(findings, "memory, cuda:0"), about(findings, "memory, cuda:1")
    assert (drafter.level, feeder.level) == ("red", "green")
    assert "24.0 GiB" in drafter.found
    assert drafter.remedy.startswith("lower train.micro_batch_rows")
    assert any("16 bytes" in line or "8·P, P" in line or "8·P" in line for line in drafter.details)
    assert exit_code(findings) != 0

    levels = [
        about(list(examine(config, probe=False, gpus_of=lambda: gpus_of(80, 2))), f"memory, cuda:{i}")[0].level
        for i in (0, 1)
    ]
    assert levels == ["green", "green"]


def test_what_runs_on_a_host_follows_from_the_feeders_addresses(tmp_path: Path) -> None:
    """On the drafters' host the feeder's GPU counts for nothing, and the other way round."""
    config = large_run(tmp_path).model_copy(update={"run_dir": tmp_path / "run"})
    both = {"memory, cuda:0", "memory, cuda:1"}
    for endpoint, role, said, counted in (
        ("ipc:///tmp/nobody.sock", "auto", "feeds and trains", both),
        ("tcp://192.0.2.1:5555", "auto", "trains", {"memory, cuda:0"}),
        ("tcp://192.0.2.1:5555", "both", "feeds and trains", both),
        ("tcp://0.0.0.0:0", "auto", "feeds", {"memory, cuda:1"}),
    ):
        feed = config.feed.model_copy(update={"endpoints": [endpoint], "insecure_no_auth": True})
        plan = config.model_copy(update={"feed": feed})
        found = []
        for finding in examine(plan, probe=False, role=role, gpus_of=lambda: gpus_of(80, 2)):
            found.append(finding)
            if finding.about.startswith("host memory of"):
                break  # what follows asks the addresses
        assert about(found, "this host")[0].found.startswith(said)
        assert {finding.about for finding in about(found, "memory, cuda")} == counted


def test_feeders_of_other_hosts_take_no_memory_of_this_one(tmp_path: Path) -> None:
    """Each of three hosts has a feeder on its cuda:0."""
    endpoints = ["tcp://192.0.2.1:5555", "tcp://127.0.0.1:5555", "tcp://198.51.100.1:5555"]
    feed = {"endpoints": endpoints, "devices": ["cuda:0", "cuda:0", "cuda:0"], "insecure_no_auth": True}
    config = large_run(tmp_path, feed=feed)
    plans = Plans(config, read_target_size(config.target, "bfloat16"), True, trains=False)
    found = check_fit(plans, gpus_of(32, 1))
    (gpu,), (host,) = about(found, "memory, cuda:0"), about(found, "host memory of")
    assert gpu.level == "green"
    assert gpu.found.startswith("a feeder needs")
    assert "for each of 1 feeders" in host.details[0]


def test_gpus_of_which_the_same_is_to_be_said_share_a_line(tmp_path: Path) -> None:
    config = large_run(tmp_path, feed={"count": 2, "devices": ["cuda:2", "cuda:3"]}, train={"drafters": 2})
    found = check_fit(Plans(config, read_target_size(config.target, "bfloat16"), True), gpus_of(80, 4))
    assert [finding.about for finding in about(found, "memory, cuda")] == ["memory, cuda:0, 1", "memory, cuda:2, 3"]


def test_a_gpu_that_others_use_and_a_feeder_on_a_drafters_gpu(tmp_path: Path) -> None:
    config = large_run(tmp_path)
    size = read_target_size(config.target, "bfloat16")
    busy = check_fit(Plans(config, size, True), gpus_of(80, 2, used=60))
    assert about(busy, "memory, cuda:0")[0].level == "red"
    assert "process 7 python" in about(busy, "memory, cuda:0")[0].remedy
    shared = config.model_copy(update={"feed": config.feed.model_copy(update={"devices": ["cuda:0"]})})
    (together,) = about(check_fit(Plans(shared, size, True), gpus_of(48, 1)), "memory, cuda:0")
    assert together.level == "red"
    assert "feed.devices" in together.remedy
    missing = check_fit(Plans(config, size, True), gpus_of(80, 1))
    assert about(missing, "memory, cuda:1")[0].exit_code == 2


def test_the_largest_row_fits_and_a_longer_one_does_not(tmp_path: Path) -> None:
    config = large_run(tmp_path)
    plans = Plans(config, read_target_size(config.target, "bfloat16"), True)
    budget = 40 * GIB
    for kind, memory_of in (("drafter", plans.drafter), ("feeder", plans.feeder)):
        tokens = largest_row(plans, kind, budget)
        assert 1.05 * memory_of(tokens).nbytes + GIB <= budget
        assert tokens == 40960 or 1.05 * memory_of(tokens + 64).nbytes + GIB > budget
    assert largest_row(plans, "drafter", 10 * GIB) == 0
    (finding,) = about(check_fit(plans, gpus_of(80, 2)), "largest row")
    assert "tokens on a drafter's GPU" in finding.found


@contextmanager
def feeder(plan: StreamPlan) -> Iterator[str]:
    """A feeder of this process; its address."""
    stop = threading.Event()
    with FeederService("tcp://127.0.0.1:0", plan, synthetic_weights(plan), run="run") as service:
        serving = threading.Thread(target=service.serve, args=(synthetic_row, stop))
        serving.start()
        try:
            yield service.endpoint
        finally:
            stop.set()
            serving.join()


def test_another_pytorch_on_a_feeders_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = synthetic_plan(256, vocab_size=1 << 17)
    with feeder(plan) as endpoint:
        config = config_of(tmp_path, feed={"endpoints": [endpoint]})
        same = check_feeders(config, 60.0, 20.0)[0]  # it is over when the embedding is there
        assert {finding.level for finding in same.findings} == {"green"}, same.findings
        assert (same.answer.bytes_per_second or 0.0) > 1e6

        elsewhere = tuple(Package(n, "2.10.0+cu130" if n == "torch" else v) for n, v in own_software())
        monkeypatch.setattr("dflash_mp.stream.feeder_io.own_software", lambda: elsewhere)
        found = list(check_feeders(config, 60.0, 0.0)[0].findings)
        (mismatch,) = [finding for finding in found if finding.level == "red"]
        assert mismatch.about == f"versions at {endpoint}"
        assert "PyTorch 2.10.0+cu130" in mismatch.found
        assert exit_code(found) == 5

        with caplog.at_level(logging.WARNING), RowClient([endpoint], synthetic_expectations_of(plan)) as client:
            client.connect()
        assert any("it runs PyTorch 2.10.0+cu130" in record.getMessage() for record in caplog.records)


def synthetic_expectations_of(plan: StreamPlan) -> Any:
    import dataclasses

    return dataclasses.replace(synthetic_expectations(plan), run="run")


def test_a_feeder_of_another_run_and_one_that_serves_other_rows(tmp_path: Path) -> None:
    with feeder(synthetic_plan(64)) as endpoint:
        other_rows = config_of(tmp_path, feed={"endpoints": [endpoint]})
        (finding,) = check_feeders(other_rows, 20.0, 0.0)[0].findings
        assert finding.level == "red"
        assert "data.row_tokens: 256 wanted, 64 served" in finding.found
        other_run = other_rows.model_copy(update={"run_dir": tmp_path / "another"})
        (finding,) = check_feeders(other_run, 20.0, 0.0)[0].findings
        assert finding.level == "red"
        assert "serves the run 'run'" in finding.found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer has a minute to come."""
    monkeypatch.setattr("dflash_mp.doctor.checks._ANSWER_SECONDS", 60.0)


def test_a_host_that_only_trains_learns_the_sizes_from_a_feeder(tmp_path: Path, patient: None) -> None:
    with feeder(synthetic_plan(256)) as endpoint:
        target = {"path": str(tmp_path / "not-here"), "device": "auto"}
        config = config_of(tmp_path, feed={"endpoints": [endpoint]}, target=target, train={"device": "auto"})
        found = list(examine(config, probe=False, role="drafters", gpus_of=lambda: gpus_of(80, 1)))
    assert about(found, "target")[0].found.startswith("synthetic: bfloat16")
    assert [finding.about for finding in about(found, "memory, cuda")] == ["memory, cuda:0"]
    assert not [finding for finding in found if finding.level == "red" and finding.about != "CUDA"]


def test_feeders_that_only_the_file_names_are_asked(tmp_path: Path, patient: None) -> None:
    names = tmp_path / "feeders"
    stream = {"feeders_file": str(names)}
    config = config_of(tmp_path, feed={"count": 0}, stream=stream, target={"path": str(tmp_path / "not-here")})
    with feeder(synthetic_plan(256)) as endpoint:
        names.write_text(f"# ours\n{endpoint}\n", encoding="utf-8")
        found = list(examine(config, rows_per_second=5.0, probe=False, gpus_of=list))
    assert about(found, "this host")[0].found.startswith("trains")
    assert about(found, endpoint)[0].level == "green"
    assert about(found, "target")[0].found.startswith("synthetic: ")
    for text, wanted in (("# nobody yet", "no feeder is named"), (None, "cannot read stream.feeders_file")):
        names.unlink() if text is None else names.write_text(text, encoding="utf-8")
        (finding,) = check_feeders(config, 0.3, 0.0)[0].findings
        assert (finding.level, finding.exit_code) == ("red", 5)
        assert finding.found.startswith(wanted)
        assert check_feeders(config, 0.3, 0.0, trains=False) == [], "feeders don't read it"


def test_asking_takes_no_ranks_place_and_no_row(tmp_path: Path) -> None:
    plan = synthetic_plan(64)
    with feeder(plan) as endpoint, RowClient([endpoint], synthetic_expectations_of(plan)) as client:
        client.connect()
        client.schedule(iter([RowKey("train", 0)]))
        client.take(RowKey("train", 0)).release()
        answer = ask(endpoint, synthetic_expectations_of(plan), seconds=60.0)
        assert answer.welcome is not None
        assert abs(answer.clock_ahead or 0.0) <= 1.0 + answer.round_trip
        client.schedule(iter([RowKey("train", 1)]))
        client.take(RowKey("train", 1)).release()
        assert client.stats.reasked == 0


def test_a_path_that_cannot_carry_what_a_run_needs(tmp_path: Path) -> None:
    config = large_run(tmp_path)
    plans = Plans(config, read_target_size(config.target, "bfloat16"), True)
    row = plans.row_bytes()
    assert row == 4096 * (2 * 5 * 4096 + 13)
    levels = [check_bandwidth(plans, 10.0, {"a path": share * 10.0 * row})[1].level for share in (0.9, 1.2, 2.0)]
    assert levels == ["red", "yellow", "green"]
    assert check_bandwidth(plans, 10.0, {"a path": 6.0 * row}, 2)[1].level == "yellow", "half of it goes another way"
    assert "40,973 bytes per token" in check_bandwidth(plans, None, {})[0].found
    stream = config.stream.model_copy(update={"wire_dtype": "fp8"})
    in_fp8 = Plans(config.model_copy(update={"stream": stream}), plans.size, True)
    assert "20,513 bytes per token" in check_bandwidth(in_fp8, None, {})[0].found
    assert check_bandwidth(in_fp8, 10.0, {"a path": 9.0 * row})[1].level == "green", "half of that is enough"
    assert check_bandwidth(in_fp8, 10.0, {})[0].details == ("K·H + 4·K + 13 bytes per token, K = 5, H = 4096",)
    (tmp_path / "metrics.jsonl").write_text(
        '{"drafters_rows_per_second": 3.5}\n{"kind": "held_out"}\n', encoding="utf-8"
    )
    assert measured_rate(tmp_path) == 3.5
    assert measured_rate(tmp_path / "none") is None


def test_a_clock_that_is_off() -> None:
    assert check_other_clock("the other host", -30.0, 0.1).level == "yellow"
    assert "behind this host" in check_other_clock("the other host", -30.0, 0.1).found
    assert check_other_clock("the other host", 0.5, 0.1).level == "green"


def test_code_for_this_gpu() -> None:
    (gpu,) = gpus_of(80, 1)
    levels = {
        built: check_gpus([gpu], [built])[0].level for built in ("sm_90", "sm_80", "compute_80", "sm_100", "sm_90a")
    }
    assert levels == {"sm_90": "green", "sm_80": "red", "compute_80": "green", "sm_100": "red", "sm_90a": "green"}


def test_a_gpu_that_fp8_cannot_run_on() -> None:
    (gpu,) = gpus_of(80, 1)
    kinds = [
        replace(gpu, index=i, architecture=kind)
        for i, kind in enumerate(("sm_90", "sm_89", "sm_86", "sm_120", "sm_80"))
    ]
    assert [(finding.about, finding.exit_code) for finding in check_fp8(kinds, 5)] == [("cuda:2", 2), ("cuda:4", 2)]
    assert check_fp8(kinds, 2) == [], "the others train nothing"


def test_the_exit_code_is_that_of_the_first_red_line_and_details_follow_it() -> None:
    findings = [green("a", "fine"), yellow("b", "hm", "mind"), red("c", "bad", "cure", 5), red("d", "worse", "cure", 2)]
    assert exit_code(findings) == 5
    assert exit_code(findings[:2]) == 0
    assert lines(findings, details=False)[:3] == ["ok      a: fine", "warning b: hm", "        → mind"]


def test_the_command_on_a_run_that_fits(tmp_path: Path) -> None:
    from dflash_mp.bench.tiny import write_tiny_target

    write_tiny_target(tmp_path / "target")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tiny_tree(tmp_path)), encoding="utf-8")
    done = CliRunner().invoke(main, ["doctor", "-c", str(file), "--rows-per-second", "5", "--json"])
    report = json.loads(done.stdout)
    levels = {finding["about"]: finding["level"] for finding in report["findings"]}
    assert done.exit_code == report["exit_code"] == 0, done.output
    assert levels["data"] == "yellow", "nothing is prepared"
    assert levels["path"] == levels["window"] == levels["target"] == "green"
    assert not (tmp_path / "run").exists()

    done = CliRunner().invoke(main, ["doctor", "-c", str(file), "--no-probe", "--set", "stream.window_mib=0.1"])
    assert done.exit_code == 5
    assert "FAILS   window: stream.window_mib 0.1" in done.output
    assert "set stream.window_mib to at least" in done.output
