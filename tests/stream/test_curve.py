"""Over CURVE, listed drafters get their rows; everyone else is turned away within seconds, and both sides say why."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq
from feeder_process import Behaviour, FeederProcess, feeders, until
from stream_client import PATIENT, client_of, keys, take_all

from dflash_mp.bench.synthetic import RUN, synthetic_expectations, synthetic_plan, synthetic_weights
from dflash_mp.errors import StreamError
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.curve import Gatekeeper, refusal_behind, secure_drafter, secure_feeder
from dflash_mp.stream.endpoints import bind, check_available, check_endpoint
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.keys import DrafterKeys, FeederKeys, keygen

PLAN = synthetic_plan()
SECONDS = 5.0
UNKNOWN, PLAIN, PIN = (
    "refused a drafter with an unknown key",
    "refused a plain connection",
    "expects another feeder's key",
)


@pytest.fixture
def key_files(tmp_path: Path) -> Path:
    keygen(tmp_path / "keys")
    return tmp_path / "keys"


def feeder_with(key_files: Path | None, log: Path | None = None) -> FeederProcess:
    return FeederProcess("tcp://127.0.0.1:0", PLAN, Behaviour(keys=key_files, log=log, silent_seconds=PATIENT))


def refusal(endpoint: str, drafter: DrafterKeys | None) -> str:
    """What a drafter that is turned away reads, which must be soon."""
    start = time.monotonic()
    with client_of([endpoint], PLAN, keys=drafter, connect_seconds=30) as client, pytest.raises(StreamError) as caught:
        client.connect()
    assert time.monotonic() - start < SECONDS
    assert endpoint in str(caught.value)
    return str(caught.value)


def said(log: Path, words: str) -> None:
    until(lambda: words in log.read_text(), SECONDS)


def stranger(tmp_path: Path, key_files: Path) -> DrafterKeys:
    """A drafter with the right feeder's key and a pair of its own that nobody listed."""
    keygen(tmp_path / "stranger", ["drafter"])
    shutil.copy(key_files / "feeder.public", tmp_path / "stranger")
    return DrafterKeys.load(tmp_path / "stranger")


def misled(tmp_path: Path, key_files: Path) -> DrafterKeys:
    """A listed drafter that pins another feeder's key."""
    shutil.copytree(key_files, tmp_path / "misled")
    keygen(tmp_path / "other", ["feeder"])
    shutil.copy(tmp_path / "other/feeder.public", tmp_path / "misled")
    return DrafterKeys.load(tmp_path / "misled")


def test_a_listed_drafter_gets_the_right_rows_and_weights(key_files: Path) -> None:
    plan = synthetic_plan(row_tokens=1024, hidden_size=2304)  # rows of several chunks
    behaviour = Behaviour(keys=key_files, silent_seconds=PATIENT)
    with (
        feeders(FeederProcess("tcp://127.0.0.1:0", plan, behaviour)) as (feeder,),
        client_of([feeder.endpoint], plan, rows=3, keys=DrafterKeys.load(key_files), silent_seconds=PATIENT) as client,
    ):
        client.connect()
        assert client.fetch_weights().embedding.equal(synthetic_weights(plan).embedding)
        client.schedule(iter(keys(0, 6)))
        assert len(list(take_all(client, keys(0, 6)))) == 6
        assert client.stats.reasked == 0


def test_what_is_sent_cannot_be_read_on_the_way(key_files: Path) -> None:
    """A relay that writes down all bytes between drafter and feeder: the run's name is in a plain HELLO."""
    for drafter, feeder_keys in ((DrafterKeys.load(key_files), key_files), (None, None)):
        with feeders(feeder_with(feeder_keys)) as (feeder,), socket.create_server(("127.0.0.1", 0)) as server:
            seen: list[bytes] = []
            threading.Thread(target=_relay, args=(server, feeder.endpoint, seen), daemon=True).start()
            with client_of([f"tcp://127.0.0.1:{server.getsockname()[1]}"], PLAN, keys=drafter) as client:
                client.connect()
            assert (RUN.encode() in b"".join(seen)) == (drafter is None)


