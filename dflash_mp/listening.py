"""Who listens on an address of this network namespace, as /proc tells: nothing connects. What can't be read counts as nobody."""

from __future__ import annotations

import os
from pathlib import Path

_LISTENS = "0A"  # state of a TCP socket in /proc/net/tcp
_ACCEPTS = 0x10000  # flag of a listening Unix socket in /proc/net/unix


def sockets_at(endpoint: str) -> set[str]:
    """Inodes of the sockets that listen at `ipc://PATH`, or on the port of `tcp://HOST:PORT` at any address."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        files = [line.split(None, 7) for line in _table("unix")]
        return {f[6] for f in files if len(f) == 8 and f[7] == address and int(f[3], 16) & _ACCEPTS}
    port = int(address.rpartition(":")[2])
    rows = [line.split() for table in ("tcp", "tcp6") for line in _table(table)]
    return {row[9] for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port}


def who_listens(endpoint: str) -> str | None:
    """ "python (process 123)" that listens there; None if nobody does or it can't be seen."""
    wanted = {f"socket:[{inode}]" for inode in sockets_at(endpoint)}
    for pid in os.listdir("/proc") if wanted else ():
        if not pid.isdigit():
            continue
        try:
            held = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
            if held & wanted:
                return f"{Path(f'/proc/{pid}/comm').read_text(encoding='utf-8').strip()} (process {pid})"
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return None


def _table(name: str) -> list[str]:
    try:
        return Path("/proc/net", name).read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    except OSError:
        return []
