"""`dflash_mp.health`: every part below a process is asked, not only the first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from free_ports import free_ports
from process_trees import eventually

from dflash_mp.health import Unhealthy, look
from dflash_mp.process import children_of

# What a host's feeders look like from outside: `NAME/dflash-mp feed --index I -c FILE`, each listening on its address or not.
_FEEDER = """
import os, socket, sys, time
port = int(sys.argv[1])
server = socket.create_server(("127.0.0.1", port)) if port else None
os.write(1, b"up\\n")  # in one piece: the other writes to the same file
time.sleep(600)
"""


@contextmanager
def feeders(tmp_path: Path, listening: tuple[bool, bool]) -> Iterator[int]:
    """A shell that has started two feeders."""
    ports = free_ports(2)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run_dir: r\ntarget: {{path: t}}\ndata: {{path: d}}\ntrain: {{steps: 1}}\nmetrics: {{feeder_port: null}}\n"
        f"feed: {{endpoints: ['tcp://127.0.0.1:{ports[0]}', 'tcp://127.0.0.1:{ports[1]}']}}\n"
    )
    program = tmp_path / "feeder.py"
    program.write_text(_FEEDER)
    lines = [
        f"{sys.executable} {program} {port if listens else 0} dflash-mp feed --index {i} -c {config} &"
        for i, (port, listens) in enumerate(zip(ports, listening, strict=True))
    ]
    log = tmp_path / "log"
    with log.open("wb") as out:
        shell = subprocess.Popen(["sh", "-c", "\n".join([*lines, "wait"])], stdout=out)
    try:
        eventually(lambda: log.read_text().count("up\n") == 2, "both feeders are up")
        yield shell.pid
    finally:
        for pid in [*children_of(shell.pid), shell.pid]:
            os.kill(pid, 9)
        shell.wait()


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # `look` changes it; it is set back at the end


def test_every_feeder_of_a_host_is_asked(tmp_path: Path) -> None:
    with feeders(tmp_path, (True, True)) as pid:
        said = look(pid)
    assert said.count(" serves on tcp://127.0.0.1:") == 2
    assert ("feeder 0 serves" in said, "feeder 1 serves" in said) == (True, True)


@pytest.mark.parametrize("listening", [(True, False), (False, True)])
def test_one_that_is_not_well_is_enough(tmp_path: Path, listening: tuple[bool, bool]) -> None:
    with feeders(tmp_path, listening) as pid, pytest.raises(Unhealthy, match="no feeder listens on"):
        look(pid)