def _relay(server: socket.socket, endpoint: str, seen: list[bytes]) -> None:
    near, _ = server.accept()
    far = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(65536):
            seen.append(data)
            sink.sendall(data)
        sink.close()

    threading.Thread(target=pump, args=(far, near), daemon=True).start()
    pump(near, far)


def test_everyone_else_is_turned_away_with_the_reason_while_a_listed_drafter_goes_on(
    tmp_path: Path, key_files: Path
) -> None:
    log = tmp_path / "feeder.log"
    with (
        feeders(feeder_with(key_files, log)) as (feeder,),
        client_of([feeder.endpoint], PLAN, keys=DrafterKeys.load(key_files), silent_seconds=PATIENT) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 30)))
        rows = take_all(client, keys(0, 30))
        next(rows)
        error = refusal(feeder.endpoint, stranger(tmp_path, key_files))
        assert "the feeder refused this drafter's key" in error
        assert "copy drafter.public" in error
        said(log, f"{UNKNOWN}, from 127.0.0.1")
        error = refusal(feeder.endpoint, misled(tmp_path, key_files))
        assert "the feeder's key is not the pinned one" in error
        said(log, PIN)
        error = refusal(feeder.endpoint, None)
        assert "the feeder demands a key, and this drafter has none" in error
        said(log, PLAIN)
        assert len(list(rows)) == 29
        assert client.stats.reasked == 0
    texts = log.read_text()
    for file in tmp_path.glob("*/*.*"):
        assert file.read_text().splitlines()[1] not in texts + error


def test_the_list_of_drafters_is_that_of_the_moment(tmp_path: Path, key_files: Path) -> None:
    log = tmp_path / "feeder.log"
    late = stranger(tmp_path, key_files)
    listed = key_files / "late.public"
    with feeders(feeder_with(key_files, log)) as (feeder,):
        assert "the feeder refused this drafter's key" in refusal(feeder.endpoint, late)
        shutil.copy(tmp_path / "stranger/drafter.public", listed)
        time.sleep(1.1)  # it looks once a second
        with client_of([feeder.endpoint], PLAN, keys=late) as client:
            client.connect()
        said(log, "late listed in")
        listed.write_text("damaged")
        time.sleep(1.1)
        with client_of([feeder.endpoint], PLAN, keys=late) as client:
            client.connect()
        said(log, "late.public is no public key of dflash-mp keygen; the drafters listed before stay listed")
        listed.unlink()
        time.sleep(1.1)
        assert "the feeder refused this drafter's key" in refusal(feeder.endpoint, late)
        said(log, "late no longer listed in")


def test_a_drafter_with_keys_refuses_a_feeder_without(tmp_path: Path, key_files: Path) -> None:
    log = tmp_path / "feeder.log"
    with feeders(feeder_with(None, log)) as (feeder,):
        assert "the feeder has no keys, and this drafter demands them" in refusal(
            feeder.endpoint, DrafterKeys.load(key_files)
        )
        said(log, "that demands keys")


def test_strangers_without_end_are_counted_not_listed(tmp_path: Path, key_files: Path) -> None:
    log = tmp_path / "feeder.log"
    with feeders(feeder_with(key_files, log)) as (feeder,):
        port = int(feeder.endpoint.rpartition(":")[2])
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", port)) as one:
                one.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
                one.recv(10)
        said(log, f"{PLAIN}: it showed no key (number 64)")
        assert [int(n) for n in re.findall(r"number (\d+)", log.read_text())] == [2, 4, 8, 16, 32, 64]
        with client_of([feeder.endpoint], PLAN, keys=DrafterKeys.load(key_files)) as client:
            client.connect()


@pytest.mark.parametrize("answered", [True, False])
def test_without_an_answer_about_its_key_nobody_gets_in(key_files: Path, answered: bool) -> None:
    allowed = FeederKeys.load(key_files)
    with zmq.Context() as context, zmq.Context() as other:
        router = context.socket(zmq.ROUTER)
        gate = Gatekeeper(context, router, allowed, True, lambda count, text: None) if answered else None
        secure_feeder(router, allowed)
        endpoint = bind(router, "tcp://127.0.0.1:0")
        dealer = other.socket(zmq.DEALER)
        dealer.immediate = 1
        secure_drafter(dealer, DrafterKeys.load(key_files))
        dealer.connect(endpoint)
        deadline, connected = time.monotonic() + (SECONDS if answered else 1.0), 0
        while not connected and time.monotonic() < deadline:
            if gate is not None:
                gate.attend()
            connected = dealer.poll(10, zmq.POLLOUT)
        assert bool(connected) == answered
        if gate is not None:
            gate.close()
        for each in (context, other):
            each.destroy(linger=0)


