"""The files in docker/: what Compose and a linter say of them, and their commands and health checks run outside a container."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from compose_services import DOCKER, compose, image, running, tool
from free_ports import free_ports, ports_in_a_row
from process_trees import SECONDS, eventually

from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.bench.tiny_run import write_conversations
from dflash_mp.drafter.checkpoint import steps_of
from dflash_mp.process import children_of

_CPU = ("compose.yaml", "compose.cpu.yaml")


def test_the_linter_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run([tool("hadolint"), str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_container_of_ours_gives_up_what_it_does_not_need() -> None:
    for files in (("compose.yaml",), _CPU, ("compose.yaml", "compose.hosts.yaml")):
        for name, service in compose(*files, profiles=("metrics",))["services"].items():
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            if service["image"] == "dflash-mp":
                assert service["read_only"] is True, name
                assert service["init"] is True, name
            if files[-1] != "compose.hosts.yaml":
                assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", [])), name


def test_no_gpu_has_two_users_and_every_rank_has_one() -> None:
    services = compose("compose.yaml")["services"]
    taken: dict[str, str] = {}
    for name, service in services.items():
        for device in service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", []):
            for gpu in device["device_ids"]:
                assert gpu not in taken, f"{name} and {taken[gpu]} both take GPU {gpu}"
                taken[gpu] = name
    words = services["drafters"]["command"]
    ranks = int(words[words.index("--nproc-per-node") + 1])
    assert list(taken.values()).count("drafters") == ranks
    assert all(any(name == user for user in taken.values()) for name in ("feeder-0", "feeder-1"))


def test_what_prometheus_scrapes_and_grafana_asks_are_services() -> None:
    services = compose("compose.yaml", profiles=("metrics",))["services"]
    scraped = (DOCKER / "prometheus.yml").read_text()
    assert all(f"- {name}:17" in scraped for name in ("feeder-0", "feeder-1", "drafters"))
    assert "prometheus" in services
    for name in ("feeder-0", "feeder-1", "drafters"):
        assert "metrics.address=0.0.0.0" in services[name]["command"], f"nobody could scrape {name}"


def test_of_the_keys_each_side_gets_its_own() -> None:
    services = compose("compose.yaml", "compose.hosts.yaml", HEAD="10.0.0.6", NODES="2", NODE="1")["services"]
    got = {name: {secret["target"] for secret in service.get("secrets", [])} for name, service in services.items()}
    assert got["feeder-0"] == got["feeder-1"] == {"feeder.secret", "drafter.public"}
    assert got["drafters"] == {"drafter.secret", "feeder.public"}
    assert not got["tensorboard"]
    assert "environment" not in services["drafters"], "the interface is that which leads to HEAD"
    assert "10.0.0.6" in services["drafters"]["command"]


def test_services_of_one_image_build_it_alike_and_drafters_of_several_hosts_are_not_started_again() -> None:
    for files in (("compose.yaml",), _CPU, ("compose.yaml", "compose.hosts.yaml")):
        services = compose(*files)["services"]
        builds = [service["build"] for service in services.values() if service["image"] == "dflash-mp"]
        assert all(build == builds[0] for build in builds), files
    assert services["drafters"]["restart"] == "no", "75 would start an orderly stop again"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the volume `demo` holds, tiny: a target of as many layers as configs/quickstart.yaml taps, and documents."""
    directory = tmp_path_factory.mktemp("host")
    demo = directory / "home" / "demo"
    demo.mkdir(parents=True)
    write_tiny_target(demo / "SmolLM2-135M-Instruct", layers=15, hidden=32, heads=1, intermediate=32)
    write_conversations(demo / "codeio.jsonl", 150)
    (demo / "humaneval-prompts.jsonl").write_text("{}\n")
    return directory


def test_the_cpu_services_in_their_order_train_and_stop_with_a_checkpoint(home: Path) -> None:
    services = compose(*_CPU)["services"]
    assert set(services) == {"demo", "prepare", "feeder-0", "drafters", "tensorboard"}
    for name in ("demo", "prepare"):
        assert services[name]["healthcheck"] == {"disable": True}
        with running(home, services[name]) as once:
            assert once.process.wait(SECONDS) == 0, once.said()
    assert services["prepare"]["depends_on"]["demo"]["condition"] == "service_completed_successfully"
    assert services["feeder-0"]["depends_on"]["prepare"]["condition"] == "service_completed_successfully"
    assert services["drafters"]["depends_on"] == {"feeder-0": {"condition": "service_healthy", "required": True}}

    ports = _ports()
    steps = ("--set", "train.steps=100000", "--set", "train.log_every=1", "--set", "train.held_out_every=0")
    with running(home, services["feeder-0"], *ports) as feeder:
        code, text = feeder.health()
        assert (code, "no feeder listens" in text) == (1, True), "healthy before it listens"
        feeder.wait_until_well()
        with running(home, services["drafters"], *ports, *steps) as drafters:
            code, text = drafters.health()
            assert (code, "ranks run here" in text) == (1, True), "healthy before there are ranks"
            drafters.wait_until_well()
            metrics = home / "home" / "runs" / "quickstart" / "metrics.jsonl"
            eventually(lambda: metrics.exists() and '"step": 2' in metrics.read_text(), "two steps")
            _hung_is_unhealthy(drafters.process.pid, drafters)
            assert drafters.stop() == 0, drafters.said()
        assert max(steps_of(home / "home" / "runs" / "quickstart")) >= 2
        assert feeder.stop() == 0, feeder.said()
        assert feeder.health()[0] == 1


def _hung_is_unhealthy(torchrun: int, drafters: Any) -> None:
    rank = children_of(torchrun)[0]
    os.kill(rank, signal.SIGSTOP)
    try:
        code, text = drafters.health()
        assert (code, "does not answer" in text) == (1, True), text
    finally:
        os.kill(rank, signal.SIGCONT)


def _ports() -> tuple[str, ...]:
    """Ports of their own: outside containers others may have those of the configuration."""
    first = ports_in_a_row(9)
    return ("--set", f"metrics.feeder_port={first}", "--set", f"metrics.rank_port={first + 8}")


def test_tensorboard_is_healthy_when_it_answers(home: Path) -> None:
    service = compose("compose.yaml")["services"]["tensorboard"]
    port = str(free_ports()[0])
    service = {
        **service,
        "command": [port if word == "6006" else word for word in service["command"]],
        "healthcheck": {"test": [word.replace("6006", port) for word in service["healthcheck"]["test"]]},
    }
    (home / "home" / "runs").mkdir(exist_ok=True)
    with running(home, service) as board:
        assert board.health()[0] == 1
        board.wait_until_well()
        assert board.process.poll() is None


def test_the_image_has_one_health_check_that_looks_at_process_one() -> None:
    assert image()["healthcheck"] == ["dflash-mp", "health"]
