"""A feeder's connections, watched from below libzmq, and cut off where libzmq has no bound.

libzmq bounds a frame but not the number of frames of a message, and hands a message over when its last frame is there: a peer whose message
never ends fills memory that nobody sees. Nor does it bound connections that say nothing. So the sockets themselves are looked at
many times a second. A connection is cut off when it sends what never becomes a message: by TCP, more than 1 MiB since its last
whole message; elsewhere, when bytes wait on it in a fifth look since then (how fast or in what bursts makes no difference to what it gets in,
a few tenths of a second's worth). It is cut off when it brought no message for `silent_seconds`, the first in twice that; and, the
oldest that never brought one first, when there are too many. Whoever is cut off unjustly, because this process could not read for
long, connects again: nothing is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import struct
import termios
import time
from dataclasses import dataclass

from dflash_mp.stream.handshake import HELLO_PATIENCE

LOOK_SECONDS = {True: 0.02, False: 0.05}  # by TCP, or not
_LOOKS = 5  # with bytes waiting and no message since
_UNFINISHED_BYTES = 1 << 20
_MOST = 4096
_TCP_INFO_BYTES, _BYTES_RECEIVED = 136, 128  # struct tcp_info: its size up to, and the place of, tcpi_bytes_received


@dataclass
class _Connection:
    inode: int  # the descriptor's number may be another's by now
    tcp: bool
    since: float  # of the last whole message, or the start
    spoke: bool = False
    looks: int = 0  # since then, in which bytes waited
    received: int | None = None  # by TCP, up to the start, or to the first look since then


class Connections:
    """Belongs to the thread that reads the socket. Costs a system call per connection and look."""

    def __init__(self, tcp: bool, silent_seconds: float, most: int | None = None) -> None:
        self.cut = 0
        self._tcp = tcp
        self._silent_seconds = silent_seconds
        self._most = most or min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._open: dict[int, _Connection] = {}
        self._looked = time.monotonic()

    def __len__(self) -> int:
        return len(self._open)

    def accepted(self, descriptor: int) -> None:
        """libzmq has a new connection."""
        with contextlib.suppress(OSError):  # gone already
            inode = os.fstat(descriptor).st_ino
            self._open[descriptor] = _Connection(inode, self._tcp, time.monotonic(), received=0 if self._tcp else None)

    def heard(self, descriptor: int) -> None:
        """A whole message came from it."""
        connection = self._open.get(descriptor)
        if connection is not None:
            connection.since, connection.spoke = time.monotonic(), True
            connection.looks, connection.received = 0, None

    def look(self) -> int:
        """Cut off whoever must be, when it is time to look again; returns how many."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS[self._tcp]:
            return 0
        stopped, self._looked = now - self._looked > self._silent_seconds / 2, now
        if stopped:  # this process was: nobody is to blame
            for connection in self._open.values():
                connection.since, connection.looks = now, 0
        before = self.cut
        for descriptor, connection in list(self._open.items()):
            # The first message may take longer: before its HELLO a drafter asks for a ring.
            patience = self._silent_seconds * (1 if connection.spoke else HELLO_PATIENCE)
            if now - connection.since > patience or _sends_without_end(descriptor, connection):
                self._cut_off(descriptor)
        if len(self._open) > self._most:
            self._make_room()
        return self.cut - before

    def _make_room(self) -> None:
        ages = sorted(self._open.items(), key=lambda item: (item[1].spoke, item[1].since))
        for descriptor, _ in ages[: len(ages) - self._most]:
            self._cut_off(descriptor)

    def _cut_off(self, descriptor: int) -> None:
        """Shut the connection down, so that libzmq notices and frees it; nothing if it is closed."""
        connection = self._open.pop(descriptor)
        with contextlib.suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as same:
            if os.fstat(same.fileno()).st_ino == connection.inode:
                same.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )  # nothing is sent any more
                same.shutdown(socket.SHUT_RDWR)
                self.cut += 1


def _sends_without_end(descriptor: int, connection: _Connection) -> bool:
    if not connection.tcp:
        connection.looks += _waiting(descriptor)
        return connection.looks >= _LOOKS
    received = _received(descriptor)
    if connection.received is None:
        connection.received = received
    return received - connection.received > _UNFINISHED_BYTES


def _received(descriptor: int) -> int:
    """Bytes that came by this TCP connection since it stands; 0 of what is closed."""
    try:
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        try:
            information = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        finally:
            borrowed.detach()
    except OSError:
        return 0
    return int.from_bytes(information[_BYTES_RECEIVED:], "little")


def _waiting(descriptor: int) -> bool:
    """Whether bytes have come that libzmq hasn't read; False of what is closed."""
    try:
        return struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0"))[0] > 0
    except OSError:
        return False
