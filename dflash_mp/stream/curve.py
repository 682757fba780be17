"""Keys on sockets: CURVE between feeder and drafter, and why a handshake failed.

A feeder admits the drafters on its list only, as it is at that moment: libzmq asks `Gatekeeper` about each key (ZAP), and refuses everybody where nobody answers.
A drafter pins its feeder's key. Whoever is turned away is noted at the feeder, and told at the drafter what is wrong, in seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections import Counter
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from dflash_mp.stream.keys import AllowList, DrafterKeys, FeederKeys
from dflash_mp.stream.messages import CHUNK_BYTES, HEADER_BYTES, Refused

ZAP_ADDRESS = "inproc://zeromq.zap.01"  # libzmq's, in each context
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_WRONG_KEY = zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
_ENVELOPE = 33  # bytes that CURVE adds to a frame, which libzmq counts in maxmsgsize
_PER_ROUND = 32
_monitors = itertools.count()

_NOT_PINNED = Refused(
    "key",
    "the feeder's key is not the pinned one",
    "copy the feeder's feeder.public into stream.keys here; if it is that already, somebody else answers at this address",
)
_NO_KEYS_THERE = Refused(
    "key", "the feeder has no keys, and this drafter demands them", "set stream.keys on the feeder's host"
)
_NO_KEYS_HERE = Refused(
    "key", "the feeder demands a key, and this drafter has none", "set stream.keys here (dflash-mp keygen)"
)


def secure_feeder(router: zmq.Socket[bytes], keys: FeederKeys) -> None:
    """Before binding, after the other options. From now on the context's `Gatekeeper` decides who gets in; without one nobody does."""
    router.maxmsgsize = HEADER_BYTES + _ENVELOPE
    router.curve_server = 1
    router.curve_secretkey = keys.secret
    router.zap_domain = b"dflash-mp"
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_drafter(dealer: zmq.Socket[bytes], keys: DrafterKeys) -> None:
    """Before connecting, after the other options."""
    dealer.maxmsgsize = CHUNK_BYTES + _ENVELOPE
    dealer.curve_secretkey, dealer.curve_publickey = keys.secret, keys.public
    dealer.curve_serverkey = keys.feeder


class Gatekeeper:
    """A feeder's answers about keys, and notes of who was turned away. Belongs to the thread that reads `router`.

    `note(count, text)` is called for each one; count is how many came for the same reason. `accepted(descriptor)` is called for each
    new connection. Made before `router` is bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        keys: FeederKeys | None,
        tcp: bool,
        note: Callable[[int, str], None],
        accepted: Callable[[int], None] = lambda descriptor: None,
    ) -> None:
        self._router, self._keys, self._note, self._accepted = router, keys, note, accepted
        self._turned_away: Counter[str] = Counter()
        address = f"inproc://monitor-{next(_monitors)}"
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.rcvhwm = 0  # libzmq's I/O thread would wait for room
        ended = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if tcp else 0  # by ipc it's a look whether somebody listens
        router.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | ended)
        self._monitor.connect(address)
        self.sockets = [self._monitor]
        if keys is not None:
            self._allowed = AllowList(keys, lambda text: note(1, text))
            self._zap = context.socket(zmq.REP)
            self._zap.bind(ZAP_ADDRESS)
            self.sockets.append(self._zap)

    def attend(self) -> None:
        """Answer and note what has come, without waiting."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_PER_ROUND if self._keys is not None else 0):
                self._answer(self._zap.recv_multipart(zmq.DONTWAIT))
        with contextlib.suppress(zmq.Again):
            for _ in range(_PER_ROUND):
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._accepted(event["value"])
                else:
                    self._note_failure(event["event"], event["value"])

    def close(self) -> None:
        """Before the context ends."""
        self._router.disable_monitor()
        for each in self.sockets:
            each.close(linger=0)

    def _answer(self, request: list[bytes]) -> None:
        """ZAP 1.0 (RFC 27): version, request id, domain, address, identity, mechanism, credentials."""
        name = None
        if self._keys is not None and len(request) == 7 and request[5] == b"CURVE":
            name = self._allowed.name_of(request[6])
        status, text = (b"400", b"unknown key") if name is None else (b"200", b"")
        self._zap.send_multipart([b"1.0", request[1], status, text, (name or "").encode(), b""], zmq.DONTWAIT)
        if name is None:
            address = request[3].decode("ascii", "replace")[:64] if len(request) > 3 else "?"
            self._turn_away("unknown key", f"refused a drafter with an unknown key, from {address}")

    def _note_failure(self, event: int, value: int) -> None:
        if (
            event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        ):  # of two that disagree, one notices first and hangs up on the other
            value = _MISMATCH if self._keys is not None else 0
        if self._keys is None and value == _MISMATCH:
            self._turn_away("keys", "refused a drafter that demands keys: stream.keys is not set here")
        elif self._keys is None and value == 0:
            who = "no drafter, or one that demands keys (stream.keys is not set here)"
            self._turn_away("ended", f"a connection ended in the handshake: {who}")
        elif value == _MISMATCH:
            self._turn_away("plain", "refused a plain connection: it showed no key")
        elif value == _WRONG_KEY:
            self._turn_away(
                "pin", "refused a drafter that expects another feeder's key: its feeder.public isn't this one's"
            )

    def _turn_away(self, reason: str, text: str) -> None:
        self._turned_away[reason] += 1
        self._note(self._turned_away[reason], text)


def refusal_in(event: int, value: int, keyed: bool) -> Refused | None:
    """What a failed handshake tells a drafter; None if it tells nothing (the connection just ended)."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == 400:
        return Refused(
            "key",
            "the feeder refused this drafter's key",
            "copy drafter.public from stream.keys here into the feeder's: it reads its list again when that changes",
        )
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Refused(
            "key", f"the feeder could not check this drafter's key (status {value})", "look at the feeder's log"
        )
    if event != zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return None
    if value == _MISMATCH:
        return _NO_KEYS_THERE if keyed else _NO_KEYS_HERE
    if value == _WRONG_KEY:
        return _NOT_PINNED
    return Refused("key", "what answers there is no feeder", "check feed.endpoints")


def refusal_behind(endpoint: str, keyed: bool) -> Refused | None:
    """Why the feeder at `endpoint` hangs up during the handshake; None if what is there doesn't greet like a feeder.

    A tunnel or proxy without a feeder behind it hangs up, too; only a feeder greets first. Takes at most about two seconds.
    """
    mechanism = _mechanism(endpoint)
    if mechanism == b"CURVE":
        return _NOT_PINNED if keyed else _NO_KEYS_HERE
    return _NO_KEYS_THERE if mechanism == b"NULL" and keyed else None


def _mechanism(endpoint: str) -> bytes | None:
    """The security mechanism in a ZMTP 3 greeting: signature (10 bytes), version (2), mechanism (20), and more."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    greeting = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as probe:
            probe.sendall(
                b"\xff" + bytes(7) + b"\x01\x7f\x03"
            )  # no more, or the feeder could hang up before it has greeted
            while len(greeting) < 32 and (got := probe.recv(64)):
                greeting += got
    except (OSError, ValueError):
        return None
    if len(greeting) < 32 or greeting[0] != 0xFF or greeting[9] != 0x7F:
        return None
    return greeting[12:32].rstrip(b"\0")
