"""How much memory this process may still take: asked before memory is taken that the kernel would end a process for, not refuse.

Shared memory that exceeds a container's limit is not an error of the call that takes it: the kernel kills a process of the container. So the
limits of the machine and of every control group above this process (versions 1 and 2) are read first. Files that are missing or
unreadable limit nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_mp.control_groups import ROOT, groups, text


def shortage(nbytes: int, root: Path = ROOT) -> str | None:
    """Why `nbytes` more bytes can't be had, in words; None if nothing speaks against it. `root`: where /proc and /sys are."""
    for who, left in _limits(root):
        if left < nbytes:
            return f"{who} has {max(0, left) / 2**20:.0f} MiB left"
    return None


def left(root: Path = ROOT) -> list[tuple[str, int]]:
    """(who, bytes that it still allows) of each limit; empty if nothing says."""
    return list(_limits(root))


def _limits(root: Path) -> Iterator[tuple[str, int]]:
    available = _fields(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        yield "the machine", available * 1024
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    for version, group in groups("memory", root):
        limit, usage, reclaimable = names[version]
        allowed, used = text(group / limit).strip(), text(group / usage).strip()
        if allowed.isdecimal() and used.isdecimal():
            cache = _fields(group / "memory.stat").get(reclaimable, 0)
            yield "the container", int(allowed) - int(used) + cache


def _fields(file: Path) -> dict[str, int]:
    rows = (line.split() for line in text(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}
