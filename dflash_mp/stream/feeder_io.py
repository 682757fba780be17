"""The feeder's I/O thread: one ROUTER socket, read and written without ever blocking on a peer.

It computes nothing but checksums of what it sends, and never logs (either could take long): what people should know goes to `notes`, which the compute thread prints.
One chunk per peer and round is sent with DONTWAIT; a peer whose pipe is full is skipped. A frame that is no message, or a message
that its sender may not send, is counted, answered with Refused, and ends that peer's state; nobody else notices. Connections that bring no
whole messages are cut off (`connections`).
"""

from __future__ import annotations

import errno
import secrets
import threading
import time
from collections import deque

import zmq

from dflash_mp.stream import messages as m
from dflash_mp.stream.codec import ProtocolError, printable
from dflash_mp.stream.connections import Connections
from dflash_mp.stream.curve import Gatekeeper, secure_feeder
from dflash_mp.stream.endpoints import bind, claim, ipc_path, set_feeder_options
from dflash_mp.stream.feeder_peer import OUTSTANDING, RING_OUTSTANDING, Peer
from dflash_mp.stream.feeder_peers import Peers
from dflash_mp.stream.handshake import INBAND, SHARED_MEMORY, refusal
from dflash_mp.stream.keys import FeederKeys
from dflash_mp.stream.lane_offers import LaneOffers
from dflash_mp.stream.plan import StreamPlan
from dflash_mp.stream.shared_memory import Ring
from dflash_mp.stream.software import own_software
from dflash_mp.stream.wakeup import Wakeup
from dflash_mp.stream.weights import WeightsServer

_READS_PER_ROUND = 128  # frames
_BLOCKED_POLL_MS = 2  # a ROUTER can't be polled for room in one peer's pipe
_BYE_SECONDS = 2.0
_OFTEN = 128  # a minute
_HOUSEKEEPING_SECONDS = 0.01  # between two looks for what time demands
_PROBE_SECONDS = 2.0  # drafters ping once a second


