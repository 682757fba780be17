"""A feeder's answers to drafters that ask for shared memory: who gets a ring, of how many rows, and when it is taken back.

Rings count towards the feeder's memory (`feed.memory_mib`). A drafter gets no more than its share of it, so that all ranks of a run fit,
with a ring or without. A ring is tied to a conversation by `claim`, with the token that only its drafter knows; one that is not claimed
in time is dropped. Connections are few at a time and each wait is bounded, so nobody who can reach the socket can hold up or
exhaust the feeder; the worst they cause is that drafters use the in-band lane.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dflash_mp.stream import ring_messages as rm
from dflash_mp.stream.codec import ProtocolError
from dflash_mp.stream.fd_passing import LaneError, check_peer, lane_address, listen, receive, send, stop_listening
from dflash_mp.stream.handshake import lane_name
from dflash_mp.stream.messages import reason
from dflash_mp.stream.shared_memory import Ring
from dflash_mp.stream.wakeup import Wakeup

_CONNECTIONS = 32  # at a time
_REQUEST_SECONDS = 2.0  # for the request, which is sent at once
_PAUSE_SECONDS = 0.1
_CLAIM_SECONDS = 30.0
_MOST_ROWS = 256  # in a ring: memory for more small rows ahead would be taken for nothing


@dataclass
class _Pending:
    """A ring that is being made or awaits its HELLO."""

    rows: int
    since: float = field(default_factory=time.monotonic)
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    ring: Ring | None = None


class LaneOffers:
    """`start`, then `close`. `capacity` rows fit the feeder's memory; `rows_in_use(peer)` are those of all others than `peer`."""

    def __init__(
        self,
        endpoint: str,
        row_bytes: int,
        capacity: int,
        rows_in_use: Callable[[str], int],
        cuda_device: int | None,
        note: Callable[[int, str], None],
    ) -> None:
        self._row_bytes, self._capacity, self._rows_in_use = row_bytes, capacity, rows_in_use
        self._cuda_device, self._note = cuda_device, note
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}  # by the drafter's name
        self._denied: dict[str, str] = {}  # why, by the drafter's name, until it says HELLO
        self._complaints = 0
        self._room = threading.Semaphore(_CONNECTIONS)
        self._wakeup, self._closing = Wakeup(), False
        self._listener: socket.socket | None = None
        self._address = ""
        try:
            self._address = lane_address(endpoint)
            self._listener = listen(self._address)
        except LaneError as error:
            if error.what != "another host":
                note(1, f"no shared memory for drafters: {error.what}")
        self._thread = threading.Thread(target=self._serve, name="feeder-lanes", daemon=True)

    def start(self) -> None:
        if self._listener is not None:
            self._thread.start()

    def claim(self, peer: str, lanes: tuple[str, ...]) -> tuple[str, Ring | None]:
        """The ring whose token is in one of a drafter's `lanes`, and that lane's name; (why not, None) if there is none."""
        with self._lock:
            pending = self._pending.get(peer)
            if pending is not None and pending.ring is not None:
                for lane in lanes:
                    if secrets.compare_digest(lane.encode(), lane_name(pending.token).encode()):
                        del self._pending[peer]
                        return lane, pending.ring
            return self._denied.pop(peer, ""), None

    def expire(self) -> None:
        """Drop what has not been claimed in time."""
        before = time.monotonic() - _CLAIM_SECONDS
        with self._lock:
            for peer, pending in list(self._pending.items()):
                if pending.ring is not None and pending.since < before:
                    del self._pending[peer]

    def pending_rows(self, but: str = "") -> int:
        """Rows of the rings that no conversation has claimed yet, that of the drafter named `but` left out."""
        with self._lock:
            return sum(pending.rows for peer, pending in self._pending.items() if peer != but)

    def close(self) -> None:
        """While the endpoint is still bound."""
        self._closing = True
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2.0)
        if self._listener is not None:
            stop_listening(self._listener, self._address)
            self._listener = None
        if not self._thread.is_alive():
            self._wakeup.close()

    # -- threads ------------------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        listener = self._listener
        poller = select.poll()
        poller.register(self._wakeup.fd, select.POLLIN)
        if listener is not None:
            poller.register(listener, select.POLLIN)
        while not self._closing and listener is not None:
            poller.poll(1000)
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                continue
            except OSError:  # descriptors ran out, or the drafter has gone again: it is served in-band
                time.sleep(_PAUSE_SECONDS)
                continue
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._attend, args=(connection,), name="feeder-lane", daemon=True).start()
            else:
                connection.close()

    def _attend(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_REQUEST_SECONDS)
                self._answer(connection)
        except (LaneError, OSError) as error:  # it has gone, and knows
            self._complain(str(error))
        finally:
            self._room.release()

    def _answer(self, connection: socket.socket) -> None:
        request = None
        try:
            check_peer(connection)
            request = _request(connection)
            self._offer(connection, request)
        except (LaneError, ProtocolError) as error:
            if request is not None:
                with self._lock:
                    self._denied = {**dict(list(self._denied.items())[1 - _CONNECTIONS :]), request.peer: error.what}
            else:
                self._complain(error.what)
            send(connection, rm.encode(rm.RingDenied(reason(error.what), reason(error.remedy))))

    def _complain(self, what: str) -> None:
        with self._lock:
            self._complaints += 1
            self._note(self._complaints, f"no shared memory for a drafter: {what}")

    def _offer(self, connection: socket.socket, request: rm.RingRequest) -> None:
        pending = self._reserve(request)
        try:
            ring = Ring(
                self._row_bytes,
                pending.rows,
                writable=request.writable,
                checksums=request.checksums,
                cuda_device=self._cuda_device,
                progress=lambda nbytes: send(connection, rm.encode(rm.RingProgress(nbytes))),
            )
            pending.ring, pending.since = ring, time.monotonic()
            offer = rm.RingOffer(pending.token, ring.rows, ring.row_bytes, ring.stride)
            try:
                send(connection, rm.encode(offer), ring.fd)
            finally:
                ring.close_file()
        except BaseException:
            with self._lock:
                if self._pending.get(request.peer) is pending:
                    del self._pending[request.peer]
            raise

    def _reserve(self, request: rm.RingRequest) -> _Pending:
        """Set rows of the feeder's memory aside. Raises `LaneError` if the drafter's share is too small."""
        wanted = max(request.least, min(request.window_bytes // self._row_bytes, _MOST_ROWS))
        with self._lock:
            taken = sum(pending.rows for peer, pending in self._pending.items() if peer != request.peer)
            left = self._capacity - taken - self._rows_in_use(request.peer)
            rows = min(wanted, self._capacity // request.world, left)
            if rows < request.least:
                needed = request.least * request.world * self._row_bytes / 2**20
                raise LaneError(
                    f"too little memory: feed.memory_mib leaves this drafter {max(0, rows)} rows, it needs {request.least}",
                    f"set feed.memory_mib to at least {needed:.0f}",
                )
            self._pending[request.peer] = pending = _Pending(rows)
            return pending


def _request(connection: socket.socket) -> rm.RingRequest:
    data, fd = receive(connection)
    if fd is not None:
        os.close(fd)
        raise ProtocolError("a file descriptor, which was not asked for")
    request = rm.decode(data)
    if not isinstance(request, rm.RingRequest):
        raise ProtocolError(f"{type(request).__name__} is not for a feeder")
    if request.version != rm.VERSION:
        raise LaneError(f"it asks in version {request.version}, this side speaks {rm.VERSION}")
    return request
