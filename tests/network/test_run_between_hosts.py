"""A whole run between three hosts, by names and IPv6, over a bad wire that is cut meanwhile: it ends with the weights of a quiet one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from hosts import Host, network
from process_trees import SECONDS, eventually
from tiny_run import make_tiny_run

from dflash_mp.stream.keys import keygen

PARTITION_SECONDS = float(os.environ.get("DFLASH_MP_PARTITION_SECONDS", "5"))  # 30 in the long mode
STEPS = 12
# A window of some two steps' rows: what lies in it when the wire is cut must not do for the rest of the run.
OPTIONS = (f"train.steps={STEPS}", "train.checkpoint_every=100", "stream.silent_seconds=2", "stream.window_mib=0.8")


def options(*sets: str) -> list[str]:
    return [word for option in (*OPTIONS, *sets) for word in ("--set", option)]


def weights(run_dir: Path) -> bytes:
    return (run_dir / "checkpoints" / f"step-{STEPS:08d}" / "weights.safetensors").read_bytes()


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return make_tiny_run(tmp_path)


class Started:
    """Processes on hosts that end with the test."""

    def __init__(self, run_file: Path, log: Path) -> None:
        self._run_file, self._log, self._all = run_file, log, ExitStack()
        self.seen = 0

    def on(
        self, host: Host, *command: str, sets: list[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        more = {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONUNBUFFERED": "1", **(environment or {})}
        with self._log.open("ab") as out:
            whole = [sys.executable, "-m", *command, "-c", str(self._run_file), *sets]
            process: subprocess.Popen[bytes] = host.popen(whole, stdout=out, stderr=out, env={**os.environ, **more})
        self._all.callback(process.wait)
        self._all.callback(process.kill)
        return process

    def wait_for(self, text: str, process: subprocess.Popen[bytes]) -> None:
        eventually(lambda: text in self.log()[self.seen :] or process.poll() is not None, f"{text!r} in the log")
        assert process.poll() is None, self.log()

    def forget(self) -> None:
        """What was logged until now does not count in `wait_for`."""
        self.seen = len(self.log())

    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self._all.close()


@pytest.fixture
def started(run_file: Path, tmp_path: Path) -> Iterator[Started]:
    made = Started(run_file, tmp_path / "log")
    yield made
    made.close()


@pytest.mark.timeout(900)  # it takes half a minute on a machine that does nothing else
def test_a_bad_wire_a_partition_and_a_feeder_that_moves_change_no_weight(started: Started, tmp_path: Path) -> None:
    keygen(tmp_path / "keys")
    shared = (f"stream.keys={tmp_path / 'keys'}", "stream.connect_seconds=240")
    with network("feeder", "one", "two") as (wire, feeding, one, two):

        def feed() -> subprocess.Popen[bytes]:
            for host in (one, two):
                host.knows("feeder", feeding.address6)
            sets = options(
                *shared, f"run_dir={tmp_path / 'run'}", f"feed.endpoints=['tcp://[{feeding.address6}]:5555']"
            )
            return started.on(feeding, "dflash_mp.cli", "feed", sets=sets)

        def drafters(hosts: tuple[Host, Host], run_dir: Path) -> list[subprocess.Popen[bytes]]:
            """A rank on each of `hosts`, as torchrun would start it."""
            sets = options(*shared, f"run_dir={run_dir}", "feed.endpoints=['tcp://feeder:5555']")
            ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address6, "MASTER_PORT": "29500"}
            return [
                started.on(host, "dflash_mp.drafter", sets=sets, environment={**ranks, "RANK": str(rank)})
                for rank, host in enumerate(hosts)
            ]

        feeder = feed()
        undisturbed, run = tmp_path / "undisturbed" / "run", tmp_path / "run"
        assert [rank.wait(SECONDS) for rank in drafters((one, one), undisturbed)] == [0, 0], started.log()

        started.forget()
        wire.shape(delay=0.05, loss=0.01)
        ranks = drafters((one, two), run)
        started.wait_for("step 3/", ranks[0])
        wire.cut(feeding, one)
        wire.cut(feeding, two)
        time.sleep(PARTITION_SECONDS)
        assert f"step {STEPS}/" not in started.log()[started.seen :]
        wire.mend()
        started.wait_for("step 5/", ranks[0])
        feeder.kill()
        feeder.wait()
        feeding.move6("fd77::99")
        feed()
        assert [rank.wait(2 * SECONDS) for rank in ranks] == [0, 0], started.log()
    assert weights(run) == weights(undisturbed)
