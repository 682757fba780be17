"""What a run shows may end at any time: its reader ends, its terminal hangs up. The run then ends as if it were watched."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_trees import SECONDS, eventually

# A feeder and drafters that say something all the time, and take a moment to save. They ignore a terminal's end, as ranks do.
_PART = "trap 'sleep 0.5; echo saved; exit 0' TERM; trap '' HUP; while :; do echo line; sleep 0.05; done"
_RUN = f"""
import sys
from pathlib import Path
from dflash_mp import logs
from dflash_mp.run_view import open_view
from dflash_mp.supervisor import Part, supervise
home = Path(sys.argv[1])
logs.start(logs.Speaker("run"), logs.DEFAULT)
parts = [Part("feeder 0", ("sh", "-c", {_PART!r}), home / "feeder.log", serves=True), Part("drafters", ("sh", "-c", {_PART!r}), home / "drafters.log")]
with open_view(home, 1, logs.DEFAULT) as view:
    number = supervise(parts, view)
(home / "end").write_text(number.name)
"""


@pytest.fixture(autouse=True)
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams as a user has them: what is left in a buffer fails again when the process ends."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


def started(home: Path, **streams: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TERM": "xterm"}
    return subprocess.Popen([sys.executable, "-c", _RUN, str(home)], env=environment, start_new_session=True, **streams)


def up(home: Path) -> bool:
    """Whether both parts have set their traps."""
    logs = [home / "drafters.log", home / "feeder.log"]
    return all(one.exists() and "line\n" in one.read_text() for one in logs)


def saved(home: Path, process: subprocess.Popen[bytes]) -> str:
    """The signal that ended the run in order."""
    assert process.wait(SECONDS) == 0
    for name in ("drafters", "feeder"):
        assert (home / f"{name}.log").read_text().splitlines()[-1] == "saved", name
    return (home / "end").read_text()


@pytest.mark.parametrize("asked", [True, False])
def test_a_reader_that_ends_does_not_end_the_run(tmp_path: Path, asked: bool) -> None:
    reading, writing = os.pipe()
    with (tmp_path / "errors").open("wb") as errors:
        process = started(tmp_path, stdout=writing, stderr=errors.fileno())
    os.close(writing)
    try:
        eventually(lambda: up(tmp_path), "both are up")
        os.close(reading)
        if asked:  # Ctrl-C ends `tee`, too
            process.send_signal(signal.SIGINT)
        else:
            said = "the run goes on, but shows nothing more: [Errno 32] Broken pipe"
            eventually(lambda: said in (tmp_path / "errors").read_text(), "the view is off")
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
        assert saved(tmp_path, process) == "SIGINT"
    finally:
        process.kill()
        process.wait()


def test_a_live_view_whose_reader_ends_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the pipe for a terminal
    test_a_reader_that_ends_does_not_end_the_run(tmp_path, asked=True)


def test_a_terminal_that_hangs_up_stops_the_run_in_order(tmp_path: Path) -> None:
    child, master = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-c", _RUN, str(tmp_path)])
    try:
        seen = b""
        while b"drafters" not in seen or not up(tmp_path):
            seen += os.read(master, 4096)
        os.close(master)  # SIGHUP, and EIO for whatever is written from now on
        deadline = time.monotonic() + SECONDS
        ended, status = 0, 0
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.02)
        assert ended == child
        child = 0
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert (tmp_path / "end").read_text() == "SIGHUP"
    assert (tmp_path / "drafters.log").read_text().splitlines()[-1] == "saved"
