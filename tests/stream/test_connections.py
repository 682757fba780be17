"""Connections that never bring a whole message are cut off before they cost memory or descriptors; those of drafters stay."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from feeder_process import Behaviour, FeederProcess, feeders, until
from stream_client import client_of, keys, take_all
from test_stream import ipc

from dflash_mp.bench import zmtp
from dflash_mp.bench.synthetic import RUN, synthetic_plan, synthetic_weights
from dflash_mp.stream.connections import Connections
from dflash_mp.stream.endpoints import widen
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.keys import DrafterKeys, keygen

PLAN = synthetic_plan()
CUT = "cut off a connection"
MIB = 2**20


@pytest.fixture(params=["ipc", "tcp"])
def feeder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FeederProcess]:
    endpoint = ipc(tmp_path) if request.param == "ipc" else "tcp://127.0.0.1:0"
    with feeders(FeederProcess(endpoint, PLAN, Behaviour(log=tmp_path / "log"))) as (feeder,):
        yield feeder


def said(log: Path) -> int:
    """How many connections the feeder says it cut off: it says so of the 1st, 2nd, 4th, …"""
    lines = [line for line in log.read_text().splitlines() if CUT in line]
    return 0 if not lines else int(lines[-1].partition("(number ")[2].rstrip(")") or 1)


def sent_until_cut_off(endpoint: str, part: bytes) -> int:
    """Bytes that a message without end got in; a test that takes 30 s for it fails."""
    sent, deadline = 0, time.monotonic() + 30
    with zmtp.dealer(endpoint) as attacker:
        while time.monotonic() < deadline:
            try:
                attacker.sendall(part)
            except OSError:
                return sent
            sent += len(part)
    raise AssertionError("it was not cut off")


def test_a_message_that_never_ends_is_cut_off_and_disturbs_nobody(feeder: FeederProcess, tmp_path: Path) -> None:
    with client_of([feeder.endpoint], PLAN) as client:
        client.connect()
        client.schedule(iter(keys(0, 40)))
        rows = take_all(client, keys(0, 40))
        next(rows)
        before = feeder.look()[2]
        assert sent_until_cut_off(feeder.endpoint, zmtp.frame(b"x", more=True) * 20_000) < 64 * MIB
        assert feeder.look()[2] - before < 2048 * MIB
        assert len(list(rows)) == 39
        assert client.stats.reasked == 0
    assert said(tmp_path / "log") == 1


def test_a_whole_message_of_very_many_frames_is_refused_and_stops_nobody(feeder: FeederProcess) -> None:
    with client_of([feeder.endpoint], PLAN) as client, zmtp.dealer(feeder.endpoint) as attacker:
        client.connect()
        client.schedule(iter(keys(0, 20)))
        attacker.sendall(zmtp.frame(b"x", more=True) * 30_000 + zmtp.frame(b"x"))
        assert len(list(take_all(client, keys(0, 20)))) == 20
        until(lambda: feeder.look()[0].malformed == 1)


def test_connections_that_say_nothing_are_cut_off_and_a_drafter_that_waits_is_not(
    feeder: FeederProcess, tmp_path: Path
) -> None:
    with client_of([feeder.endpoint], PLAN) as client:
        client.connect()
        half_open = [zmtp.connect(feeder.endpoint) for _ in range(20)]
        idle = [zmtp.dealer(feeder.endpoint) for _ in range(12)]
        until(lambda: said(tmp_path / "log") == 32, seconds=20)
        client.schedule(iter(keys(0, 20)))
        assert len(list(take_all(client, keys(0, 20)))) == 20
        assert client.stats.reasked == 0
        assert client._io.links[0].last_loss == ""
    for connection in [*half_open, *idle]:
        connection.close()


def test_a_drafter_with_keys_that_waits_is_not_cut_off(tmp_path: Path) -> None:
    keygen(tmp_path / "keys")
    behaviour = Behaviour(keys=tmp_path / "keys", silent_seconds=1.0, log=tmp_path / "log")
    with (
        feeders(FeederProcess("tcp://127.0.0.1:0", PLAN, behaviour)) as (feeder,),
        client_of([feeder.endpoint], PLAN, keys=DrafterKeys.load(tmp_path / "keys")) as client,
    ):
        client.connect()
        with zmtp.connect(feeder.endpoint):
            until(
                lambda: said(tmp_path / "log") == 1, seconds=20
            )  # so a drafter that waits would be cut off by now, too
        assert client._io.links[0].last_loss == ""


def test_a_drafters_ipc_connection_has_room_for_sender_and_receiver_at_once(tmp_path: Path) -> None:
    stop = threading.Event()
    most = int(Path("/proc/sys/net/core/wmem_max").read_text())
    with FeederService(ipc(tmp_path), PLAN, synthetic_weights(PLAN), run=RUN) as service:
        serving = threading.Thread(target=service.serve, args=(lambda key, buffer: None, stop))
        serving.start()
        with client_of([service.endpoint], PLAN) as client:
            client.connect()
            assert list(_send_rooms(service.endpoint.removeprefix("ipc://"))) == [2 * min(256 << 10, most)]
        stop.set()
        serving.join()


def test_room_is_made_for_unix_sockets_only(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as tcp, tempfile.TemporaryFile() as file:
        before = tcp.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        Connections(tcp=True, silent_seconds=60).accepted(tcp.fileno())
        for descriptor in (tcp.fileno(), file.fileno(), 1 << 20):
            widen(descriptor)
        assert tcp.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before  # the kernel goes on adapting it


def _send_rooms(path: str) -> Iterator[int]:
    """SO_SNDBUF of this process's connections that were accepted at `path`."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as same:
            if same.getsockname() == path and not same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield same.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener


