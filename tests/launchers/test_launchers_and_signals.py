"""What launchers do when signals come at bad moments. Slurm's commands and Python are stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from process_trees import SECONDS, eventually

LAUNCHERS = Path(__file__).parent.parent.parent / "launchers"


def program(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


def test_slurms_script_waits_for_its_step_however_often_it_is_asked(tmp_path: Path) -> None:
    program(tmp_path / "srun", "touch up; while [ ! -e saved ]; do sleep 0.05; done; touch ended")
    program(tmp_path / "scancel", "echo asked >> asked")
    program(
        tmp_path / "scontrol",
        'case "$1 $2" in "show hostnames") echo n1 ;; requeue*) [ -e ended ] && touch requeued ;; esac',
    )
    program(tmp_path / "python", "exit 75")
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "python"),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n1",
    }
    asked = tmp_path / "asked"
    job = subprocess.Popen(["bash", str(LAUNCHERS / "slurm.sbatch"), "run.yaml"], cwd=tmp_path, env=environment)
    try:
        eventually((tmp_path / "up").exists, "the step is up")
        for number in (1, 2, 3):
            job.send_signal(signal.SIGTERM)
            eventually(lambda n=number: asked.exists() and asked.read_text().count("asked") >= n, "it was asked")
        (tmp_path / "saved").touch()
        assert job.wait(SECONDS) == 0
    finally:
        job.kill()
        job.wait()
        (tmp_path / "saved").touch()
    assert (tmp_path / "requeued").exists(), "back in the queue before its step had ended"


def test_trainers_that_are_stopped_before_they_start_do_not(tmp_path: Path) -> None:
    program(
        tmp_path / "python",
        'if [ "$1" = - ]; then touch up; while [ ! -e go-on ]; do sleep 0.05; done; echo 1 lo; else touch trains; fi',
    )
    command = ["bash", str(LAUNCHERS / "trainers.sh"), "--head", "h", "--nodes", "1", "--node", "0", "-c", "run.yaml"]
    environment = {**os.environ, "PYTHON": str(tmp_path / "python")}
    script = subprocess.Popen(command, cwd=tmp_path, env=environment)
    try:
        eventually((tmp_path / "up").exists, "it looks for facts")
        script.send_signal(signal.SIGTERM)
        (tmp_path / "go-on").touch()
        assert script.wait(SECONDS) == 143
    finally:
        script.kill()
        script.wait()
        (tmp_path / "go-on").touch()
    assert not (tmp_path / "trains").exists()
