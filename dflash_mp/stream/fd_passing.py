"""A Unix socket beside a feeder's address, through which a file descriptor can go: reached by processes of the same machine only.

Beside `ipc://PATH` it is the socket file `PATH.lane`, so whoever shares the directory (also between containers) can reach it and the
file's mode says who may. For tcp on the loopback it is a name in the abstract namespace, which belongs to the network namespace as the
loopback does and leaves no file; there the kernel's word on the peer's user decides. Failures are `LaneError`, with words for the log.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from pathlib import Path

from dflash_mp.addresses import only_from_here
from dflash_mp.errors import StreamError
from dflash_mp.stream.endpoints import LONGEST_IPC_PATH, ipc_path

MESSAGE_BYTES = 4096
_SUFFIX = ".lane"
_CREDENTIALS = struct.Struct("iII")


class LaneError(StreamError):
    """Why the shared-memory lane can't be used; the in-band lane is used instead."""


def lane_address(endpoint: str) -> str:
    """Where the lane's socket of the feeder at `endpoint` is. Raises `LaneError` if there can be none."""
    path = ipc_path(endpoint)
    if path is None:
        if not only_from_here(endpoint):
            raise LaneError("another host")
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        if host in ("localhost", "127.0.0.1"):
            return f"\0dflash-mp/lane/{port}"
        return f"\0dflash-mp/lane/{ipaddress.ip_address(host.strip('[]'))}/{port}"
    beside = f"{path}{_SUFFIX}"
    if len(os.fsencode(beside)) > LONGEST_IPC_PATH:
        raise LaneError(
            f"the path {beside} has more than {LONGEST_IPC_PATH} bytes", "use a shorter path in feed.endpoints"
        )
    return beside


def listen(address: str) -> socket.socket:
    """Listen at a lane's address, whose endpoint is the caller's: a socket file there is a dead feeder's and is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if _is_file(address):
            Path(address).unlink(missing_ok=True)
        listener.bind(address)
        if _is_file(address):
            Path(address).chmod(0o600)
        listener.listen(64)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise LaneError(f"cannot listen on {_shown(address)}: {error.strerror}") from None
    return listener


def stop_listening(listener: socket.socket, address: str) -> None:
    """Called while the endpoint is still bound, so the file can't be a successor's."""
    if _is_file(address):
        with contextlib.suppress(OSError):  # the directory was removed or made read-only
            Path(address).unlink(missing_ok=True)
    listener.close()


def connect(address: str, seconds: float) -> socket.socket:
    """Every wait of the connection takes at most `seconds`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(seconds)
        connection.connect(address)
        check_peer(connection)
    except LaneError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise LaneError(f"its socket {_shown(address)} can't be reached: {error.strerror or error}") from None
    return connection


def check_peer(connection: socket.socket) -> None:
    """Raise `LaneError` if the other side of an abstract socket is neither this user nor root: it has no file mode."""
    if _is_file(connection.getsockname()) or _is_file(connection.getpeername()):
        return
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user not in (0, os.getuid()):
        raise LaneError(f"its socket belongs to another user ({user})")


def receive(connection: socket.socket) -> tuple[bytes, int | None]:
    """A message and the file descriptor that came with it, which is the caller's to close."""
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        raise LaneError("its socket is silent") from None
    except OSError as error:
        raise LaneError(f"its socket broke: {error.strerror or error}") from None
    for extra in descriptors[1:]:
        os.close(extra)
    if not data:
        for descriptor in descriptors[:1]:
            os.close(descriptor)
        raise LaneError("its socket was closed")
    return data, descriptors[0] if descriptors else None


def send(connection: socket.socket, data: bytes, descriptor: int | None = None) -> None:
    try:
        socket.send_fds(connection, [data], [] if descriptor is None else [descriptor])
    except OSError as error:
        raise LaneError(f"its socket broke: {error.strerror or error}") from None


def _is_file(address: str | bytes) -> bool:
    name = os.fsencode(address)
    return bool(name) and not name.startswith(b"\0")


def _shown(address: str) -> str:
    return address.replace("\0", "@")