class FeederIo:
    """Owns the socket. `start`, then `close`; `broken` is the exception that ended the thread, if one did."""

    def __init__(
        self,
        *,
        endpoint: str,
        insecure_no_auth: bool,
        run: str,
        plan: StreamPlan,
        row_bytes: int,
        peers: Peers,
        weights: WeightsServer,
        silent_seconds: float,
        keys: FeederKeys | None,
        cuda_device: int | None = None,
    ) -> None:
        self.notes: deque[str] = deque(maxlen=64)
        self.malformed = 0  # messages
        self.refused = 0  # drafters
        self.silent = self.disconnected = 0  # drafters
        self.broken: BaseException | None = None
        self._run, self._plan, self._row_bytes = run, plan, row_bytes
        self._peers, self._weights, self._silent_seconds = peers, weights, silent_seconds
        self._token = secrets.token_hex(8)
        self._wakeup = Wakeup()
        self._leaving: m.Bye | None = None
        self._often, self._often_since = 0, 0.0
        self._probed = 0.0
        self._context = zmq.Context(io_threads=1)
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        set_feeder_options(self._router)
        tcp = ipc_path(endpoint) is None
        if not tcp:
            keys = None  # the socket's file says who may connect
        self._connections = Connections(tcp, silent_seconds)
        self._frames: list[bytes] = []  # of the message that is being read
        self._gate = Gatekeeper(self._context, self._router, keys, tcp, self._note_some, self._connections.accepted)

        def offers(at: str) -> LaneOffers:
            return LaneOffers(at, row_bytes, peers.capacity, peers.rows_in_use, cuda_device, self._note_some)

        lanes: LaneOffers | None = None
        try:
            if keys is not None:
                secure_feeder(self._router, keys)
            claim(endpoint, insecure_no_auth, keys is not None)
            # Who finds a socket file looks for the lane's at once, and does without if it isn't there; a port is known only afterwards.
            lanes = None if tcp else offers(endpoint)
            self.endpoint = bind(self._router, endpoint)
            self._lanes = lanes = lanes or offers(self.endpoint)
            self._connections.listens(self.endpoint)
        except BaseException:
            if lanes is not None:
                lanes.close()
            self._end(linger_ms=0)
            raise
        self._thread = threading.Thread(target=self._main, name="feeder-io", daemon=True)

    def start(self) -> None:
        self._lanes.start()
        self._thread.start()

    def wake(self) -> None:
        """There is something to send."""
        self._wakeup.set()

    def close(self, bye: m.Bye) -> None:
        """Say `bye` to all peers, wait up to two seconds for theirs, and let go of the address."""
        self._leaving = bye
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2 * _BYE_SECONDS)
        else:
            self._remove_files()
            self._end(linger_ms=0)
        if not self._thread.is_alive():
            self._wakeup.close()

    def _remove_files(self) -> None:
        """Called while the socket still listens, so the files can't be a successor's."""
        self._lanes.close()
        if path := ipc_path(self.endpoint):
            path.unlink(missing_ok=True)

    def _end(self, linger_ms: int) -> None:
        self._gate.close()
        self._connections.close()
        self._context.destroy(linger=linger_ms)

    # -- the thread ---------------------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._part(self._serve())
        except BaseException as error:  # the compute thread raises it
            self.broken = error
        finally:
            self._remove_files()
            self._end(linger_ms=200)

    def _serve(self) -> m.Bye:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        for gate in self._gate.sockets:
            poller.register(gate, zmq.POLLIN)
        idle_ms = int(self._silent_seconds * 250)
        timeout, last = 0, time.monotonic()
        while self._leaving is None:
            ready = dict(poller.poll(timeout))
            if self._wakeup.fd in ready:
                self._wakeup.clear()
            if any(gate in ready for gate in self._gate.sockets):
                self._gate.attend()
            read = self._read(_READS_PER_ROUND)
            sent, blocked = self._write()
            patience = min(idle_ms, int(1000 * self._connections.look_seconds))
            timeout = 0 if read or sent else _BLOCKED_POLL_MS if blocked else patience
            last = self._drop_silent(last)
            if self._connections.look():
                self._note_some(self._connections.cut, "cut off a connection that brought no whole message")
        return self._leaving

    def _part(self, bye: m.Bye) -> None:
        """Say Bye to everybody and read on until all have answered: a socket closed with unread input can lose what it sent."""
        for peer in self._peers.all():
            self._send(peer.identity, bye)
        deadline = time.monotonic() + _BYE_SECONDS
        while self._peers.all() and (left := deadline - time.monotonic()) > 0:
            self._router.poll(int(left * 1000) + 1)
            self._read(_READS_PER_ROUND)

    def _drop_silent(self, last: float) -> float:
        now = time.monotonic()
        if 0 <= now - last < _HOUSEKEEPING_SECONDS:
            return last
        self._lanes.expire()
        self._probe(now)
        if now - last > self._silent_seconds / 2:
            self._peers.excuse_silence()
        for peer in self._peers.remove_silent(now - self._silent_seconds):
            self.silent += 1
            self._note_often(f"{_name(peer)} was silent for {self._silent_seconds:g} s: dropped")
        return now

    def _probe(self, now: float) -> None:
        """Send to drafters that have said nothing for a while: to one whose process is gone that fails, and what it held is free."""
        if now - self._probed > _PROBE_SECONDS:
            self._probed = now
            for peer in self._peers.all():
                if now - peer.heard > _PROBE_SECONDS:
                    self._pong(peer, m.Ping(0, 0))

    # -- reading ------------------------------------------------------------------------------------------------------------------

    def _read(self, limit: int) -> bool:
        """Read at most `limit` frames; whether there were any."""
        for count in range(limit):
            try:
                frames = self._receive()
            except zmq.Again:
                return count > 0
            if frames is None:
                continue
            identity, *rest = frames
            try:
                if len(rest) != 1:
                    raise ProtocolError(f"a message of {len(rest)} frames")
                self._handle(identity, m.decode(rest[0]))
            except ProtocolError as error:
                self._reject(identity, error)
        return True

    def _receive(self) -> list[bytes] | None:
        """Read one frame. The message's frames if it was the last: the identity and, of a message with too many, the first two."""
        frame = self._router.recv(zmq.DONTWAIT, copy=False)
        if len(self._frames) < 3:
            self._frames.append(frame.bytes)
        if frame.more:
            return None
        frames, self._frames = self._frames, []
        self._connections.heard(int(frame.get(zmq.SRCFD)))
        return frames

    def _handle(self, identity: bytes, message: m.Message) -> None:
        if isinstance(message, m.Hello):
            self._greet(identity, message)
            return
        peer = self._peers.find(identity)
        if peer is None:
            if not isinstance(message, m.Bye):
                self._send(identity, m.Refused("stranger", "this feeder does not know you: say HELLO"))
        elif isinstance(message, m.Get):
            self._peers.get(peer, message)
        elif isinstance(message, m.Release):
            self._peers.release(peer, message)
        elif isinstance(message, m.GetWeights):
            self._weights.check(message)
            self._peers.get_weights(peer, message)
        elif isinstance(message, m.Ping):
            self._pong(peer, message)
        elif isinstance(message, m.Bye):
            self._farewell(peer, message)
        else:
            raise ProtocolError(f"{type(message).__name__} is not for a feeder")

    def _greet(self, identity: bytes, hello: m.Hello) -> None:
        if self._leaving is not None:
            return
        refused = refusal(hello, self._plan, self._run)
        replaced: list[Peer] = []
        lane, ring = self._lanes.claim(hello.peer, hello.lanes)
        if refused is None:
            refused, replaced = self._peers.greet(identity, hello, ring, self._lanes.pending_rows(hello.peer))
        if refused is not None:
            self.refused += 1
            self._send(identity, refused)
            self._note_some(self.refused, f"refused {hello.peer}: {refused.reason}")
            return
        for old in replaced:
            if old.identity != identity and old.hello.incarnation != hello.incarnation:
                self._send(old.identity, m.Refused("replaced", f"another process has connected as {hello.peer}"))
        self._note_often(f"{hello.peer} of {hello.world} connected, lane {_described(lane, ring)}")
        later = (own_software(), time.time()) if hello.software else ()
        most = RING_OUTSTANDING if ring else OUTSTANDING
        welcome = m.Welcome(m.VERSION, self._token, self._plan, lane if ring else INBAND, self._row_bytes, most, *later)
        self._send(identity, welcome)

    def _pong(self, peer: Peer, ping: m.Ping) -> None:
        key, since = self._peers.busy or (None, 0.0)
        seconds = 0.0 if key is None else max(0.0, time.monotonic() - since)
        later = self._peers.time_spent().computing - seconds if peer.hello.software else 0.0
        pong = m.Pong(ping.sequence, self._peers.rows, self._peers.queued(), key, seconds, max(0.0, later))
        self._send(peer.identity, pong)

    def _farewell(self, peer: Peer, bye: m.Bye) -> None:
        self._peers.remove(peer)
        if self._leaving is None:
            self._send(peer.identity, m.Bye("done", "goodbye"))
            self._note_often(f"{_name(peer)} left ({bye.code}): {bye.reason}")

    def _reject(self, identity: bytes, error: ProtocolError) -> None:
        self.malformed += 1
        peer = self._peers.find(identity)
        if peer is not None:
            self._peers.remove(peer)
        self._note_some(self.malformed, f"refused a message of {_name(peer) if peer else 'a stranger'}: {error.what}")
        code: m.RefusalCode = "version" if isinstance(error, m.VersionError) else "malformed"
        self._send(identity, m.Refused(code, m.reason(error.what), error.remedy))

    def _note_some(self, count: int, text: str) -> None:
        """Note the 1st, 2nd, 4th, 8th … of what a hostile peer can repeat without end."""
        if count & (count - 1) == 0:
            self._note(text if count == 1 else f"{text} (number {count})")

    def _note_often(self, text: str) -> None:
        """Note what drafters do now and then, and a hostile one could without end: so many times a minute."""
        if (now := time.monotonic()) - self._often_since > 60:
            self._often_since, self._often = now, 0
        self._often += 1
        if self._often <= _OFTEN:
            self._note(text)
        else:
            self._note_some(self._often - _OFTEN, f"drafters come and go too often; the latest: {text}")

    def _note(self, text: str) -> None:
        self.notes.append(printable(text))

    # -- writing ------------------------------------------------------------------------------------------------------------------

    def _write(self) -> tuple[bool, bool]:
        """Send each peer one thing; returns whether anything was sent, and whether a full pipe kept something back."""
        sent = blocked = False
        for peer in self._peers.all():
            outgoing = self._peers.next_outgoing(peer, self._weights)
            if outgoing is None:
                continue
            if self._send(peer.identity, *outgoing):
                self._peers.sent(peer, outgoing[0])
                sent = True
            elif not peer.gone:
                blocked = True
        return sent, blocked

    def _send(self, identity: bytes, message: m.Message, payload: memoryview | None = None) -> bool:
        """False if the peer's pipe is full or the peer is gone (then its state is removed)."""
        frames: list[bytes | memoryview] = [identity, m.encode(message)]
        if payload is not None:
            frames.append(payload)
        try:
            self._router.send_multipart(frames, zmq.DONTWAIT, copy=payload is None)
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                self._vanish(identity)
            elif error.errno != errno.EAGAIN:
                raise
            return False
        return True

    def _vanish(self, identity: bytes) -> None:
        peer = self._peers.find(identity)
        if peer is not None:
            self._peers.remove(peer)
            self.disconnected += 1
            self._note_often(f"{_name(peer)} disconnected")


def _described(why: str, ring: Ring | None) -> str:
    if ring is not None:
        return f"{SHARED_MEMORY} ({ring.rows} rows of {ring.row_bytes / 2**20:.2f} MiB)"
    return f"{INBAND} ({why})" if why else INBAND


def _name(peer: Peer) -> str:
    return peer.hello.peer
