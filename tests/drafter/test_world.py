"""Joining the ranks sets the process up as configured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash_mp.bench.tiny_run import tiny_tree

_JOIN = """
import os, sys
from pathlib import Path
import torch
from dflash_mp.config import load_config
from dflash_mp.drafter.world import join
join(load_config(Path(sys.argv[1]), []).config)
print(torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG", "unset"))
"""


@pytest.mark.parametrize(("wanted", "found"), [(True, "True :4096:8"), (False, "False unset")])
def test_deterministic_kernels_are_used_when_asked_for(tmp_path: Path, wanted: bool, found: str) -> None:
    tree = tiny_tree(tmp_path)
    tree["train"]["deterministic"] = wanted
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", _JOIN, str(file)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == found
