"""`dflash-mp run` with its real feeder and drafters: to the end, through interruptions, and when a part fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from free_ports import free_ports
from process_trees import SECONDS, eventually, written_metrics
from safetensors.torch import load_file
from tiny_run import make_tiny_run

from dflash_mp.config_file import load_config
from dflash_mp.drafter.checkpoint import steps_of
from dflash_mp.process import children_of, mark_of, marked_processes, send_signal
from dflash_mp.run_lock import RunLock

STEPS = 60


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("run"))


class Run:
    """A `dflash-mp run` in a process of its own."""

    def __init__(self, run_file: Path, run_dir: Path, *overrides: str) -> None:
        options = [f"run_dir={run_dir}", f"train.steps={STEPS}", "train.checkpoint_every=10", *overrides]
        command = [sys.executable, "-m", "dflash_mp.cli", "run", "-c", str(run_file)]
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [*command, *(word for option in options for word in ("--set", option))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.mark = mark_of(self.process.pid)

    def steps(self) -> int:
        """Steps trained so far, of all starts in this run directory."""
        return max((line["step"] for line in written_metrics(self.run_dir)), default=0)

    def wait_for_step(self, step: int) -> None:
        eventually(lambda: self.steps() >= step or self.process.poll() is not None, f"step {step}")
        assert self.process.poll() is None, self.process.communicate()[0]

    def finish(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=2 * SECONDS)
        assert marked_processes(self.mark) == []
        return self.process.returncode, output


@contextmanager
def started(run_file: Path, run_dir: Path, *overrides: str) -> Iterator[Run]:
    run = Run(run_file, run_dir, *overrides)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.communicate()
        for pid in marked_processes(run.mark):
            send_signal(pid, signal.SIGKILL)


def weights_file(run_dir: Path, step: int = STEPS) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}" / "weights.safetensors"


def final_weights(run_dir: Path) -> bytes:
    assert steps_of(run_dir)[-1] == STEPS
    return weights_file(run_dir).read_bytes()


@pytest.fixture(scope="module")
def undisturbed(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    with started(run_file, run_dir, "train.drafters=2", "train.keep_checkpoints=10") as run:
        code, output = run.finish()
    assert code == 0, output
    return run_dir


def test_one_command_trains_to_the_end(undisturbed: Path) -> None:
    weights = load_file(undisturbed / "checkpoints" / f"step-{STEPS:08d}" / "weights.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    for name in ("config.yaml", "metrics.jsonl", "logs/feeder-0.log", "logs/drafters.log"):
        assert (undisturbed / name).stat().st_size > 0
    config = load_config(undisturbed / "config.yaml").config
    sockets = config.feeder_endpoints()[0].removeprefix("ipc://")
    assert not Path(sockets).parent.exists()
    assert "broadcast_buffers" not in (undisturbed / "logs" / "drafters.log").read_text()


def test_stopped_and_started_again_it_ends_with_the_same_weights(
    run_file: Path, tmp_path: Path, undisturbed: Path
) -> None:
    run_dir = tmp_path / "run"
    with started(run_file, run_dir, "train.drafters=2") as run:
        run.wait_for_step(15)
        run.process.send_signal(signal.SIGTERM)
        code, output = run.finish()
    assert code == 0, output
    assert f"stopped by SIGTERM after step {run.steps()}; the same command goes on from there" in output
    assert steps_of(run_dir)[-1] == run.steps()

    with started(run_file, run_dir, "train.drafters=2") as run:
        code, output = run.finish()
    assert code == 0, output
    assert final_weights(run_dir) == final_weights(undisturbed)


def test_a_second_run_in_the_same_directory_is_refused(run_file: Path, tmp_path: Path) -> None:
    with started(run_file, tmp_path / "run", "train.steps=100000") as run:
        eventually((tmp_path / "run" / "logs" / "feeder-0.log").exists, "the feeder was started")
        with started(run_file, tmp_path / "run", "feed.endpoints=['ipc:///tmp/unused.sock']") as second:
            code, output = second.finish()
        assert code == 1
        assert f"another run (process {run.process.pid})" in output
        assert run.process.poll() is None


def test_what_a_drafter_cannot_do_is_the_exit_code_and_the_last_words_of_the_run(
    run_file: Path, undisturbed: Path
) -> None:
    """Resuming with another drafter: refused by the drafter, so its message and code come through torchrun and supervisor."""
    with started(run_file, undisturbed, f"train.steps={STEPS + 5}", "drafter.layers=2") as run:
        code, output = run.finish()
    assert code == 6, output
    assert "drafters failed (exit code 6)" in output
    assert "layers" in output.split("the last lines:")[1]
    assert "once what the last lines ask for is changed, the same command goes on" in output
    assert "Traceback" not in output


def test_a_killed_rank_is_what_the_run_ends_with_and_the_others_say_who_is_gone_in_a_line(
    run_file: Path, tmp_path: Path
) -> None:
    with started(run_file, tmp_path / "run", "train.drafters=2", "train.steps=100000") as run:
        run.wait_for_step(3)
        send_signal(rank_of_run(run, 1), signal.SIGKILL)
        code, output = run.finish()
    assert code == 128 + signal.SIGKILL, output
    assert "rank 1 was the first to fail, with exit code -9" in output
    assert "rank 0: another rank is gone (" in output
    assert "the same command resumes from the last checkpoint" in output
    assert "Traceback" not in (tmp_path / "run" / "logs" / "drafters.log").read_text()


def rank_of_run(run: Run, rank: int) -> int:
    """The process of that rank."""
    for pid in marked_processes(run.mark):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"RANK=%d" % rank in environment:
            return pid
    raise AssertionError(f"no process of rank {rank}")


def test_a_drafter_that_waits_for_a_feeder_stops_at_once(run_file: Path, tmp_path: Path) -> None:
    options = [f"run_dir={tmp_path / 'run'}", "stream.connect_seconds=600"]
    command = [sys.executable, "-m", "dflash_mp.drafter", "-c", str(run_file)]
    with (tmp_path / "log").open("wb") as log:
        drafter = subprocess.Popen(
            [*command, *(word for option in options for word in ("--set", option))], stdout=log, stderr=log
        )
    try:
        eventually(lambda: "waiting for a feeder" in (tmp_path / "log").read_text(), "it says what it waits for")
        drafter.terminate()
        assert drafter.wait(SECONDS) == 128 + signal.SIGTERM
    finally:
        drafter.kill()
        drafter.wait()


def test_drafters_started_by_hand_are_refused_where_others_train(run_file: Path, tmp_path: Path) -> None:
    """Before they connect: at the feeders they would take the others' places."""
    program = (
        "from dflash_mp.drafter import __main__ as drafter, rank\n"
        "rank._LOCK_SECONDS = 0.3  # the others are not about to end\n"
        "drafter.main()"
    )
    command = [sys.executable, "-c", program, "-c", str(run_file), "--set", f"run_dir={tmp_path}"]
    with RunLock(tmp_path, drafters=True):
        refused = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert refused.returncode == 1
    assert f"another run (process {os.getpid()}) is using run_dir {tmp_path}" in refused.stderr


