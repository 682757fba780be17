"""A Slurm cluster of three nodes on this machine: the real daemons, for as long as a test runs.

Needs root and the packages slurmctld, slurmd, slurm-client and munge (Debian's names); without them the test is skipped, with the reason. The names
n1, n2 and n3 are addresses of the loopback, in an /etc/hosts that only the cluster sees.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from free_ports import ports_in_a_row

SECONDS = 90.0
_DAEMONS = """
set -e
mount --bind "$1/hosts" /etc/hosts
munged --force --foreground --key-file="$1/munge/key" --socket="$1/munge/socket" --pid-file="$1/munge/pid" \\
    --log-file="$1/munge/log" --seed-file="$1/munge/seed" &
while [ ! -S "$1/munge/socket" ]; do sleep 0.1; done
slurmctld -D >> "$1/slurmctld.log" 2>&1 &
for node in n1 n2 n3; do slurmd -D -N "$node" >> "$1/$node.log" 2>&1 & done
wait
"""
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmdPidFile={directory}/%n.pid
SlurmctldPidFile={directory}/slurmctld.pid
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=1,sched_interval=1
SchedulerType=sched/backfill
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cores} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2
"""


class Cluster:
    """Runs Slurm's commands as on one of its hosts."""

    def __init__(self, directory: Path, daemons: subprocess.Popen[bytes]) -> None:
        self._directory, self._daemons = directory, daemons
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}

    def run(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """Output of a command; fails the test if it fails."""
        inside = ["nsenter", "--target", str(self._daemons.pid), "--mount", "env", "-C", str(cwd or self._directory)]
        done = subprocess.run(
            [*inside, *command], env={**self.environment, **environment}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, … of a job's first part, with the number of its starts after the first."""
        facts = dict(
            word.split("=", 1) for word in self.run("scontrol", "show", "job", "-o", job).split() if "=" in word
        )
        return f"{facts['JobState']} {facts['Restarts']}"

    def wait_for(self, job: str, state: str, said: Callable[[], str] = str) -> None:
        """Until `job` is in `state`; otherwise the test fails with what the job `said`."""
        deadline = time.monotonic() + SECONDS
        while (now := self.state(job)) != state:
            assert time.monotonic() < deadline, f"job {job} is {now}, not {state}\n{said()}"
            time.sleep(0.3)


@contextlib.contextmanager
def slurm(directory: Path) -> Iterator[Cluster]:
    """Three idle nodes. A partition `low`, and one `high` whose jobs take the nodes from it after 60 s of grace."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root here")
    for program in ("slurmctld", "slurmd", "munged", "nsenter"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip(f"{program} is not installed (apt-get install slurmctld slurmd slurm-client munge)")
    _write_files(directory)
    with (directory / "daemons.log").open("w") as log:
        daemons = subprocess.Popen(
            ["unshare", "--mount", "bash", "-c", _DAEMONS, "daemons", str(directory)],
            env={**os.environ, "SLURM_CONF": str(directory / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    cluster = Cluster(directory, daemons)
    try:
        deadline = time.monotonic() + SECONDS
        while (
            cluster.run("bash", "-c", "sinfo --noheader --partition low --format '%T %D' 2> /dev/null || true")
            != "idle 3\n"
        ):
            assert time.monotonic() < deadline, (directory / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.3)
        yield cluster
    finally:
        for process in Path("/proc").glob("[0-9]*"):  # daemons, and what they started
            with contextlib.suppress(OSError):
                if f"SLURM_CONF={directory}/".encode() in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        daemons.wait()


def _write_files(directory: Path) -> None:
    for name in ("munge", "state", "spool-n1", "spool-n2", "spool-n3"):
        (directory / name).mkdir(mode=0o700)
    key = directory / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    hosts = Path("/etc/hosts").read_text(encoding="utf-8")
    names = "".join(f"127.0.1.{number} n{number}\n" for number in (1, 2, 3))
    (directory / "hosts").write_text(f"{hosts}\n{names}", encoding="utf-8")
    port = ports_in_a_row(4)
    (directory / "slurm.conf").write_text(
        _CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            port=port,
            first=port + 1,
            last=port + 3,
            directory=directory,
            cores=os.cpu_count(),
        ),
        encoding="utf-8",
    )
