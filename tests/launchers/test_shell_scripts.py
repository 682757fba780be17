"""Every shell script of the repository passes shellcheck."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
_PLACES = ("launchers/*.sh", "launchers/*.sbatch", ".ci/run", "docker/*.sh")
SCRIPTS = sorted(file for place in _PLACES for file in ROOT.glob(place))


def test_shellcheck_finds_nothing() -> None:
    beside = Path(sys.executable).parent / "shellcheck"
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (extra test)")
    assert len(SCRIPTS) >= 7
    done = subprocess.run(
        [shellcheck, "--external-sources", *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