def test_what_a_new_connection_sends_before_the_first_look_counts(listener: socket.socket) -> None:
    connections = Connections(tcp=True, silent_seconds=60)
    with socket.create_connection(listener.getsockname()) as sender:
        accepted, _ = listener.accept()
        with accepted:
            connections.accepted(accepted.fileno())
            sender.settimeout(30)
            sent = 0
            while sent <= MIB:
                sent += sender.send(b"x" * 65536)
                accepted.recv(65536)
            time.sleep(0.03)  # looks are 0.02 s apart
            assert connections.look() == 1
        assert _hung_up(sender)


def test_a_new_connection_is_cut_off_at_a_glance_and_what_it_sent_is_thrown_away(listener: socket.socket) -> None:
    connections = Connections(tcp=True, silent_seconds=60)
    idle_seconds = connections.look_seconds
    with socket.create_connection(listener.getsockname()) as sender:
        accepted, _ = listener.accept()
        with accepted:
            connections.accepted(accepted.fileno())
            assert connections.look_seconds < idle_seconds / 4
            connections._looked = time.monotonic() + 3600  # glances only
            sender.settimeout(0.2)
            sent = 0
            with contextlib.suppress(TimeoutError):
                while sent <= MIB:
                    sent += sender.send(b"x" * 65536)
                    accepted.recv(16384)
            until(lambda: connections.look() == 1, seconds=0.5)
            assert accepted.recv(1) == b""
        assert connections.look_seconds == idle_seconds
        assert _hung_up(sender)


def test_glances_leave_a_connection_alone_that_brings_whole_messages(listener: socket.socket) -> None:
    connections = Connections(tcp=True, silent_seconds=60)
    with socket.create_connection(listener.getsockname()) as sender:
        accepted, _ = listener.accept()
        with accepted:
            connections.accepted(accepted.fileno())
            for _ in range(100):
                sender.sendall(b"x" * 65536)
                received = 0
                while received < 65536:
                    received += len(accepted.recv(65536))
                connections.heard(accepted.fileno())
                time.sleep(0.002)
                assert connections.look() == 0
        assert len(connections) == 1


def test_of_too_many_those_that_never_spoke_go_first(listener: socket.socket) -> None:
    connections = Connections(tcp=True, silent_seconds=60.0, most=3)
    near = [socket.create_connection(listener.getsockname()) for _ in range(5)]
    far = [listener.accept()[0] for _ in range(5)]
    for each in far:
        connections.accepted(each.fileno())
    connections.heard(far[0].fileno())
    connections.heard(far[2].fileno())
    until(lambda: connections.look() == 2)
    assert len(connections) == 3
    open_ = [index for index, each in enumerate(near) if not _hung_up(each)]
    assert open_ == [0, 2, 4]


def test_a_descriptor_that_means_something_else_by_now_is_left_alone(listener: socket.socket) -> None:
    connections = Connections(tcp=True, silent_seconds=1.0)
    first = socket.create_connection(listener.getsockname())
    accepted = listener.accept()[0]
    number = accepted.fileno()
    connections.accepted(number)
    second = socket.create_connection(listener.getsockname())
    other = listener.accept()[0]
    os.dup2(other.fileno(), number)
    until(lambda: not (connections.look() or len(connections)))
    assert connections.cut == 0
    assert not _hung_up(second)
    for each in (first, second, accepted, other):
        each.close()


def _hung_up(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