class ByHand:
    """A feeder and two drafter ranks, each started on its own."""

    def __init__(self, run_file: Path, directory: Path, *torchrun: str, overrides: Sequence[str] = ()) -> None:
        options = [f"run_dir={directory / 'run'}", f"train.steps={STEPS}", "train.checkpoint_every=10"]
        options += ["train.keep_checkpoints=10", *overrides]
        self._options = ["-c", str(run_file), *(word for option in options for word in ("--set", option))]
        self.run_dir, self.log = directory / "run", directory / "log"
        self.feeder, self.torchrun = self.start_feeder(), self.start_drafters(*torchrun)

    def start_feeder(self) -> subprocess.Popen[bytes]:
        return self._start("dflash_mp.cli", "feed", *self._options)

    def start_drafters(self, *how: str) -> subprocess.Popen[bytes]:
        torchrun = ("dflash_mp.torchrun", *(how or ("--standalone", "--nproc-per-node", "2")))
        return self._start(*torchrun, "-m", "dflash_mp.drafter", *self._options)

    def ranks(self) -> list[int]:
        return children_of(self.torchrun.pid)

    def wait_for(self, text: str, times: int = 1) -> None:
        what = f"{text!r} in the log"
        eventually(lambda: self.log.read_text().count(text) >= times or self.torchrun.poll() is not None, what)
        assert self.torchrun.poll() is None, self.log.read_text()

    def wait_for_silence(self, seconds: float = 6.0) -> None:
        """Wait until nothing was logged for so long; a step, which is a line, takes a tenth of a second, a quarter with a checkpoint."""

        def is_silent() -> bool:
            return time.time() - self.log.stat().st_mtime > seconds

        eventually(is_silent, "the log stands still")
        assert self.torchrun.poll() is None, self.log.read_text()

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as out:
            return subprocess.Popen([sys.executable, "-m", *command], stdout=out, stderr=out)


