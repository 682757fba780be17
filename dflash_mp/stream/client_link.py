"""A drafter's connection to one feeder: a socket, what was asked through it, and the signs of life.

A connection is one socket and one conversation. When anything is wrong with it (the transport broke, the feeder is silent, said Bye,
or has forgotten us) the socket is closed and a new one opened, so an answer from an old conversation can never arrive in a new one.
A `Link` belongs to the stream's thread; other threads only read it for messages to people.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from dflash_mp.stream import messages as m
from dflash_mp.stream.codec import ProtocolError
from dflash_mp.stream.curve import HANDSHAKE_FAILURES, refusal_in, secure_drafter
from dflash_mp.stream.dealing import RowTime
from dflash_mp.stream.endpoints import allow_ipv6, ipc_path, set_drafter_options
from dflash_mp.stream.handshake import INBAND, SHARED_MEMORY, lane_name
from dflash_mp.stream.keys import DrafterKeys
from dflash_mp.stream.lane_request import LaneRequest, LaneWishes
from dflash_mp.stream.message_memory import keep_message_memory
from dflash_mp.stream.shared_memory import Loan, MappedRing
from dflash_mp.stream.window import Request

State = Literal["connecting", "greeting", "live", "refused", "closed"]
_RETRY_SECONDS = 5.0  # after a refusal
_BYE_LINGER_MS = 500
_FEW = 3  # rows: one waiting, one in the making, one on its way
_AHEAD_SECONDS = 0.008  # a few times what a message takes there and back
_STUCK_SECONDS = 1.0  # in one row, at least, before a feeder may be called stuck


class Link:
    """States: connecting (no transport yet) → greeting (Hello sent) → live; refused (waits, then connects again)."""

    def __init__(
        self,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        keys: DrafterKeys | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.state: State = "connecting"
        self.since = self.heard = time.monotonic()
        self.welcome: m.Welcome | None = None
        self.asked: dict[int, Request] = {}  # by request number, oldest first
        self.row_time = RowTime()
        self.rows = 0
        self.pong: m.Pong | None = None
        self.refusal: m.Refused | None = None
        self.last_loss = ""  # why the last conversation ended
        self.ever_live = False
        self.hung_up = 0  # times that the other side ended a handshake without a word, since the last conversation
        self.locked_out: m.Refused | None = None  # what the last failed handshake said
        self.keys = keys if ipc_path(endpoint) is None else None
        self._context, self._poller = context, poller
        self._unsent: deque[m.Message] = deque()
        self._requests = self._pings = 0
        self._pinged = 0.0
        self.lane: LaneRequest | None = None  # for this conversation
        self.ring: MappedRing | None = None  # of this conversation
        self._lent: set[int] = set()  # slots of the ring
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._open()

    # -- the conversation's course ------------------------------------------------------------------------------------------------

    def approach(self, hello: m.Hello, wishes: LaneWishes | None, seconds: float, wake: Callable[[], None]) -> None:
        """The transport stands: find out whether memory can be shared, then say who we are. `wake`, when called, is followed by a call of this."""
        if self.lane is None:
            self.lane = LaneRequest(self.endpoint, wishes, seconds, wake)
        if not self.lane.done:
            self._poll_for(zmq.POLLIN)  # for nothing, until it is done
            return
        if not self._unsent:
            self._unsent.append(replace(hello, lanes=self.lanes))
        if self.flush():
            self._enter("greeting")
        self._poll_for(zmq.POLLIN if self.state == "greeting" else zmq.POLLIN | zmq.POLLOUT)

    def abandon_lane(self) -> None:
        """The transport broke before anything was said."""
        self.lane = None
        self._unsent.clear()
        self._poll_for(zmq.POLLIN | zmq.POLLOUT)

    @property
    def lane_answered(self) -> bool:
        return self.state == "connecting" and self.lane is not None and self.lane.done

    @property
    def lanes(self) -> tuple[str, ...]:
        """Those that can be used in this conversation, best first."""
        ring = None if self.lane is None else self.lane.ring
        return (INBAND,) if ring is None else (lane_name(ring.token), INBAND)

    def describe_lane(self) -> str:
        """Which lane this conversation uses, and why not the better one."""
        if self.ring is not None:
            return f"{SHARED_MEMORY} ({len(self.ring.rows)} rows of {self.ring.row_bytes / 2**20:.2f} MiB)"
        why = "" if self.lane is None else self.lane.why
        return f"{INBAND} ({why or 'the feeder does not know the ring that it gave'})"

    def ring_fits(self, row_bytes: int) -> bool:
        ring = None if self.lane is None else self.lane.ring
        return ring is None or ring.row_bytes == row_bytes

    def go_live(self, welcome: m.Welcome) -> None:
        if self.lane is not None and welcome.lane != INBAND:
            self.ring = self.lane.ring
        else:
            keep_message_memory()
        self.welcome, self.refusal, self.ever_live, self.hung_up = welcome, None, True, 0
        self._enter("live")

    def lose(self, why: str, bye: m.Bye | None = None) -> list[Request]:
        """End the conversation and start anew; returns the rows that it still owed."""
        if bye is not None:
            self._unsent.append(bye)
            self.flush()
        owed = self._close(_BYE_LINGER_MS if bye is not None else 0)
        self.last_loss = why
        self._open()
        return owed

    def refuse(self, refusal: m.Refused) -> list[Request]:
        """The feeder won't have us, or we won't have it: try again later. Returns the rows that it still owed."""
        owed = self._close(0)
        self.refusal = refusal
        self._enter("refused")
        return owed

    def leave(self, bye: m.Bye) -> list[Request]:
        """Say `bye` if anybody listens, and end for good; returns the rows that it still owed."""
        if self.state in ("greeting", "live"):
            self.post(bye)
        owed = self._close(_BYE_LINGER_MS)
        self.last_loss = bye.reason
        self._enter("closed")
        return owed

    def close(self) -> None:
        """End for good."""
        self._close(_BYE_LINGER_MS)
        self._enter("closed")

    def tick(self, now: float) -> None:
        """What time demands: an end to the wait for a ring, and a new start after a refusal."""
        if self.state == "connecting":  # what is unsent is HELLO, which `approach` sends
            if self.lane is not None:
                self.lane.expire(now)
        else:
            self.flush()
        if self.state == "refused" and now - self.since > _RETRY_SECONDS:
            self._open()

    # -- sending ------------------------------------------------------------------------------------------------------------------

    @property
    def most(self) -> int:
        """Rows that may be asked for at once: a few, or as many as the feeder makes in a round trip of messages if those are more."""
        if self.welcome is None:
            return 0
        slots = self.welcome.outstanding if self.ring is None else len(self.ring.rows) - len(self._lent)
        seconds = self.row_time.seconds
        ahead = _FEW if seconds is None else max(_FEW, int(_AHEAD_SECONDS / max(seconds, 1e-6)))
        return min(self.welcome.outstanding, slots, ahead)

    @property
    def checksums(self) -> bool:
        """Whether the feeder checksums rows that it places in the ring."""
        return self.lane is not None and self.lane.checksums

    @property
    def has_room(self) -> bool:
        """Whether there is, or surely will be, memory for one more row at the feeder."""
        return self.ring is None or len(self.asked) < len(self.ring.rows) - len(self._lent)

    def ask(self, request: Request) -> m.RowRequest:
        """Give `request` a number."""
        self._requests += 1
        self.asked[self._requests] = request
        return m.RowRequest(self._requests, request.want.key)

    def ping(self, now: float, every: float) -> None:
        if now - self._pinged >= every and not self._unsent:
            self._pinged = now
            self._pings += 1
            self.post(m.Ping(self._pings, self.rows))

    def post(self, message: m.Message) -> bool:
        """Send in order, now or when there is room. Bounded: all but pings answer something or await an answer."""
        self._unsent.append(message)
        return self.flush()

    def flush(self) -> bool:
        """Whether everything has been sent."""
        while self._unsent and self._socket is not None:
            try:
                self._socket.send(m.encode(self._unsent[0]), zmq.DONTWAIT)
            except zmq.Again:
                return False
            self._unsent.popleft()
        return not self._unsent

    # -- receiving ----------------------------------------------------------------------------------------------------------------

    def owns(self, polled: object) -> bool:
        return polled is self._socket or polled is self._monitor

    def receive(self) -> m.Message | None:
        """The next message; None if there is none. Raises `ProtocolError` if it isn't one."""
        if self._socket is None:
            return None
        try:
            frame = self._socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return None
        self.heard = time.monotonic()
        try:
            message = m.decode(frame)
            if bool(self._socket.rcvmore) != isinstance(message, m.Row | m.Weights):
                raise ProtocolError(f"a message of type {type(message).__name__} with the wrong number of frames")
        except ProtocolError:
            self.skip_payload()
            raise
        return message

    def payload_into(self, place: memoryview) -> None:
        """The frame after a `Row` or `Weights`. Raises `ProtocolError` unless it fills `place` exactly and is the last."""
        # Unlike an assignment to a memoryview, this lets other threads run, above all the one that sums the chunk before.
        np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(self._payload(len(place)), np.uint8))

    def payload_dropped(self, nbytes: int) -> None:
        """As `payload_into`, but nobody wants it."""
        self._payload(nbytes)

    def _payload(self, nbytes: int) -> memoryview:
        if self._socket is None:
            raise ProtocolError("the connection is closed")
        frame = self._socket.recv(zmq.DONTWAIT, copy=False)
        if len(frame) != nbytes or self._socket.rcvmore:
            self.skip_payload()
            raise ProtocolError(f"a payload of {len(frame)} bytes where {nbytes} are due")
        return memoryview(frame)  # type: ignore[arg-type]  # a Frame is a buffer, which its stub doesn't say

    def skip_payload(self) -> None:
        """Drop what is left of the current message."""
        while self._socket is not None and self._socket.rcvmore:
            self._socket.recv(zmq.DONTWAIT, copy=False)

    def disconnected(self) -> bool:
        """Whether the transport broke, or could not be made, since the last call."""
        broke = False
        while self._monitor is not None and int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart())
            broke = True
            self.hung_up += event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            refusal = refusal_in(event["event"], event["value"], self.keys is not None)
            self.locked_out = refusal or self.locked_out
        return broke

    # -- the ring -----------------------------------------------------------------------------------------------------------------

    def borrow(self, placed: m.Placed) -> Loan:
        """The row that the feeder has placed in the ring. Raises `ProtocolError` if there is no such slot, or it is lent already."""
        if self.ring is None:
            raise ProtocolError("PLACED, though the lane is in-band")
        if placed.slot >= len(self.ring.rows) or placed.slot in self._lent:
            raise ProtocolError(f"PLACED in slot {placed.slot}, which is not free")
        self._lent.add(placed.slot)
        return Loan(self.ring, placed.request, placed.slot)

    def give_back(self, loan: Loan) -> None:
        """The slot is free again; nothing to do if that conversation is over."""
        if loan.ring is self.ring:
            self._lent.discard(loan.slot)
            self.post(m.Release(loan.request, loan.slot))

    # -- for people ---------------------------------------------------------------------------------------------------------------

    def describe(self, now: float) -> str:
        """This feeder in one clause."""
        silent, for_so_long = now - self.heard, now - self.since
        refusal, pong, usual = self.refusal, self.pong, self.row_time.seconds  # once: the stream's thread changes them
        if self.state == "refused" and refusal is not None:
            return f"{self.endpoint}{'' if refusal.code == 'key' else ' refused'}: {refusal.reason}"
        if self.state == "closed":
            return f"{self.endpoint} was left: {self.last_loss}"
        if self.state == "greeting":
            return f"{self.endpoint} accepts connections but has not answered for {for_so_long:.0f} s"
        if self.state == "connecting" and self.hung_up > 2:
            doubt = "" if self.keys is None else " (is its key the pinned one?)"
            return f"{self.endpoint} hung up {self.hung_up} times before it said anything{doubt}"
        if self.state == "connecting":
            past = f"lost {for_so_long:.0f} s ago ({self.last_loss})" if self.ever_live else "nothing answers there"
            return f"{self.endpoint}: {past}"
        if silent > 3.0:
            return f"{self.endpoint} is connected but silent for {silent:.0f} s: stopped, or cut off"
        if pong is None or pong.busy is None:
            return f"{self.endpoint} is connected and idle"
        stuck = usual is not None and self.stuck_for(now) > 0
        return (
            f"{self.endpoint} is connected and busy with {pong.busy} for {pong.busy_seconds + silent:.0f} s, "
            f"{pong.queued} more queued"
            + (f"; it answers, but is stuck: it made rows in {usual:.1f} s before" if stuck else "")
        )

    def stuck_for(self, now: float) -> float:
        """Seconds for which the feeder, though it answers, has been at a row that should have taken a tenth of that; 0 if it isn't stuck."""
        pong, usual = self.pong, self.row_time.seconds
        if pong is None or pong.busy is None or usual is None:
            return 0.0
        seconds = pong.busy_seconds + now - self.heard
        return seconds if seconds > max(_STUCK_SECONDS, 10 * usual) else 0.0

    # -- sockets ------------------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        set_drafter_options(self._socket)
        allow_ipv6(self._socket, self.endpoint)
        if self.keys is not None:
            secure_drafter(self._socket, self.keys)
        self.locked_out = None
        self.row_time = RowTime()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILURES)
        self._monitor.linger = 0
        self._socket.connect(self.endpoint)
        self._poll_for(zmq.POLLIN | zmq.POLLOUT)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._enter("connecting")

    def _close(self, linger_ms: int) -> list[Request]:
        owed = list(self.asked.values())
        self.asked.clear()
        self._unsent.clear()
        self._lent.clear()
        self.lane = self.ring = None
        self.welcome = self.pong = None
        if self._socket is not None and self._monitor is not None:
            self._poller.unregister(self._socket)
            self._poller.unregister(self._monitor)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=linger_ms)
        self._socket = self._monitor = None
        return owed

    def _poll_for(self, events: int) -> None:
        if self._socket is not None:
            self._poller.register(self._socket, events)

    def _enter(self, state: State) -> None:
        self.state = state
        self.since = self.heard = time.monotonic()
