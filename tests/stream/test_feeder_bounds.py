"""Whatever one peer does, the others are served, and nothing grows."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq
from drafter_process import start_drafter
from feeder_process import Behaviour, FeederProcess, feeders, until
from stream_client import PATIENT, client_of, keys, take_all
from test_stream import ipc

from dflash_mp.bench.synthetic import RUN, synthetic_expectations, synthetic_plan, synthetic_weights
from dflash_mp.data.row import RowKey
from dflash_mp.errors import StreamError
from dflash_mp.stream import messages as m
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.layout import RowLayout

PLAN = synthetic_plan(row_tokens=512, hidden_size=1024)  # 2.1 MB
ROW_MIB = RowLayout.of(PLAN).nbytes / 2**20


class RawPeer:
    """A peer that can send what it likes."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(endpoint)

    def send(self, *frames: bytes | m.Message) -> None:
        self.socket.send_multipart([f if isinstance(f, bytes) else m.encode(f) for f in frames])

    def receive(self) -> m.Message:
        assert self.socket.poll(5000), "no answer"
        return m.decode(self.socket.recv_multipart()[0])

    def hello(self, peer: str = "raw") -> None:
        self.send(m.Hello(m.VERSION, peer, "raw", 0, 1, synthetic_expectations(PLAN), None, ("inband",)))
        assert isinstance(self.receive(), m.Welcome)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def feeder(tmp_path: Path) -> Iterator[FeederProcess]:
    behaviour = Behaviour(memory_mib=8 * ROW_MIB, silent_seconds=PATIENT)  # some peers say nothing for a while
    with feeders(FeederProcess(ipc(tmp_path), PLAN, behaviour)) as (feeder,):
        yield feeder


@pytest.fixture
def raw(feeder: FeederProcess) -> Iterator[RawPeer]:
    peer = RawPeer(feeder.endpoint)
    yield peer
    peer.close()


def test_a_drafter_that_stops_reading_stops_nobody_and_grows_nothing(feeder: FeederProcess) -> None:
    with client_of([feeder.endpoint], PLAN, rank=0, world=2) as client:
        client.connect()
        client.schedule(iter(keys(0, 60)))
        taken = take_all(client, keys(0, 60))
        next(taken)
        stopped = start_drafter(feeder.endpoint, PLAN)
        os.kill(stopped.pid or 0, signal.SIGSTOP)
        for _ in range(9):
            next(taken)
        resident_before = feeder.look()[2]
        for _ in range(50):
            next(taken)
        _, slots, resident = feeder.look()
        stopped.kill()
    assert slots <= 4 * ROW_MIB * 2**20
    assert resident - resident_before < 2 * ROW_MIB * 2**20


def test_a_peer_that_pings_but_never_reads_stops_nobody_and_grows_nothing(feeder: FeederProcess, raw: RawPeer) -> None:
    raw.hello()
    raw.send(m.Get(tuple(m.RowRequest(n, RowKey("train", n)) for n in range(3))))
    raw.send(m.GetWeights("embedding", 0))
    done = threading.Event()

    def ping() -> None:
        while not done.is_set():
            raw.socket.send(m.encode(m.Ping(1, 0)))
            time.sleep(0.001)

    pinging = threading.Thread(target=ping)
    pinging.start()
    try:
        with client_of([feeder.endpoint], PLAN) as client:
            client.connect()
            client.schedule(iter(keys(0, 60)))
            taken = take_all(client, keys(0, 60))
            for _ in range(10):
                next(taken)
            resident_before = feeder.look()[2]
            assert len(list(taken)) == 50
            status, slots, resident = feeder.look()
            assert {drafter.name for drafter in status.drafters} == {"raw", "rank 0"}
            assert slots <= 5 * ROW_MIB * 2**20  # it was alone when it came: three are its, and two the other's
            assert resident - resident_before < 2 * ROW_MIB * 2**20
    finally:
        done.set()
        pinging.join()


def test_a_feeder_full_of_drafters_says_so(feeder: FeederProcess) -> None:
    peers = [RawPeer(feeder.endpoint) for _ in range(5)]
    for number, peer in enumerate(peers[:4]):
        peer.hello(f"raw {number}")
    peers[4].send(m.Hello(m.VERSION, "one more", "x", 0, 1, synthetic_expectations(PLAN), None, ("inband",)))
    refused = peers[4].receive()
    assert isinstance(refused, m.Refused)
    assert (refused.code, "memory for 4 drafters" in refused.reason) == ("full", True)
    assert f"feed.memory_mib of at least {10 * ROW_MIB:.0f}" in refused.remedy
    for peer in peers:
        peer.close()


def test_a_drafter_waits_for_a_feeder_that_is_full(feeder: FeederProcess) -> None:
    peers = [RawPeer(feeder.endpoint) for _ in range(4)]
    for number, peer in enumerate(peers):
        peer.hello(f"raw {number}")
    with client_of([feeder.endpoint], PLAN, connect_seconds=60) as client:
        leaving = threading.Thread(
            target=lambda: (until(lambda: client._io.errors["feeder_refused"] > 0), peers[0].send(m.Bye("done", "")))
        )
        leaving.start()
        client.connect()
        leaving.join()
    for peer in peers:
        peer.close()


