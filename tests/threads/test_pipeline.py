"""Threads that fail, threads that hang, and the comparison of modes, with real drafters and real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import process_trees
import pytest
from process_trees import eventually
from rich.console import Console
from tiny_run import make_tiny_run
from torch._dynamo.convert_frame import compile_lock

from dflash_mp.config_file import load_config
from dflash_mp.errors import DflashError
from dflash_mp.process import mark_of, marked_processes
from dflash_mp.threads import compare as of_modes
from dflash_mp.threads import fx_shim
from dflash_mp.threads.command import MODES, run_compare
from dflash_mp.threads.compare import PROCESSES, READY, Limits, ModeResult, Worker
from dflash_mp.threads.guards import GUARDS, Guard
from dflash_mp.threads.log import DrafterLog, LogWriter, Step, log_file, read_log
from dflash_mp.threads.pipeline import run_threads
from dflash_mp.threads.work import SCALES, Work, synthetic_work


@pytest.fixture
def work(tmp_path: Path) -> Work:
    """Two small drafters, four steps each, run as they are."""
    work = synthetic_work(SCALES["quick"], tmp_path / "run", drafters=2, devices=("cpu",), steps=4, vary=0.5)
    return dataclasses.replace(work, backend="eager")


class Interfering:
    """A turn that calls `at` when it is entered for the `n`-th time."""

    def __init__(self, at: dict[int, object]) -> None:
        self._at, self._count = at, 0

    def enter(self, tokens: int) -> None:
        self._count += 1
        action = self._at.get(self._count)
        if callable(action):
            action()

    def leave(self, completed: bool) -> None:
        return


def guard(turn: Interfering) -> Guard:
    return Guard("planted", "", lambda: lambda: turn)


def let_end(release: threading.Event) -> None:
    """Release threads that were made to hang, and wait until they have ended."""
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("drafter "):
            thread.join(60)
            assert not thread.is_alive()


def losses(directory: Path, number: int) -> list[float]:
    return [step.loss for step in read_log(log_file(directory, number)).steps]


def test_a_step_that_fails_is_logged_and_tried_again_on_the_same_rows(work: Work, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("planted failure")

    run_threads(work, GUARDS["none"], [0], tmp_path / "sound")
    # The first entry is the pass without rows; then one for each step.
    outcome = run_threads(work, guard(Interfering({1: fail, 3: fail, 4: fail})), [0], tmp_path / "failing")
    log = read_log(log_file(tmp_path / "failing", 0))
    assert log.errors == {"RuntimeError: planted failure": 3}
    assert "in fail" in log.tracebacks["RuntimeError: planted failure"]
    assert outcome.hung == []
    assert len(log.steps) == 4
    assert losses(tmp_path / "failing", 0) == losses(tmp_path / "sound", 0)


def test_a_thread_that_hangs_is_found_and_its_stack_is_told(work: Work, tmp_path: Path) -> None:
    release = threading.Event()

    def hang_here() -> None:
        release.wait(250)

    before = time.monotonic()
    outcome = run_threads(work, guard(Interfering({3: hang_here})), [1], tmp_path, quiet_seconds=2.0)
    seconds, steps = time.monotonic() - before, read_log(log_file(tmp_path, 1)).steps
    let_end(release)
    assert outcome.hung == ["drafter 1"]
    assert "in hang_here" in outcome.stacks["drafter 1"]
    assert seconds < 50  # it did not wait for the thread
    assert len(steps) == 1


def test_a_thread_that_hangs_with_the_compile_lock_is_told_too(work: Work, tmp_path: Path) -> None:
    release = threading.Event()

    def hang_in_a_compilation() -> None:
        with compile_lock:
            release.wait(250)

    turn = Interfering({2: hang_in_a_compilation})
    before = time.monotonic()
    outcome = run_threads(
        work, dataclasses.replace(GUARDS["shim"], turns=lambda: lambda: turn), [0], tmp_path, quiet_seconds=2.0
    )
    assert time.monotonic() - before < 50  # it did not wait for the lock
    assert outcome.hung == ["drafter 0"]
    let_end(release)
    assert fx_shim.uninstall()


def test_a_thread_that_computes_is_not_taken_for_hung(work: Work, tmp_path: Path) -> None:
    def compute() -> None:
        until = time.monotonic() + 6.0
        while time.monotonic() < until:
            sum(range(10_000))

    outcome = run_threads(work, guard(Interfering({2: compute})), [0], tmp_path, quiet_seconds=1.0)
    assert outcome.hung == []
    assert len(read_log(log_file(tmp_path, 0)).steps) == 4


def test_a_log_cut_short_by_a_kill_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    file = log_file(tmp_path, 0)
    with LogWriter(file) as log:
        log.step(1, 0.1, 0.1 + 0.2, 0)
        log.error(ValueError("first"))
        log.error(ValueError("first"))
    text = file.read_text()
    file.write_text(text + '{"step": 2, "at"')
    found = read_log(file)
    assert [step.loss for step in found.steps] == [0.1 + 0.2]
    assert found.errors == {"ValueError: first": 2}


def result(mode: str, *losses_of_steps: float) -> ModeResult:
    log = DrafterLog([Step(i + 1, 0.0, 0.0, loss, 0) for i, loss in enumerate(losses_of_steps)])
    return ModeResult(mode, 0.0, 1.0, {0: log}, [], {}, "")


def test_a_comparison_that_is_stopped_leaves_the_modes_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_mode(fleet: of_modes._Fleet, following: object) -> ModeResult:
        if fleet.mode == "shim":
            raise KeyboardInterrupt
        return result(fleet.mode, 3.0, 2.0)

    monkeypatch.setattr(of_modes, "_run_mode", run_mode)
    for name in ("compare.json", "compare.md", "compare.png"):
        (tmp_path / name).write_text("of an earlier comparison")
    options = {"scale": "quick", "drafters": 1, "gpus": None, "seconds": None, "steps": 4, "vary": 0.0}
    modes = ["none", "full-lock", "shim", PROCESSES]
    with pytest.raises(KeyboardInterrupt):
        run_compare(modes=modes, out=tmp_path, with_plot=False, console=Console(quiet=True), **options)
    assert [mode["mode"] for mode in json.loads((tmp_path / "compare.json").read_text())["modes"]] == modes[:2]
    assert "| full-lock | 2 |" in (tmp_path / "compare.md").read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["compare.json", "compare.md", "work.json"]


def test_a_process_that_ignores_everything_is_dumped_and_killed_with_its_children(tmp_path: Path) -> None:
    program = (
        "import faulthandler, os, signal, subprocess, sys, time\n"
        f"faulthandler.register(signal.SIGUSR1, open({str(tmp_path / 'stacks.txt')!r}, 'w'))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "def stuck_for_good():\n    print('ready', flush=True)\n    time.sleep(300)\n"
        "stuck_for_good()\n"
    )
    worker = Worker([sys.executable, "-c", program], tmp_path, dict(os.environ))
    # The worker removes stale files first; what the program wrote is its own.
    worker.await_line(READY, time.monotonic() + 60)
    child = int((tmp_path / "child").read_text())
    worker.await_end(time.monotonic() + 0.2)
    assert worker.killed
    assert "stuck_for_good" in (tmp_path / "stacks.txt").read_text()
    eventually(
        lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text(), "no child"
    )


def test_a_process_that_cannot_begin_says_so_whenever_it_is_asked(tmp_path: Path) -> None:
    worker = Worker([sys.executable, "-c", "raise SystemExit('planted end')"], tmp_path, dict(os.environ))
    worker.await_import(time.monotonic() + 60)
    for _ in range(2):
        with pytest.raises(DflashError, match="planted end"):
            worker.await_line(READY, time.monotonic() + 60)
    silent = Worker([sys.executable, "-c", "input()"], tmp_path, dict(os.environ))
    silent.await_import(time.monotonic() + 0.2)
    with pytest.raises(DflashError, match="did not get ready in time"):
        silent.await_line(READY, time.monotonic() + 60)


def test_the_next_modes_processes_are_there_before_a_mode_begins(tmp_path: Path) -> None:
    work = synthetic_work(SCALES["quick"], tmp_path / "run", drafters=1, devices=("cpu",), steps=2, vary=0.0)
    work = dataclasses.replace(work, backend="eager")
    ended: list[list[int]] = []

    def look(results: Sequence[ModeResult]) -> None:
        ended.append(marked_processes(mark_of(os.getpid())))

    none, processes = of_modes.compare(work, ["none", PROCESSES], tmp_path, after=look)
    assert (none.failure, processes.failure) == ("", "")
    assert [len(log.steps) for found in (none, processes) for log in found.logs.values()] == [2, 2]
    assert [len(left) for left in ended] == [1, 0]
    (outcome,) = processes.outcomes
    assert outcome is not None
    assert processes.start_seconds < sum(outcome["start"].values())  # without its imports, which were before its turn


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compare")
    run_compare(
        scale="quick",
        modes=["full-lock", "shim", PROCESSES],
        drafters=2,
        gpus=None,
        seconds=None,
        steps=4,
        vary=0.3,
        out=out,
        with_plot=True,
        console=Console(quiet=True),
    )
    return out


def test_guards_that_survive_give_the_losses_of_processes_bit_for_bit(compared: Path) -> None:
    modes = {mode["mode"]: mode for mode in json.loads((compared / "compare.json").read_text())["modes"]}
    for name in ("full-lock", "shim", PROCESSES):
        assert modes[name]["errors"] == {}
        assert modes[name]["hung"] == {}
        assert modes[name]["steps"] == 2 * 4
        assert modes[name]["eager_calls"] == 0
    assert modes["full-lock"]["losses"] == modes["shim"]["losses"] == "same bits in 8 steps"
    drafters = modes[PROCESSES]["drafters"]
    assert [step["loss"] for step in drafters["0"]] != [step["loss"] for step in drafters["1"]]
    assert modes[PROCESSES]["graphs"] > 2  # new lengths were compiled


def test_a_comparison_leaves_table_json_and_picture(compared: Path) -> None:
    assert (compared / "compare.png").read_bytes().startswith(b"\x89PNG")
    table = (compared / "compare.md").read_text()
    assert "| shim | 8 |" in table
    assert "PyTorch" in table
    assert "on CPU (cpu, cpu)" in table


def test_a_comparison_tells_how_long_its_processes_took_to_start(compared: Path) -> None:
    for mode in json.loads((compared / "compare.json").read_text())["modes"]:
        for process in mode["processes"]:
            assert list(process["start"]) == ["imports", "guard", "drafters", "first passes"]
            assert all(seconds > 0.0 for seconds in process["start"].values())


def test_a_killed_comparison_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_trees, "SECONDS", 120.0)  # two processes import torch, one after the other
    command = [sys.executable, "-m", "dflash_mp.cli", "compare", "--mode", "none", "--out", str(tmp_path), "--no-plot"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    mark = mark_of(process.pid)
    # A worker opens this file after it has tied its life to the command's.
    eventually(lambda: (tmp_path / "none" / "process-0" / "stacks.txt").exists(), "a worker runs")
    assert marked_processes(mark)
    process.send_signal(signal.SIGKILL)
    process.wait()
    eventually(lambda: not marked_processes(mark), "no worker is left")


def dflash_mp(*arguments: str) -> str:
    """Run a command to its end."""
    command = [sys.executable, "-m", "dflash_mp.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_threads_on_a_targets_rows_have_the_losses_of_a_run_of_processes(tmp_path: Path) -> None:
    file = make_tiny_run(tmp_path)
    options = ["-c", str(file), "--rows", "colocated", "--drafters", "2", "--guard", "full-lock", "--backend", "eager"]
    printed = dflash_mp("threads", *options)
    assert "drafter 1: 4 steps" in printed
    run_dir = load_config(file).config.run_dir
    of_threads = losses(run_dir / "threads", 0)
    dflash_mp("run", "-c", str(file))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert of_threads == [line["loss"] for line in lines if line["kind"] == "train"]
    assert of_threads != losses(run_dir / "threads", 1)


def test_every_guard_and_the_processes_are_modes() -> None:
    assert (*GUARDS, PROCESSES) == MODES
    assert {"none", "first-call-lock", "full-lock", "shim", "module-replacement"} <= set(GUARDS)
    assert Limits().quiet < Limits().over