@contextmanager
def by_hand(run_file: Path, directory: Path, *torchrun: str, overrides: Sequence[str] = ()) -> Iterator[ByHand]:
    run = ByHand(run_file, directory, *torchrun, overrides=overrides)
    try:
        yield run
    finally:
        for process in (run.feeder, run.torchrun):
            process.kill()
            process.wait()


def test_ranks_that_wait_for_a_row_of_a_dead_feeder_save_the_last_step_though_one_alone_is_asked_to_stop(
    run_file: Path, tmp_path: Path
) -> None:
    steps = 100_000  # of which a window holds five
    with by_hand(run_file, tmp_path, overrides=["stream.window_mib=2", f"train.steps={steps}"]) as run:
        run.wait_for("step 12/")
        run.feeder.kill()
        run.feeder.wait()
        run.wait_for("lost the feeder", times=2)
        run.wait_for_silence()
        started = time.monotonic()
        send_signal(run.ranks()[0], signal.SIGTERM)
        assert run.torchrun.wait(SECONDS) == 0, run.log.read_text()
        assert time.monotonic() - started < 60  # a row is waited for 300 s
        log = run.log.read_text()
        assert "stopped by SIGTERM while waiting for" in log
        saved = steps_of(run.run_dir)[-1]
        assert f"stopped after step {saved}; the same command goes on from here" in log
        assert f"step {saved}/{steps}" in log
        assert f"step {saved + 1}/{steps}" not in log


@pytest.mark.timeout(600)  # it starts seven processes, one after the other
def test_torchrun_restarts_ranks_and_goes_on_with_fewer_when_a_machine_is_lost(
    run_file: Path, tmp_path: Path, undisturbed: Path
) -> None:
    meet = f"--rdzv-endpoint=127.0.0.1:{free_ports()[0]}"
    elastic = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3")
    torchrun = (*elastic, "--rdzv-backend=c10d", meet, "--rdzv-id=run")
    conf = "--rdzv-conf=last_call_timeout=5,is_host="  # here both could be the host; the one that is must not be lost
    with by_hand(run_file, tmp_path, *torchrun, f"{conf}true") as run:
        other = run.start_drafters(*torchrun, f"{conf}false")
        try:
            run.wait_for("2 drafter processes")
            run.wait_for("step 12/")
            for rank in children_of(other.pid):
                send_signal(rank, signal.SIGKILL)
            run.wait_for("resuming after step ")
            assert re.search(r"resuming after step [12]0\b", run.log.read_text()), "it may have come to step 20"
            run.wait_for("step 22/")
            other.kill()
            run.wait_for("1 drafter process ")
            assert run.torchrun.wait(SECONDS) == 0, run.log.read_text()
        finally:
            other.kill()
            other.wait()
    assert weights_file(run.run_dir, 20).read_bytes() == weights_file(undisturbed, 20).read_bytes()
    here, there = load_file(weights_file(run.run_dir)), load_file(weights_file(undisturbed))
    for name in there:
        torch.testing.assert_close(here[name], there[name], rtol=1e-4, atol=2e-5, msg=name)
