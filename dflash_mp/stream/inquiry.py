"""Asking a feeder who it is, without taking a row: for checks before a run, and beside one.

`ask` connects as a drafter of a name of its own, so it takes no rank's place, learns what the feeder serves and which versions it runs, may
fetch some of the target's embedding to time the path, and leaves. It occupies a drafter's place in the feeder for as long; one that has none
left says so. Bounded: `seconds` to get an answer, about `transfer_seconds` more for the transfer. Never raises for what a feeder does.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from dflash_mp.stream import messages as m
from dflash_mp.stream.codec import ProtocolError
from dflash_mp.stream.curve import HANDSHAKE_FAILURES, refusal_in, secure_drafter
from dflash_mp.stream.endpoints import allow_ipv6, ipc_path, set_drafter_options
from dflash_mp.stream.handshake import INBAND
from dflash_mp.stream.keys import DrafterKeys
from dflash_mp.stream.software import own_software

_WEIGHT_REQUESTS = 4
_LEAST_BYTES = 8 << 20  # a shorter transfer tells little


@dataclass(frozen=True)
class Answer:
    """What came back: a welcome, a refusal, or neither (nothing answers there).

    `clock_ahead` is the feeder's time of day minus this host's, give or take `round_trip`, in seconds; `bytes_per_second` what a transfer over this path
    reached, keys and all, None when none was asked for or the embedding is too small.
    """

    welcome: m.Welcome | None = None
    refusal: m.Refused | None = None
    round_trip: float = 0.0
    clock_ahead: float | None = None
    bytes_per_second: float | None = None


def ask(
    endpoint: str,
    expects: m.Expectations,
    keys: DrafterKeys | None = None,
    *,
    seconds: float = 3.0,
    transfer_seconds: float = 0.0,
) -> Answer:
    """Ask the feeder at `endpoint`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        dealer = context.socket(zmq.DEALER)
        set_drafter_options(dealer)
        allow_ipv6(dealer, endpoint)
        keyed = keys is not None and ipc_path(endpoint) is None
        if keys is not None and keyed:
            secure_drafter(dealer, keys)
        monitor = dealer.get_monitor_socket(HANDSHAKE_FAILURES)
        monitor.linger = 0
        dealer.connect(endpoint)
        answer = _greet(dealer, monitor, _hello(expects), time.monotonic() + seconds, keyed)
        if answer.welcome is None:
            return answer
        try:
            rate = _transfer(dealer, time.monotonic() + transfer_seconds) if transfer_seconds > 0 else None
        finally:
            dealer.send(m.encode(m.Bye("done", "it only asked")))
            _await(dealer, time.monotonic() + 1.0)
        return Answer(answer.welcome, None, answer.round_trip, answer.clock_ahead, rate)
    except ProtocolError as error:
        return Answer(refusal=m.Refused("malformed", m.reason(error.what), error.remedy))
    finally:
        context.destroy(linger=200)


def _hello(expects: m.Expectations) -> m.Hello:
    return m.Hello(
        version=m.VERSION,
        peer=f"an inquiry (process {os.getpid()})",
        incarnation=secrets.token_hex(8),
        rank=0,
        world=1,
        expects=expects,
        plan=None,
        lanes=(INBAND,),
        software=own_software(),
    )


def _greet(
    dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], hello: m.Hello, deadline: float, keyed: bool
) -> Answer:
    poller = zmq.Poller()
    poller.register(monitor, zmq.POLLIN)
    poller.register(dealer, zmq.POLLOUT)
    said: float | None = None
    while (left := deadline - time.monotonic()) > 0:
        ready = dict(poller.poll(int(left * 1000) + 1))
        if monitor in ready:
            event = parse_monitor_message(monitor.recv_multipart())
            if (refusal := refusal_in(event["event"], event["value"], keyed)) is not None:
                return Answer(refusal=refusal)
        if dealer not in ready:
            continue
        if said is None:
            said = time.monotonic()
            dealer.send(m.encode(hello))
            poller.register(dealer, zmq.POLLIN)
            continue
        message = m.decode(dealer.recv())
        trip = time.monotonic() - said
        if isinstance(message, m.Refused):
            return Answer(refusal=message, round_trip=trip)
        if isinstance(message, m.Welcome):
            ahead = message.clock - (time.time() - trip / 2) if message.clock else None
            return Answer(message, None, trip, ahead)
    return Answer()


def _transfer(dealer: zmq.Socket[bytes], deadline: float) -> float | None:
    """Bytes per second of chunks of the embedding, a few asked for at a time; None if there is too little of it."""
    place = bytearray(m.CHUNK_BYTES)
    offset, received, asked, whole, started = 0, 0, 0, None, time.monotonic()
    while True:
        while asked < _WEIGHT_REQUESTS and (whole is None or offset < whole) and time.monotonic() < deadline:
            dealer.send(m.encode(m.GetWeights("embedding", offset)))
            offset, asked = offset + m.CHUNK_BYTES, asked + 1
            if whole is None:
                break  # how many chunks there are is in the first one
        if asked == 0:
            break
        message = _await(dealer, deadline + 2.0, place)
        if not isinstance(message, m.Weights):
            break
        whole, asked = message.nbytes, asked - 1
        received += min(m.CHUNK_BYTES, whole - message.offset)
    return received / (time.monotonic() - started) if received >= _LEAST_BYTES else None


def _await(dealer: zmq.Socket[bytes], deadline: float, place: bytearray | None = None) -> m.Message | None:
    """The next message but pongs, its payload put into `place`; None at the deadline."""
    while dealer.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        message = m.decode(dealer.recv())
        while dealer.rcvmore:
            if place is None:
                dealer.recv()
            else:
                dealer.recv_into(place)
        if not isinstance(message, m.Pong):
            return message
    return None
