"""A feeder's connections, watched from below libzmq, and cut off where libzmq has no bound.

libzmq bounds a frame but not the number of frames of a message, and hands a message over when its last frame is there: a peer whose message
never ends fills memory that nobody sees. Nor does it bound connections that say nothing. So the sockets themselves are looked at, many
times a second, hundreds of times while there is a new one by TCP or one that has sent more than a message: what libzmq takes in until
the cut keeps it from others. Only those are looked at to which something came since the last look, and a few others in turn, at most
so many at once: thousands of idle ones cost next to nothing.

A connection is cut off when it sends what never becomes a message: by TCP, more than 128 KiB since the first look after its last
whole message, or since its start; elsewhere, when bytes wait on it in a fifth look since then (how fast or in what bursts makes no
difference to what it gets in, a few tenths of a second's worth). By TCP, those that sent most go, too, when what all have sent since
before their last message is more than 4 MiB: libzmq spends up to 32 times as much memory on it, if the frames are empty. A connection is
cut off when it brought no message for `silent_seconds`, the first in twice that; and, the oldest that never brought one first, when
there are too many. Whoever is cut off unjustly, because this process could not read for long, connects again: nothing is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import resource
import select
import socket
import struct
import termios
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_mp.stream.endpoints import ipc_path, widen
from dflash_mp.stream.handshake import HELLO_PATIENCE
from dflash_mp.stream.messages import HEADER_BYTES

LOOK_SECONDS = {True: 0.02, False: 0.05}  # by TCP, or not
_CLOSE_LOOK_SECONDS = 0.002
_CLOSE_SECONDS = 0.1  # of close looks after the last reason for them
_AT_ONCE, _AT_ONCE_CLOSELY = 64, 16  # connections that one look looks at, or cuts off: about 1 ms, 0.2 ms
_IN_TURN = 8  # connections that a look looks at whether something came or not
_LOOKS = 5  # with bytes waiting and no message since
_UNFINISHED_BYTES = 2 * HEADER_BYTES
_HELD_BYTES = 4 << 20  # by TCP, of all connections
_MOST = 4096
_DISCARD_BYTES, _DISCARDS = 1 << 18, 64
# Edge-triggered: told once. What libzmq has read by then is told of only because the socket can be written to.
_CAME = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
_TCP_INFO_BYTES, _BYTES_RECEIVED = 136, 128  # struct tcp_info: its size up to, and the place of, tcpi_bytes_received


@dataclass(eq=False)
class _Connection:
    inode: int  # the descriptor's number may be another's by now
    since: float  # of the last whole message, or the start
    looks: int = 0  # since then, in which bytes waited
    # By TCP, all that was received:
    seen: int = 0  # at the last look
    before: int = 0  # at the last look before the last whole message
    after: int | None = 0  # at the first look after it; None if there was none yet

    @property
    def unfinished(self) -> int:
        """Bytes since the last whole message, at least."""
        return 0 if self.after is None else self.seen - self.after

    @property
    def held(self) -> int:
        """Bytes since the last whole message, at most."""
        return self.seen - self.before


def most_connections() -> int:
    """How many a feeder in this process keeps at a time."""
    return min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class Connections:
    """Belongs to the thread that reads the socket. Costs a system call for each connection to which something came, and look."""

    def __init__(self, tcp: bool, silent_seconds: float, most: int | None = None) -> None:
        self.cut = 0
        self._tcp = tcp
        self._silent_seconds = silent_seconds
        self._most = most or most_connections()
        self._endpoint: str | None = None
        self._new: OrderedDict[int, _Connection] = OrderedDict()  # the longest silent first
        self._spoke: OrderedDict[int, _Connection] = OrderedDict()  # the same
        self._active = select.epoll()
        self._round: list[int] = []  # all, in turn
        self._due: dict[int, None] = {}  # to be looked at, the longest due first
        self._held = 0
        self._looked = time.monotonic()
        self._close_until = 0.0

    def __len__(self) -> int:
        return len(self._new) + len(self._spoke)

    def listens(self, endpoint: str) -> None:
        """The feeder's address: from now on a descriptor of another socket of this process is left alone."""
        self._endpoint = endpoint

    def close(self) -> None:
        """Look no more; connections stay as they are."""
        self._active.close()

    def accepted(self, descriptor: int) -> None:
        """libzmq has had a new connection of this number, which may mean another file by now, or none."""
        if self._endpoint is not None and not _accepted_at(descriptor, self._endpoint):
            return
        self._forget(descriptor)  # it was another's
        with contextlib.suppress(OSError):  # gone already
            self._new[descriptor] = _Connection(os.fstat(descriptor).st_ino, time.monotonic())
            self._due[descriptor] = None
            self._active.register(descriptor, _CAME)
        if self._tcp:
            self._close_until = time.monotonic() + _CLOSE_SECONDS
        else:
            widen(descriptor)

    def heard(self, descriptor: int) -> None:
        """A whole message came from it."""
        connection = self._spoke.get(descriptor)
        if connection is None:
            connection = self._new.pop(descriptor, None)
            if connection is None:
                return
            self._spoke[descriptor] = connection
        self._spoke.move_to_end(descriptor)
        self._held -= connection.held
        connection.since, connection.looks = time.monotonic(), 0
        connection.before, connection.after = connection.seen, None
        self._due[descriptor] = None

    @property
    def look_seconds(self) -> float:
        """How long the next `look` can wait."""
        return _CLOSE_LOOK_SECONDS if self._looked < self._close_until else LOOK_SECONDS[self._tcp]

    def look(self) -> int:
        """Cut off whoever must be, when it is time to look again; returns how many."""
        now, closely = time.monotonic(), self._looked < self._close_until
        if now - self._looked < self.look_seconds:
            return 0
        stopped, self._looked = now - self._looked > self._silent_seconds / 2, now
        if stopped:  # this process was: nobody is to blame
            for connection in itertools.chain(self._new.values(), self._spoke.values()):
                connection.since, connection.looks = now, 0
        before, at_once = self.cut, _AT_ONCE_CLOSELY if closely else _AT_ONCE
        for descriptor in self._next_due(at_once):
            self._look_at(descriptor, now)
        self._cut_largest()
        self._cut_silent(now, at_once)
        self._make_room(at_once)
        return self.cut - before

    def _next_due(self, most: int) -> list[int]:
        for descriptor, _ in self._active.poll(0, most):
            self._due[descriptor] = None
        if not self._round:
            self._round = [*self._spoke, *self._new]
        self._due.update(dict.fromkeys(self._round[-_IN_TURN:]))
        del self._round[-_IN_TURN:]
        descriptors = list(itertools.islice(self._due, most))
        for descriptor in descriptors:
            del self._due[descriptor]
        return descriptors

    def _look_at(self, descriptor: int, now: float) -> None:
        connection = self._spoke.get(descriptor) or self._new.get(descriptor)
        if connection is None:
            return
        if not self._tcp:
            self._look_for_waiting(descriptor, connection)
            return
        received = _received(descriptor)
        if received is None or received < connection.seen:  # closed, or another's that will be told of
            self._forget(descriptor)
            return
        self._held += received - connection.seen
        connection.seen = received
        if connection.after is None:
            connection.after = received
        if connection.unfinished > _UNFINISHED_BYTES:
            self._cut_off(descriptor)
        elif connection.unfinished > HEADER_BYTES:
            self._close_until = now + _CLOSE_SECONDS

    def _look_for_waiting(self, descriptor: int, connection: _Connection) -> None:
        waits = _waiting(descriptor)
        connection.looks += waits
        if connection.looks >= _LOOKS:
            self._cut_off(descriptor)
        elif waits:
            self._due[descriptor] = None

    def _cut_largest(self) -> None:
        """Down to half of what may be: so this costs little, however often it is provoked."""
        if self._held <= _HELD_BYTES:
            return
        share = _HELD_BYTES // 2 // len(self)
        everyone = itertools.chain(self._new.items(), self._spoke.items())
        large = sorted(((each.held, descriptor) for descriptor, each in everyone if each.held > share), reverse=True)
        for _, descriptor in large:
            if self._held <= _HELD_BYTES // 2:
                break
            self._cut_off(descriptor)

    def _cut_silent(self, now: float, most: int) -> None:
        # The first message may take longer: before its HELLO a drafter asks for a ring.
        for silent, patience in ((self._spoke, 1.0), (self._new, HELLO_PATIENCE)):
            for descriptor, connection in list(itertools.islice(silent.items(), most)):
                if now - connection.since <= self._silent_seconds * patience:
                    break
                self._cut_off(descriptor)

    def _make_room(self, most: int) -> None:
        too_many = min(most, len(self) - self._most)
        if too_many > 0:
            for descriptor in list(itertools.islice(itertools.chain(self._new, self._spoke), too_many)):
                self._cut_off(descriptor)

    def _forget(self, descriptor: int) -> _Connection | None:
        connection = self._new.pop(descriptor, None) or self._spoke.pop(descriptor, None)
        if connection is not None:
            self._held -= connection.held
        return connection

    def _cut_off(self, descriptor: int) -> None:
        """Shut the connection down, so that libzmq notices and frees it; nothing if it is closed."""
        connection = self._forget(descriptor)
        if connection is None:
            return
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


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """As the socket that it is. Raises `OSError` if it is none."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _accepted_at(descriptor: int, endpoint: str) -> bool:
    """Whether it is a connection that came to this address (as `bind` returns it), rather than another file or a closed one."""
    path = ipc_path(endpoint)
    try:
        with _borrowed(descriptor) as same:
            if path is not None:
                return same.family == socket.AF_UNIX and same.getsockname() == str(path)
            here = same.getsockname()[1] if same.family in (socket.AF_INET, socket.AF_INET6) else None
            return here == int(endpoint.rpartition(":")[2])
    except OSError:
        return False


def _received(descriptor: int) -> int | None:
    """Bytes that came by this TCP connection since it stands; None if it is closed."""
    try:
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        try:
            information = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        finally:
            borrowed.detach()
    except OSError:
        return None
    return int.from_bytes(information[_BYTES_RECEIVED:], "little")


def _waiting(descriptor: int) -> bool:
    """Whether bytes have come that libzmq hasn't read; False of what is closed."""
    try:
        return struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0"))[0] > 0
    except OSError:
        return False
