"""Connections that never bring a whole message are cut off before they cost memory or descriptors; those of drafters stay."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from feeder_process import Behaviour, FeederProcess, feeders, until
from stream_client import PATIENT, client_of, keys, take_all
from test_stream import ipc

from dflash_mp.bench import zmtp
from dflash_mp.bench.synthetic import RUN, synthetic_plan, synthetic_weights
from dflash_mp.stream import connections as connections_module
from dflash_mp.stream.connections import Connections
from dflash_mp.stream.endpoints import widen
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.keys import DrafterKeys, keygen

PLAN = synthetic_plan()
CUT = "cut off a connection"
MIB = 2**20
SILENT = 4.0  # seconds
KIB64 = 65536


@pytest.fixture(params=["ipc", "tcp"])
def feeder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FeederProcess]:
    endpoint = ipc(tmp_path) if request.param == "ipc" else "tcp://127.0.0.1:0"
    behaviour = Behaviour(log=tmp_path / "log", silent_seconds=SILENT)
    with feeders(FeederProcess(endpoint, PLAN, behaviour)) as (feeder,):
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
    with client_of([feeder.endpoint], PLAN, silent_seconds=PATIENT) as client:
        client.connect()
        client.schedule(iter(keys(0, 40)))
        rows = take_all(client, keys(0, 40))
        next(rows)
        before = feeder.look()[2]
        most_sent, most_growth = (16, 64) if feeder.endpoint.startswith("tcp") else (64, 2048)
        assert sent_until_cut_off(feeder.endpoint, zmtp.frame(b"x", more=True) * 20_000) < most_sent * MIB
        assert feeder.look()[2] - before < most_growth * MIB
        assert len(list(rows)) == 39
        assert client.stats.reasked == 0
    until(lambda: said(tmp_path / "log") == 1)


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
    with client_of([feeder.endpoint], PLAN, silent_seconds=SILENT) as client:
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
    behaviour = Behaviour(keys=tmp_path / "keys", silent_seconds=SILENT, log=tmp_path / "log")
    with (
        feeders(FeederProcess("tcp://127.0.0.1:0", PLAN, behaviour)) as (feeder,),
        client_of([feeder.endpoint], PLAN, keys=DrafterKeys.load(tmp_path / "keys"), silent_seconds=SILENT) as client,
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


Pair = tuple[socket.socket, socket.socket]


@contextlib.contextmanager
def accepted_by(connections: Connections, listener: socket.socket, count: int) -> Iterator[list[Pair]]:
    """So many connections, as what the sender has and what was accepted."""
    with contextlib.ExitStack() as opened:
        pairs = []
        for _ in range(count):
            near = opened.enter_context(socket.create_connection(listener.getsockname()))
            far = opened.enter_context(listener.accept()[0])
            connections.accepted(far.fileno())
            pairs.append((near, far))
        yield pairs


def bring(pair: Pair, nbytes: int) -> None:
    """Send, and read as libzmq would."""
    pair[0].sendall(bytes(nbytes))
    while nbytes:
        nbytes -= len(pair[1].recv(nbytes))


def looks(connections: Connections, seconds: float = 0.15) -> int:
    """How many were cut off within a while, by six looks at least, the last one after it. If this process is stopped, the while begins anew,
    as everyone's silence does.
    """
    begun, last, cut = time.monotonic(), connections._looked, connections.cut

    def enough(looks: int) -> bool:
        nonlocal begun, last
        if connections._looked - last > connections._silent_seconds / 2:
            begun = connections._looked
        last = connections._looked
        return looks >= 6 and last >= begun + seconds

    looks_until(connections, enough)
    return connections.cut - cut


def looks_until(connections: Connections, enough: Callable[[int], bool]) -> int:
    """How many there were."""
    looks = 0
    while not enough(looks):
        before = connections._looked
        connections.look()
        looks += connections._looked > before
        assert looks < 1000
        time.sleep(0.001)
    return looks


def test_what_a_new_connection_sends_before_the_first_look_counts(listener: socket.socket) -> None:
    connections = Connections(tcp=True, silent_seconds=60)
    with accepted_by(connections, listener, 1) as (pair,):
        bring(pair, 2 * KIB64 + 1)
        time.sleep(0.03)
        assert connections.look() == 1
        assert _hung_up(pair[0])


def test_what_came_and_was_read_before_a_connection_was_told_of_counts(listener: socket.socket) -> None:
    connections = Connections(tcp=True, silent_seconds=60)
    with socket.create_connection(listener.getsockname()) as near, listener.accept()[0] as far:
        bring((near, far), 2 * KIB64 + 1)
        connections.accepted(far.fileno())
        assert looks(connections) == 1


@pytest.mark.parametrize("spoke", [False, True])
def test_one_that_sends_without_end_is_cut_off_within_milliseconds_and_what_it_sent_is_thrown_away(
    listener: socket.socket, spoke: bool
) -> None:
    connections = Connections(tcp=True, silent_seconds=60)
    idle_seconds = connections.look_seconds
    with accepted_by(connections, listener, 1) as (pair,):
        assert connections.look_seconds < idle_seconds / 4
        if spoke:
            connections.heard(pair[1].fileno())
            until(lambda: connections.look_seconds == idle_seconds or bool(connections.look()))
            bring(pair, KIB64 + 1)
            assert looks_until(connections, lambda _: connections.look_seconds < idle_seconds / 4) == 1
        pair[0].settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            for _ in range(16):
                pair[0].sendall(bytes(KIB64))
                pair[1].recv(16384)
        assert looks_until(connections, lambda _: connections.cut == 1) == 1
        assert pair[1].recv(1) == b""
        assert _hung_up(pair[0])
        looks(connections)
        assert connections.look_seconds == idle_seconds


def test_one_that_sends_without_end_is_found_among_many_that_bring_messages_all_the_time(
    listener: socket.socket,
) -> None:
    connections = Connections(tcp=True, silent_seconds=60)
    with accepted_by(connections, listener, 100) as (endless, *others):
        looks(connections)
        bring(endless, 2 * KIB64 + 1)
        for _ in range(100):
            for pair in others:
                bring(pair, 10)
                connections.heard(pair[1].fileno())
            connections.look()
        assert connections.cut == 1
        assert _hung_up(endless[0])


def test_a_look_asks_about_those_to_which_something_came_and_about_few_others(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = Connections(tcp=True, silent_seconds=60)
    with accepted_by(connections, listener, 50) as (one, *_):
        looks(connections)
        asked: list[int] = []
        received = connections_module._received

        def ask(number: int) -> int | None:
            asked.append(number)
            return received(number)

        monkeypatch.setattr(connections_module, "_received", ask)
        looks(connections)
        assert len(asked) < 100, "a few in turn: all 50 each time would be several hundred"
        asked.clear()
        bring(one, 10)
        time.sleep(0.03)
        connections.look()
        assert one[1].fileno() in asked
        assert len(asked) < 20


@pytest.mark.parametrize("spoke", [False, True])
def test_of_those_that_park_unfinished_messages_the_largest_go(listener: socket.socket, spoke: bool) -> None:
    connections = Connections(tcp=True, silent_seconds=60)
    with accepted_by(connections, listener, 40) as pairs:
        looks(connections)
        for index, pair in enumerate(pairs):
            bring(pair, 1000 if index < 5 else 2 * KIB64 - 1 - index)
            if spoke:  # before what came then
                connections.heard(pair[1].fileno())
        looks(connections)
        assert connections.cut == 20, "35 parked 4.3 MiB; 15 of them may park 2 MiB"
        assert not any(_hung_up(near) for near, _ in pairs[:5])
        assert connections._held == sum(
            each.held for each in [*connections._new.values(), *connections._spoke.values()]
        )


def test_what_was_parked_counts_no_longer_when_its_message_has_come_or_its_connection_has_gone(
    listener: socket.socket,
) -> None:
    connections = Connections(tcp=True, silent_seconds=60)
    with accepted_by(connections, listener, 30) as pairs:
        for pair in pairs:
            bring(pair, 100_000)
        looks(connections)
        assert connections._held == 3_000_000
        for _, far in pairs[:20]:
            connections.heard(far.fileno())
        assert connections._held == 1_000_000
        for near, far in pairs[20:]:
            near.sendall(b"x")
            connections._due[far.fileno()] = None
            far.close()
        assert looks(connections) == 0
        assert connections._held == 0
        assert len(connections) == 20


def test_looks_leave_a_connection_alone_that_brings_whole_messages(listener: socket.socket) -> None:
    connections = Connections(tcp=True, silent_seconds=60)
    with accepted_by(connections, listener, 1) as (pair,):
        for _ in range(100):
            bring(pair, KIB64)
            connections.heard(pair[1].fileno())
            time.sleep(0.002)
            assert connections.look() == 0
        assert len(connections) == 1


def test_a_descriptor_that_is_another_socket_when_the_feeder_hears_of_it_is_left_alone(
    listener: socket.socket, tmp_path: Path
) -> None:
    port, path = listener.getsockname()[1], tmp_path / "s"
    unix = socket.socket(socket.AF_UNIX)
    elsewhere = socket.create_server(("127.0.0.1", 0))
    innocent, far = socket.socketpair()
    client = socket.create_connection(elsewhere.getsockname())
    unix.bind(str(path))
    unix.listen()
    mine = socket.socket(socket.AF_UNIX)
    mine.connect(str(path))
    accepted = unix.accept()[0]
    with (
        unix,
        elsewhere,
        innocent,
        far,
        client,
        mine,
        accepted,
        accepted_by(Connections(tcp=True, silent_seconds=60), listener, 1) as (pair,),
    ):
        for endpoint, its in ((f"tcp://127.0.0.1:{port}", pair[1]), (f"ipc://{path}", accepted)):
            connections = Connections(tcp=endpoint.startswith("tcp"), silent_seconds=0.3)
            connections.listens(endpoint)
            for each in (innocent, client, pair[0], mine, far):
                connections.accepted(each.fileno())
            connections.accepted(1 << 20)
            assert len(connections) == 0
            connections.accepted(its.fileno())
            assert len(connections) == 1
            assert looks(connections, 1.0) == 1
        assert not _hung_up(far)


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
