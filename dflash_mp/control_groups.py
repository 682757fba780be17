"""The kernel's control groups (versions 1 and 2) above this process, and the cores that they leave it.

A container's limits are those of its group. Files that are missing or unreadable limit nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def groups(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """(version, directory) of each group above this process that may have limits of `controller`, from its own one up to the mount's root,
    which in a container is the container's own. `root`: where /proc and /sys are.
    """
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            yield from ((2, group) for group in _upwards(root / "sys/fs/cgroup", path))
        elif controller in controllers.split(","):
            yield from ((1, group) for group in _upwards(root / "sys/fs/cgroup" / controller, path))


def usable_cores(root: Path = ROOT) -> int:
    """How many cores this process may keep busy: those of its affinity, no more than the least of its groups' quotas allows; at least 1."""
    quotas = [quota for version, group in groups("cpu", root) if (quota := _quota(version, group)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def text(file: Path) -> str:
    """What it holds, or nothing."""
    try:
        return file.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    group = mount / path.lstrip("/")
    while group.is_relative_to(mount):
        yield group
        group = group.parent


def _quota(version: int, group: Path) -> float | None:
    """Cores' worth of time; None if there is no limit."""
    if version == 2:
        words = text(group / "cpu.max").split()
    else:
        words = [text(group / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])
