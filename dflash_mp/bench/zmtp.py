"""ZMTP 3.1 by hand, as a drafter's side speaks it without keys: for peers that do what libzmq would never do."""

from __future__ import annotations

import socket

from dflash_mp.stream.endpoints import ipc_path

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
_SECONDS = 30.0


def connect(endpoint: str) -> socket.socket:
    """A bare connection to `endpoint` (ipc or tcp): nothing has been said."""
    path = ipc_path(endpoint)
    if path is None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), _SECONDS)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_SECONDS)
    connection.connect(str(path))
    return connection


def dealer(endpoint: str) -> socket.socket:
    """A connection that has shaken hands: what is sent from now on are frames."""
    connection = connect(endpoint)
    connection.sendall(GREETING + bytes([4, len(_READY)]) + _READY)
    _read(connection, len(GREETING))
    flags, size = _read(connection, 2)
    if flags != 4:
        raise ConnectionError(f"no READY, but a frame with the flags {flags}")
    _read(connection, size)
    return connection


def frame(payload: bytes, more: bool = False, says: int | None = None) -> bytes:
    """One frame; `says` is the size that its header states, if that is to be a lie."""
    size = len(payload) if says is None else says
    if size < 256:
        return bytes([more, size]) + payload
    return bytes([2 + more]) + size.to_bytes(8, "big") + payload


def _read(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        if not (got := connection.recv(nbytes - len(data))):
            raise ConnectionError("hung up during the handshake")
        data += got
    return data