def test_a_tunnel_with_no_feeder_behind_it_is_not_taken_for_a_wrong_key(key_files: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        threading.Thread(target=_hang_up_on_all, args=(server,), daemon=True).start()
        assert refusal_behind(endpoint, keyed=True) is None
        drafter = DrafterKeys.load(key_files)
        with client_of([endpoint], PLAN, keys=drafter, connect_seconds=6.0) as client, pytest.raises(StreamError) as e:
            client.connect()
        assert "no feeder after" in str(e.value)
        assert "before it said anything (is its key the pinned one?)" in str(e.value)


def _hang_up_on_all(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:  # the test is over
            return


def test_what_is_no_feeder_is_called_that(key_files: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert refusal_behind("tcp://127.0.0.1:1", keyed=True) is None
        accepted: list[socket.socket] = []

        def greet() -> None:
            accepted.append(server.accept()[0])
            accepted[0].sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x04\x05hello")

        threading.Thread(target=greet, daemon=True).start()
        assert "what answers there is no feeder" in refusal(endpoint, DrafterKeys.load(key_files))


def test_a_feeder_that_gets_another_key_is_lost_and_found_when_it_has_the_right_one(
    tmp_path: Path, key_files: Path
) -> None:
    drafter = DrafterKeys.load(key_files)
    shutil.copytree(key_files, tmp_path / "later")
    for name in ("feeder.public", "feeder.secret"):
        (tmp_path / "later" / name).unlink()
    keygen(tmp_path / "later", ["feeder"])
    with (
        feeders(feeder_with(key_files)) as (first,),
        client_of([first.endpoint], PLAN, keys=drafter, rows=2) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 8)))
        rows = take_all(client, keys(0, 8))
        next(rows)
        first.kill()
        with feeders(FeederProcess(first.endpoint, PLAN, Behaviour(keys=tmp_path / "later"))) as (wrong,):
            until(lambda: "is its key the pinned one?" in client._io.describe())
            wrong.kill()
        with feeders(FeederProcess(first.endpoint, PLAN, Behaviour(keys=key_files))):
            assert len(list(rows)) == 7


def test_keys_open_addresses_that_other_hosts_can_reach_and_nothing_else_does() -> None:
    with pytest.raises(StreamError, match="can be reached from other hosts") as caught:
        check_endpoint("tcp://0.0.0.0:5555", insecure_no_auth=False)
    assert "dflash-mp keygen" in caught.value.remedy
    check_endpoint("tcp://0.0.0.0:5555", insecure_no_auth=False, keyed=True)
    check_available("tcp://0.0.0.0:0", False, keyed=True)


def test_a_feeder_with_keys_serves_ipc_as_before(tmp_path: Path, key_files: Path) -> None:
    behaviour = Behaviour(keys=key_files)
    with (
        feeders(FeederProcess(f"ipc://{tmp_path}/feeder.sock", PLAN, behaviour)) as (feeder,),
        client_of([feeder.endpoint], PLAN, keys=DrafterKeys.load(key_files)) as client,
    ):
        client.connect()


def test_a_drafter_warns_of_unauthenticated_feeders_at_every_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        RowClient(["tcp://127.0.0.1:1"], synthetic_expectations(PLAN), insecure_no_auth=True).close()
    assert "feed.insecure_no_auth is set: whoever answers at tcp://127.0.0.1:1 is taken for a feeder" in caplog.text


def test_closing_leaves_no_thread_and_no_file_descriptor(key_files: Path) -> None:
    allowed = FeederKeys.load(key_files)

    def once() -> None:
        FeederService("tcp://127.0.0.1:0", PLAN, synthetic_weights(PLAN), run=RUN, keys=allowed).close()

    once()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):  # what other tests left may be closed meanwhile, but hardly ten times
        once()
    assert len(os.listdir("/proc/self/fd")) <= before[0]
    assert threading.active_count() <= before[1]
