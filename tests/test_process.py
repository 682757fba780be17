"""Ties between a process and the one that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_trees import eventually

from dflash_mp.process import LEADER, MARK, children_of, mark_of, marked_processes

_TIED = "from dflash_mp.process import die_with_parent; die_with_parent(); print('lives')"


def _run_tied(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _TIED], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_a_process_of_a_living_supervisor_runs() -> None:
    assert _run_tied({MARK: mark_of(os.getpid())}).stdout == "lives\n"


@pytest.mark.parametrize("parent", [MARK, LEADER])
def test_a_process_whose_supervisor_or_torchrun_is_gone_ends_itself(parent: str) -> None:
    gone = subprocess.Popen(["true"])
    mark = mark_of(gone.pid)
    gone.wait()
    done = _run_tied({parent: mark})
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_dead_supervisor_counts_as_gone_before_it_is_reaped() -> None:
    zombie = subprocess.Popen(["sleep", "600"])
    mark = mark_of(zombie.pid)
    zombie.kill()
    eventually(lambda: Path(f"/proc/{zombie.pid}/stat").read_text().split()[2] == "Z", "the process is a zombie")
    assert _run_tied({MARK: mark}).returncode == -signal.SIGKILL
    zombie.wait()


def test_a_process_that_nobody_supervises_is_left_alone(tmp_path: Path) -> None:
    """Started by hand, it goes on when its shell ends."""
    out = tmp_path / "out"
    program = f"{_TIED}; import time; time.sleep(0.5); open({str(out)!r}, 'w').write('went on')"
    environment = {k: v for k, v in os.environ.items() if k not in (MARK, "TORCHELASTIC_RUN_ID")}
    subprocess.run(["sh", "-c", '"$0" -c "$1" & sleep 0.2', sys.executable, program], env=environment, check=True)
    eventually(out.exists, "the orphan goes on")


def test_marked_processes_are_found_whatever_their_session() -> None:
    mark = f"{os.getpid()}.test"
    child = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: mark}, start_new_session=True)
    try:
        # Its environment is set a moment after the rest of what an exec exchanges.
        eventually(lambda: marked_processes(mark) == [child.pid], "the process and no other is found")
        assert child.pid in children_of(os.getpid())
    finally:
        child.kill()
        child.wait()
    assert marked_processes(mark) == []
