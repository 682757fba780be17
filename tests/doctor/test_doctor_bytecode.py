"""`doctor` finds that processes would compile PyTorch's Python source again and again."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from dflash_mp.doctor.finding import Finding
from dflash_mp.doctor.versions import check_versions


def found() -> list[Finding]:
    return [finding for finding in check_versions(False, 1) if finding.about == "bytecode"]


def test_bytecode_that_is_missing_and_must_not_be_written_is_yellow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert found() == [], "the next process writes it"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (finding,) = found()
    assert finding.level == "yellow"
    assert "PYTHONDONTWRITEBYTECODE is set" in finding.found
    assert "PYTHONPYCACHEPREFIX" in finding.remedy
    source = Path(torch.__file__).parent / "_inductor" / "compile_fx.py"
    compiled = Path(importlib.util.cache_from_source(str(source)))
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert found() == []


def test_bytecode_that_is_missing_where_nothing_can_be_written_is_yellow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    (finding,) = found()
    assert "can't be written" in finding.found