GET = m.Get((m.RowRequest(1, RowKey("train", 1)),))
MALFORMED: dict[str, tuple[list[bytes | m.Message], str]] = {
    "random bytes": ([os.urandom(40)], ""),
    "an empty message": ([b""], "not msgpack"),
    "three frames": ([GET, b"x", b"y"], "a message of"),
    "a thousand frames": ([GET] * 1000, "a message of"),
    "an unknown type": ([msgpack.packb({"type": "EVAL", "code": "1"})], "unknown message type 'EVAL'"),
    "a feeder's message": ([m.RowError(1, RowKey("train", 1), "", True)], "RowError is not for a feeder"),
    "a request number twice": ([m.Get((*GET.requests, *GET.requests))], "request number 1 twice"),
    "too many rows": ([m.Get(tuple(m.RowRequest(n, RowKey("train", n)) for n in range(9)))], "more than 3 rows"),
    "a slot not held": ([m.Release(1, 0)], "which it does not hold"),
    "weights out of range": ([m.GetWeights("head", 1 << 40)], "GET_WEIGHTS asks for byte"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_peer_that_breaks_the_protocol_is_told_and_dropped_and_disturbs_nobody(
    kind: str, feeder: FeederProcess, raw: RawPeer
) -> None:
    frames, says = MALFORMED[kind]
    with client_of([feeder.endpoint], PLAN) as client:
        client.connect()
        client.schedule(iter(keys(0, 12)))
        taken = take_all(client, keys(0, 12))
        next(taken)
        raw.hello()
        raw.send(*frames)
        refused = raw.receive()
        while isinstance(refused, m.Row):  # of what it could still ask for
            refused = raw.receive()
        assert isinstance(refused, m.Refused)
        assert refused.code == "malformed"
        assert says in refused.reason
        assert len(list(taken)) == 11
        status, _, _ = feeder.look()
        assert status.malformed == 1
        assert [drafter.name for drafter in status.drafters] == ["rank 0"]


def test_a_flood_of_garbage_slows_nobody_for_long(feeder: FeederProcess, raw: RawPeer) -> None:
    with client_of([feeder.endpoint], PLAN) as client:
        client.connect()
        for _ in range(3000):
            raw.send(os.urandom(60))
        client.schedule(iter(keys(0, 12)))
        assert len(list(take_all(client, keys(0, 12)))) == 12
        until(lambda: feeder.look()[0].malformed == 3000)


def test_a_frame_longer_than_a_message_is_never_read(feeder: FeederProcess, raw: RawPeer) -> None:
    raw.send(bytes(m.HEADER_BYTES + 1))
    with client_of([feeder.endpoint], PLAN) as client:
        client.connect()
        client.schedule(iter(keys(0, 4)))
        assert len(list(take_all(client, keys(0, 4)))) == 4
    assert feeder.look()[0].malformed == 0


def test_another_version_is_refused_by_name(raw: RawPeer) -> None:
    tree = msgpack.unpackb(
        m.encode(m.Hello(m.VERSION, "raw", "raw", 0, 1, synthetic_expectations(PLAN), None, ("inband",)))
    )
    raw.send(msgpack.packb({**tree, "version": 7, "compression": "zstd"}))
    refused = raw.receive()
    assert isinstance(refused, m.Refused)
    assert (refused.code, refused.reason) == ("version", "HELLO speaks protocol version 7, this side version 1")


def test_a_stranger_is_asked_to_introduce_itself(raw: RawPeer) -> None:
    raw.send(GET)
    refused = raw.receive()
    assert isinstance(refused, m.Refused)
    assert refused.code == "stranger"


def test_memory_too_small_for_a_row_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match=r"feed.memory_mib is 2, but one row has 2\.\d MiB"):
        FeederService(ipc(tmp_path), PLAN, synthetic_weights(PLAN), run=RUN, memory_mib=2)


def test_what_a_drafter_writes_into_the_feeders_log_is_one_bounded_line_and_not_without_end(tmp_path: Path) -> None:
    evil = "\x1b[2J\nERROR all is lost"
    log = tmp_path / "log"
    with feeders(FeederProcess(ipc(tmp_path), PLAN, Behaviour(log=log))) as (feeder,):
        peer = RawPeer(feeder.endpoint)
        for _ in range(100):
            peer.hello(evil)
            peer.send(m.Bye("done", evil))
            assert isinstance(peer.receive(), m.Bye)
        until(lambda: "come and go too often" in log.read_text(encoding="utf-8"))
        peer.close()
    lines = log.read_text(encoding="utf-8").splitlines()
    assert any(r"\x1b[2J\nERROR all is lost left (done)" in line for line in lines)
    assert not any("\x1b" in line or line.startswith("ERROR all") for line in lines)
    assert sum("all is lost" in line for line in lines) < 150
