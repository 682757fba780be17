"""Which checkpoints a run directory has, by their names, and their size: a look that needs no torch."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_NAME = re.compile(r"step-(\d{8})")


def steps_of(run_dir: Path) -> list[int]:
    """Steps of the checkpoints below `run_dir`, ascending."""
    parent = run_dir / "checkpoints"
    if not parent.is_dir():
        return []
    return sorted(int(match[1]) for entry in parent.iterdir() if (match := _NAME.fullmatch(entry.name)))


def bytes_of(run_dir: Path) -> int:
    """What the checkpoints below `run_dir` take on the disk."""
    total = 0
    for step in steps_of(run_dir):
        with contextlib.suppress(FileNotFoundError):  # a run that goes on removes old ones
            total += sum(file.stat().st_size for file in (run_dir / "checkpoints" / f"step-{step:08d}").iterdir())
    return total
