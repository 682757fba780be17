"""How much memory this process may still take: asked before memory is taken that the kernel would end a process for, not refuse.

Shared memory that exceeds a container's limit is not an error of the call that takes it: the kernel kills a process of the container. So the
limits of the machine and of every control group above this process (versions 1 and 2) are read first. Files that are missing or
unreadable limit nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def shortage(nbytes: int, root: Path = _ROOT) -> str | None:
    """Why `nbytes` more bytes can't be had, in words; None if nothing speaks against it. `root`: where /proc and /sys are."""
    for who, left in _limits(root):
        if left < nbytes:
            return f"{who} has {max(0, left) / 2**20:.0f} MiB left"
    return None


def left(root: Path = _ROOT) -> list[tuple[str, int]]:
    """(who, bytes that it still allows) of each limit; empty if nothing says."""
    return list(_limits(root))


def _limits(root: Path) -> Iterator[tuple[str, int]]:
    available = _fields(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        yield "the machine", available * 1024
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            yield from _groups(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _groups(root / "sys/fs/cgroup/memory", path, *names)


def _groups(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[tuple[str, int]]:
    """The groups from `path` up to the mount's root, which in a container is the container's own."""
    group = mount / path.lstrip("/")
    while group.is_relative_to(mount):
        allowed, used = _text(group / limit).strip(), _text(group / usage).strip()
        if allowed.isdecimal() and used.isdecimal():
            cache = _fields(group / "memory.stat").get(reclaimable, 0)
            yield "the container", int(allowed) - int(used) + cache
        group = group.parent


def _fields(file: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
