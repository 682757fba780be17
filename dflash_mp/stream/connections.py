"""A feeder's connections, watched from below libzmq, and cut off where libzmq has no bound.

libzmq bounds a frame but not the number of frames of a message, and hands a message over when its last frame is there: a peer whose message
never ends fills memory that nobody sees. Nor does it bound connections that say nothing. So the sockets themselves are looked at
many times a second, those that are new by TCP, or have sent more than a message, hundreds of times: what libzmq takes in until
the cut keeps it from others. A connection is cut off when it sends what never becomes a message: by TCP, more than 128 KiB since its last
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
from collections import deque
from dataclasses import dataclass

from dflash_mp.stream.endpoints import widen
from dflash_mp.stream.handshake import HELLO_PATIENCE
from dflash_mp.stream.messages import HEADER_BYTES

LOOK_SECONDS = {True: 0.02, False: 0.05}  # by TCP, or not
_GLANCE_SECONDS = 0.002  # between two looks at the few connections that are watched closely
_WATCHED_SECONDS = 0.1
_WATCHED = 16  # at most: a glance must not cost much
_LOOKS = 5  # with bytes waiting and no message since
_UNFINISHED_BYTES = 2 * HEADER_BYTES
_MOST = 4096
_DISCARD_BYTES, _DISCARDS = 1 << 18, 64
_TCP_INFO_BYTES, _BYTES_RECEIVED = 136, 128  # struct tcp_info: its size up to, and the place of, tcpi_bytes_received


@dataclass(eq=False)
class _Connection:
    inode: int  # the descriptor's number may be another's by now
    tcp: bool
    since: float  # of the last whole message, or the start
    spoke: bool = False
    looks: int = 0  # since then, in which bytes waited
    received: int | None = None  # by TCP, up to the start, or to the first look since then
    unfinished: int = 0  # by TCP, received since then


class Connections:
    """Belongs to the thread that reads the socket. Costs a system call per connection and look."""

    def __init__(self, tcp: bool, silent_seconds: float, most: int | None = None) -> None:
        self.cut = 0
        self._tcp = tcp
        self._silent_seconds = silent_seconds
        self._most = most or min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._open: dict[int, _Connection] = {}
        self._watched: deque[tuple[int, _Connection, float]] = deque(maxlen=_WATCHED)  # and since when
        self._looked = self._glanced = time.monotonic()

    def __len__(self) -> int:
        return len(self._open)

    def accepted(self, descriptor: int) -> None:
        """libzmq has a new connection."""
        with contextlib.suppress(OSError):  # gone already
            inode = os.fstat(descriptor).st_ino
            connection = _Connection(inode, self._tcp, time.monotonic(), received=0 if self._tcp else None)
            self._open[descriptor] = connection
            self._watch(descriptor, connection)
        if not self._tcp:
            widen(descriptor)

    def heard(self, descriptor: int) -> None:
        """A whole message came from it."""
        connection = self._open.get(descriptor)
        if connection is not None:
            connection.since, connection.spoke = time.monotonic(), True
            connection.looks, connection.received = 0, None

    @property
    def look_seconds(self) -> float:
        """How long the next `look` can wait."""
        return _GLANCE_SECONDS if self._watched else LOOK_SECONDS[self._tcp]

    def look(self) -> int:
        """Cut off whoever must be, when it is time to look again; returns how many."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS[self._tcp]:
            return self._glance(now)
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
            elif connection.unfinished > HEADER_BYTES:
                self._watch(descriptor, connection)
        if len(self._open) > self._most:
            self._make_room()
        return self.cut - before

    def _watch(self, descriptor: int, connection: _Connection) -> None:
        if self._tcp:
            self._watched.append((descriptor, connection, time.monotonic()))

    def _glance(self, now: float) -> int:
        """As `look`, at those only that are watched closely."""
        if not self._watched or now - self._glanced < _GLANCE_SECONDS:
            return 0
        self._glanced, before = now, self.cut
        for descriptor, connection, since in list(self._watched):
            known = self._open.get(descriptor) is connection
            if known and _sends_without_end(descriptor, connection):
                self._cut_off(descriptor)
            elif known and now - since < _WATCHED_SECONDS:
                continue
            self._watched.remove((descriptor, connection, since))
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
                _discard(same)


def _discard(connection: socket.socket) -> None:
    """Take what has come before libzmq does, which would make messages of it."""
    with contextlib.suppress(OSError):
        for _ in range(_DISCARDS):
            if not connection.recv(_DISCARD_BYTES, socket.MSG_DONTWAIT | socket.MSG_TRUNC):
                return


def _sends_without_end(descriptor: int, connection: _Connection) -> bool:
    if not connection.tcp:
        connection.looks += _waiting(descriptor)
        return connection.looks >= _LOOKS
    received = _received(descriptor)
    if connection.received is None:
        connection.received = received
    connection.unfinished = received - connection.received
    return connection.unfinished > _UNFINISHED_BYTES


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
