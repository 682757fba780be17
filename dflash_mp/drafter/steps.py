"""Which checkpoints a run directory has, by their names: a look that needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"step-(\d{8})")


def steps_of(run_dir: Path) -> list[int]:
    """Steps of the checkpoints below `run_dir`, ascending."""
    parent = run_dir / "checkpoints"
    if not parent.is_dir():
        return []
    return sorted(int(match[1]) for entry in parent.iterdir() if (match := _NAME.fullmatch(entry.name)))
