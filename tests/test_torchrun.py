"""The torchrun group as a part of a run, with real workers."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from free_ports import free_ports
from process_trees import SECONDS, eventually, output_of, part, supervised

from dflash_mp.process import children_of
from dflash_mp.supervisor import Part

_WORKER = """
import os, signal, sys, time
from dflash_mp.process import die_with_parent
die_with_parent()
rank = os.environ["RANK"]
def say(text):
    os.write(1, f"{text}\\n".encode())
def stop(*_):
    say(f"rank {rank} saves")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
say("up")
if rank == "1" and sys.argv[1] in ("fail", "die"):
    sys.exit(5) if sys.argv[1] == "fail" else os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def drafters(tmp_path: Path, request: pytest.FixtureRequest) -> Part:
    worker = tmp_path / "worker.py"
    worker.write_text(_WORKER)
    torchrun = (sys.executable, "-m", "dflash_mp.torchrun", "--standalone", "--nproc-per-node", "2")
    return part(tmp_path, "drafters", (*torchrun, str(worker), request.param), leads=True)


@pytest.mark.parametrize(
    ("drafters", "of_rank", "exit_code"), [("fail", 5, 5), ("die", -9, 137)], indirect=["drafters"], ids=["fail", "die"]
)
def test_the_exit_code_is_that_of_the_first_failed_rank(drafters: Part, of_rank: int, exit_code: int) -> None:
    with supervised(drafters) as run:
        code, output = run.finish()
        assert run.processes() == []
    assert code == exit_code
    assert f"drafters failed (exit code {exit_code})" in output
    assert f"rank 1 was the first to fail, with exit code {of_rank}" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("drafters", ["wait"], indirect=True)
def test_after_a_signal_every_rank_ends_in_its_own_time_and_torchrun_with_them(drafters: Part) -> None:
    with supervised(drafters) as run:
        eventually(lambda: output_of(drafters).count("up\n") == 2, "both ranks are up")
        run.process.send_signal(signal.SIGTERM)
        code, output = run.finish()
        assert run.processes() == []
    assert (code, output) == (0, "stopped in order by SIGTERM\n")
    assert {"rank 0 saves", "rank 1 saves"} <= set(output_of(drafters).splitlines())


@pytest.mark.parametrize("drafters", ["wait"], indirect=True)
def test_ranks_die_with_a_killed_supervisor(drafters: Part) -> None:
    with supervised(drafters) as run:
        eventually(lambda: output_of(drafters).count("up\n") == 2, "both ranks are up")
        assert len(run.processes()) >= 3
        run.process.kill()
        run.wait_until_gone()


_SLOW_WORKER = """
import os, signal, sys, time
from dflash_mp.process import die_with_parent
die_with_parent()
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
os.write(1, b"up\\n")
while not asked or not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
    if asked == [1]:
        asked.append(2)
        os.write(1, b"saving\\n")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_torchrun_by_hand_hands_a_signal_on_and_ends_well_when_its_ranks_do(
    tmp_path: Path, number: signal.Signals
) -> None:
    worker, saved, log = tmp_path / "worker.py", tmp_path / "saved", tmp_path / "log"
    worker.write_text(_SLOW_WORKER)
    command = [sys.executable, "-m", "dflash_mp.torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command += ["env", "--ignore-signal=HUP", sys.executable, str(worker), str(saved)]
    with started(command, log) as torchrun:
        eventually(lambda: log.read_text().count("up\n") == 2, "both ranks are up")
        torchrun.send_signal(number)
        eventually(lambda: log.read_text().count("saving\n") == 2, "both ranks were asked")
        assert torchrun.poll() is None, log.read_text()
        saved.touch()
        assert torchrun.wait(SECONDS) == 0, log.read_text()


def test_a_stop_is_not_undone_by_restarts(tmp_path: Path) -> None:
    """Ranks that were not training yet end with 128 + signal, which torchrun takes for a failure."""
    worker, log = tmp_path / "worker.sh", tmp_path / "log"
    worker.write_text("trap 'exit 143' TERM; echo up; while :; do sleep 0.05; done")
    how = ["--standalone", "--nproc-per-node", "1", "--max-restarts", "2", "--no-python", "sh", str(worker)]
    with started([sys.executable, "-m", "dflash_mp.torchrun", *how], log) as torchrun:
        eventually(lambda: "up" in log.read_text().splitlines() or torchrun.poll() is not None, "the rank is up")
        torchrun.send_signal(signal.SIGTERM)
        assert torchrun.wait(SECONDS) == 128 + signal.SIGTERM, log.read_text()


def test_torchrun_that_still_waits_for_the_other_machines_stops_at_once(tmp_path: Path) -> None:
    worker, log = tmp_path / "worker.py", tmp_path / "log"
    worker.write_text(_WORKER)
    (port,) = free_ports()
    rendezvous = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-m", "dflash_mp.torchrun", *rendezvous, str(worker), "wait"]
    with started(command, log) as torchrun:
        eventually(lambda: _listens(port) or torchrun.poll() is not None, "the rendezvous is open")
        torchrun.send_signal(signal.SIGTERM)
        assert torchrun.wait(SECONDS) == 128 + signal.SIGTERM, log.read_text()
    assert "Traceback" not in log.read_text()


_EARLY_AND_LATE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = os.environ["RANK"]
while rank == "1" and not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
os.write(1, f"rank {rank} saved\\n".encode())
"""


