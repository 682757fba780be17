"""The torchrun group as a part of a run, with real workers."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from process_trees import eventually, output_of, part, supervised

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
if sys.argv[1] == "fail" and rank == "1":
    sys.exit(5)
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def drafters(tmp_path: Path, request: pytest.FixtureRequest) -> Part:
    worker = tmp_path / "worker.py"
    worker.write_text(_WORKER)
    torchrun = (sys.executable, "-m", "dflash_mp.torchrun", "--standalone", "--nproc-per-node", "2")
    return part(tmp_path, "drafters", (*torchrun, str(worker), request.param), leads=True)


@pytest.mark.parametrize("drafters", ["fail"], indirect=True)
def test_the_exit_code_is_that_of_the_first_failed_rank(drafters: Part) -> None:
    with supervised(drafters) as run:
        code, output = run.finish()
        assert run.processes() == []
    assert code == 5
    assert "rank 1 was the first to fail, with exit code 5" in output
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
