from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_TESTS = Path(__file__).parent
sys.path[:0] = [str(_TESTS), *(str(directory) for directory in _TESTS.iterdir() if directory.is_dir())]

# How long an example takes is the machine's affair: other tests run beside this one.
settings.register_profile("busy", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# A test run that a script started in the background inherits ignored signals, and hands them on to the processes it tests.
for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)
