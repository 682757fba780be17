"""Whether addresses are free, and who has those that aren't, as far as /proc tells."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from dflash_mp.doctor.finding import Finding, green, yellow

_RENDEZVOUS = 29500
_LISTENS = "0A"


def check_rendezvous() -> Finding:
    """The port that torchrun's rendezvous takes by default; other hosts need it, `dflash-mp run` does not."""
    about = f"port {_RENDEZVOUS}"
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", _RENDEZVOUS))
        except OSError as error:
            return yellow(
                about,
                f"taken by {who_listens(_RENDEZVOUS) or 'an unknown process'} ({error.strerror})",
                "give torchrun another one: --rdzv-endpoint HOST:PORT (`dflash-mp run` doesn't use it)",
            )
    return green(about, "free for a rendezvous of several machines")


def who_listens(port: int) -> str | None:
    """ "python (process 123)" that listens on tcp `port` of this machine; None if nobody does or it can't be seen."""
    return who_has({inode for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net") / table, port)})


def who_listens_at(socket_file: Path) -> str | None:
    """The process that listens on the Unix socket `socket_file`."""
    try:
        lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    except OSError:
        return None
    rows = (line.split(None, 7) for line in lines)
    return who_has({row[6] for row in rows if len(row) == 8 and row[7] == str(socket_file)})


def who_has(inodes: set[str]) -> str | None:
    """The first process found with one of these sockets open."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
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


def _listening(table: Path, port: int) -> set[str]:
    try:
        rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()[1:]]
    except OSError:
        return set()
    return {row[9] for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port}
