"""launchers/slurm.sbatch on a real Slurm: split, stop, requeue, end. What trains is a stand-in that knows signals and checkpoints only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import operations_page as page
import pytest
import yaml
from process_trees import eventually
from slurm_cluster import Cluster, slurm

from dflash_mp.bench.tiny_run import tiny_tree

_STAND_IN = """\
#!/bin/bash
# Python, but for the parts of a run: those note how they were started, and end when they are told to.
case "$*" in
    *"dflash_mp.torchrun "*) part=trainer ;;
    *"dflash_mp.cli feed "*) part=feeder ;;
    *"dflash_mp.cli run "*) part=run ;;
    *) exec {python} "$@" ;;
esac
save() {{ case "$*" in *"--node-rank 1 "*) ;; *) mkdir -p "run/checkpoints/step-0000000$1" ;; esac; }}
trap '[ "$part" = feeder ] || save 2 "$@"; exit 0' TERM
[ ! -e early ] || [ "$part" = feeder ] || trap 'exit 143' TERM  # nothing to save yet
echo "$part $SLURMD_NODENAME $*" >> started
[ ! -e fail ] || [ "$part" = feeder ] || exit 5
if [ "$part" != feeder ] && [ -e run/checkpoints/step-00000002 ]; then save 4 "$@"; exit 0; fi
while true; do sleep 0.1 & wait $!; done
"""


class Job:
    """A directory to submit in."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        (directory / "launchers").symlink_to(page.ROOT / "launchers")
        (directory / "run.yaml").write_text(yaml.safe_dump({**tiny_tree(Path()), "run_dir": "run"}), encoding="utf-8")
        self._python = directory / "python"
        self._python.write_text(_STAND_IN.format(python=sys.executable))
        self._python.chmod(0o755)
        self.number = ""

    def submit(self, *options: str) -> None:
        words = ["sbatch", "--parsable", *options, "launchers/slurm.sbatch", "run.yaml"]
        self.number = self.cluster.run(*words, cwd=self.directory, PYTHON=str(self._python), FEEDERS="2").strip()

    def started(self) -> list[str]:
        file = self.directory / "started"
        return sorted(file.read_text().splitlines()) if file.exists() else []

    def wait_for_parts(self, count: int) -> list[str]:
        eventually(lambda: len(self.started()) >= count, f"{count} parts of {self.started()}, {self.said()}")
        return self.started()

    def give_way(self) -> None:
        """Have another job take the nodes."""
        words = ("sbatch", "--parsable", "--partition=high", "--nodes=3", "--exclusive", "--wrap=true")
        other = self.cluster.run(*words).strip()
        self.cluster.wait_for(other, "COMPLETED 0")
        self.wait_for("PENDING 1")

    def wait_for(self, state: str) -> None:
        self.cluster.wait_for(self.number, state, self.said)

    def go_on(self) -> None:
        """Don't wait the two minutes that Slurm leaves between a requeue and the next start; within a second of it a job is not startable."""
        self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+3")

    def said(self) -> str:
        return "".join(file.read_text() for file in self.directory.glob("*.log"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Job:
    return Job(cluster, tmp_path)


def test_preempted_it_saves_goes_back_into_the_queue_and_ends_when_it_is_trained(job: Job) -> None:
    job.submit()
    parts = job.wait_for_parts(4)
    assert [part.split()[:2] for part in parts] == [
        ["feeder", "n1"],
        ["feeder", "n1"],
        ["trainer", "n2"],
        ["trainer", "n3"],
    ]
    for number, part in enumerate(parts[2:]):
        assert (
            f"--nnodes 2 --node-rank {number} --master-addr 127.0.1.2 --master-port 29500 --nproc-per-node 1 " in part
        )
    assert all("--set feed.endpoints=[tcp://127.0.1.1:5555,tcp://127.0.1.1:5556]" in part for part in parts)
    assert all("--set stream.keys=keys" in part for part in parts)
    assert (job.directory / "keys" / "feeder.secret").stat().st_mode & 0o077 == 0

    job.give_way()
    assert (job.directory / "run" / "checkpoints" / "step-00000002").is_dir()
    assert "back into the queue" in job.said()
    job.go_on()
    job.wait_for("COMPLETED 1")
    assert (job.directory / "run" / "checkpoints" / "step-00000004").is_dir()


def test_preempted_before_there_is_anything_to_save_it_goes_back_into_the_queue(job: Job) -> None:
    (job.directory / "early").touch()
    job.submit()
    job.wait_for_parts(4)
    job.give_way()
    assert not (job.directory / "run").exists()


def test_a_heterogeneous_job_told_that_its_time_is_almost_up_does_the_same(job: Job) -> None:
    job.submit("--nodes=1", ":", "--nodes=2")
    parts = job.wait_for_parts(4)
    assert [part.split()[:2] for part in parts] == [
        ["feeder", "n1"],
        ["feeder", "n1"],
        ["trainer", "n2"],
        ["trainer", "n3"],
    ]
    job.cluster.run("scancel", "--batch", "--signal=TERM", job.number)  # as --signal=B:TERM@120 has it done
    job.wait_for("PENDING 1")
    assert (job.directory / "run" / "checkpoints" / "step-00000002").is_dir()


def test_one_node_does_both_and_a_failure_is_the_jobs(job: Job) -> None:
    (job.directory / "fail").touch()
    job.submit("--nodes=1")
    job.wait_for("FAILED 0")
    assert [part.split()[0] for part in job.started()] == ["run"]
    assert "ExitCode=5:0" in job.cluster.run("scontrol", "show", "job", job.number)
