"""The hosts that the other tests here use are apart, and the wire between them is as bad as it is told to be."""

from __future__ import annotations

import socket
import time

import pytest
from hosts import Host, network

_SILENT = 2.0  # seconds without progress where there can't be any


def _exchange(server: Host, client: Host, address: str, megabytes: float = 0.0, patience: float = 60.0) -> float:
    """Seconds from connecting to the answer, after `megabytes` to the server. Raises `OSError` after `patience` without progress."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with server.entered():
        listening = socket.socket(family)
        listening.bind((address, 0))
        listening.listen()
    with client.entered():
        calling = socket.socket(family)
    with listening, calling:
        listening.settimeout(patience)
        calling.settimeout(patience)
        started = time.monotonic()
        calling.connect((address, listening.getsockname()[1]))
        answering, _ = listening.accept()
        with answering:
            answering.settimeout(patience)
            left = data = bytes(int(megabytes * 2**20) or 1)
            calling.setblocking(False)
            while left:
                try:
                    left = left[calling.send(left[: 1 << 16]) :]
                except BlockingIOError:
                    data = data[len(answering.recv(1 << 20)) :]
            while data:
                data = data[len(answering.recv(1 << 20)) :]
            answering.send(b"x")
            calling.settimeout(patience)
            assert calling.recv(1) == b"x"
        return time.monotonic() - started


def test_hosts_have_addresses_of_their_own_and_reach_each_other() -> None:
    with network("a", "b", "c") as (_, a, b, c):
        for one, other in ((a, b), (b, c), (c, a)):
            _exchange(one, other, one.address)
            _exchange(one, other, one.address6)
        shown = a.run(["ip", "-br", "address"], capture_output=True, text=True).stdout
        assert a.address in shown
        assert b.address not in shown
        with b.entered(), socket.socket() as listening, a.entered(), socket.socket() as calling:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            with pytest.raises(ConnectionRefusedError):
                calling.connect(listening.getsockname())  # b's loopback is not a's


def test_the_wire_can_be_slow_and_lossy() -> None:
    with network("a", "b") as (wire, a, b):
        wire.shape(delay=0.05)
        assert _exchange(a, b, a.address) > 0.2  # there and back twice
        wire.shape(loss=0.05)
        assert _exchange(a, b, a.address, megabytes=1) > 0
        wire.shape(loss=1.0)
        with pytest.raises(TimeoutError):
            _exchange(a, b, a.address, patience=_SILENT)


def test_a_partition_is_silent_and_ends() -> None:
    with network("a", "b", "c") as (wire, a, b, c):
        wire.cut(a, b)
        with pytest.raises(TimeoutError):
            _exchange(a, b, a.address, patience=_SILENT)
        _exchange(a, c, a.address)
        wire.mend()
        _exchange(a, b, a.address)


def test_an_address_can_change() -> None:
    with network("a", "b") as (_, a, b):
        old = a.address
        a.move("10.77.0.9")
        _exchange(a, b, a.address)
        with b.entered(), socket.socket() as calling:
            calling.settimeout(_SILENT)
            with pytest.raises(OSError):
                calling.connect((old, 1))