def test_a_signal_after_the_ranks_have_ended_makes_no_failure_of_it(tmp_path: Path) -> None:
    """The machine whose ranks are done waits for the other one's."""
    worker, go_on, logs = tmp_path / "worker.py", tmp_path / "go-on", [tmp_path / "0", tmp_path / "1"]
    worker.write_text(_EARLY_AND_LATE)
    (port,) = free_ports()
    rendezvous = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-m", "dflash_mp.torchrun", *rendezvous]
    with (
        started([*command, "--node-rank", "0", str(worker), str(go_on)], logs[0]) as first,
        started([*command, "--node-rank", "1", str(worker), str(go_on)], logs[1]) as second,
    ):
        eventually(lambda: "rank 0 saved" in logs[0].read_text(), "the first machine's rank is done")
        eventually(lambda: not children_of(first.pid), "and has ended")
        first.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        go_on.touch()
        assert second.wait(SECONDS) == 0, logs[1].read_text()
        assert first.wait(SECONDS) == 0, logs[0].read_text()


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


_ONLY_RANK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print({name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}, sys.argv[1:], flush=True)
if sys.argv[1] == "fail":
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "9" else sys.exit(int(sys.argv[2]))
while True:
    time.sleep(0.05)
"""
_PLACE = "{'RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1'}"


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a world of one, up to its arguments."""
    (tmp_path / "only_rank.py").write_text(_ONLY_RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return [sys.executable, "-m", "dflash_mp.torchrun", "--standalone", "--nproc-per-node", "1", "-m", "only_rank"]


@pytest.mark.parametrize(("how", "code"), [("5", 5), ("9", 128 + 9), ("0", 0)])
def test_a_rank_alone_ends_with_its_own_exit_code(tmp_path: Path, alone: list[str], how: str, code: int) -> None:
    with started([*alone, "fail", how], tmp_path / "log") as torchrun:
        assert torchrun.wait(SECONDS) == code
    first, *rest = (tmp_path / "log").read_text().splitlines()
    assert first == f"{_PLACE} ['fail', '{how}']"
    assert [line.partition(" | ")[2] for line in rest] == (
        [f"error: rank 0 was the first to fail, with exit code {-9 if how == '9' else how}"] if code else []
    )


def test_a_rank_alone_is_asked_to_stop(tmp_path: Path, alone: list[str]) -> None:
    with started([*alone, "wait"], tmp_path / "log") as torchrun:
        eventually(lambda: _PLACE in (tmp_path / "log").read_text(), "the rank is up")
        torchrun.send_signal(signal.SIGINT)
        assert torchrun.wait(SECONDS) == 0, (tmp_path / "log").read_text()


def test_a_rank_alone_sees_the_first_gpu_only_where_that_is_asked_for(
    tmp_path: Path, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    (tmp_path / "only_rank.py").write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    for options, seen in (([], "5,3"), (["--virtual-local-rank"], "5")):
        command = [*alone[:-2], *options, *alone[-2:]]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
        assert done.stdout == f"{seen}\n"


def test_a_rank_alone_does_not_wait_for_torchrun_to_be_imported() -> None:
    code = "import sys, dflash_mp.torchrun; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=SECONDS)
    assert done.stdout == "False\n"
