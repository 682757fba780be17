"""The shared-memory lane between real processes: chosen where it works, and as faithful as the other one whatever dies."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import stream_client
import test_stream
import test_stream_faults as faults
import torch
from drafter_process import start_drafter
from feeder_process import Behaviour, FeederProcess, feeders, until
from stream_client import PATIENT, client_of, keys, take_all
from test_shared_memory import memfds
from test_stream import ipc

from dflash_mp.bench.chaos_fleet import shared_memory_left
from dflash_mp.bench.synthetic import RUN, synthetic_expectations, synthetic_plan, synthetic_row, synthetic_weights
from dflash_mp.data.row import RowKey
from dflash_mp.errors import StreamError
from dflash_mp.stream import feeder_io
from dflash_mp.stream import ring_messages as rm
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.fd_passing import lane_address, listen
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.keys import DrafterKeys, keygen
from dflash_mp.stream.lane_offers import LaneOffers
from dflash_mp.stream.layout import RowLayout

PLAN = synthetic_plan()
ROW = RowLayout.of(PLAN).nbytes
pytestmark = pytest.mark.usefixtures("shared_memory")


def lanes(feeder: FeederProcess) -> list[str]:
    return [drafter.lane for drafter in feeder.look()[0].drafters]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if ", lane " in record.getMessage()]


# -- which lane -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["ipc", "tcp", "tcp with keys"])
def test_on_one_machine_memory_is_shared_without_being_told_to(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    behaviour, drafter = Behaviour(silent_seconds=PATIENT), None
    if way == "tcp with keys":
        keygen(tmp_path / "keys")
        behaviour, drafter = replace(behaviour, keys=tmp_path / "keys"), DrafterKeys.load(tmp_path / "keys")
    endpoint = ipc(tmp_path) if way == "ipc" else "tcp://127.0.0.1:0"
    with (
        feeders(FeederProcess(endpoint, behaviour=behaviour)) as (feeder,),
        client_of([feeder.endpoint], keys=drafter, silent_seconds=PATIENT) as client,
    ):
        client.connect()
        client.fetch_weights()
        client.schedule(iter(keys(0, 40)))
        assert len(list(take_all(client, keys(0, 40)))) == 40
        assert client.stats.reasked == 0
        assert lanes(feeder) == ["shared_memory"]
        assert feeder.look()[1] == 4 * ROW  # the ring, and no slot besides
        assert lines(caplog) == [
            f"rank 0: connected to {feeder.endpoint}, lane shared_memory (4 rows of {ROW / 2**20:.2f} MiB)"
        ]


REFUSALS: dict[str, tuple[Behaviour, str]] = {
    "too little memory": (
        Behaviour(memory_mib=2.5 * ROW / 2**20),
        "too little memory: feed.memory_mib leaves this drafter 1 rows, it needs 2; set feed.memory_mib to at least 0",
    ),
    "socket not reachable": (Behaviour(), "can't be reached: No such file or directory"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_otherwise_rows_come_in_band_and_one_line_says_why(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    behaviour, says = REFUSALS[kind]
    with (
        feeders(FeederProcess(ipc(tmp_path), behaviour=behaviour)) as (feeder,),
        client_of([feeder.endpoint], world=2 if kind == "too little memory" else 1) as client,
    ):
        if kind == "socket not reachable":
            (tmp_path / "feeder.sock.lane").unlink()
        client.connect()
        client.schedule(iter(keys(0, 9)))
        assert len(list(take_all(client, keys(0, 9)))) == 9
        assert lanes(feeder) == ["inband"]
    (line,) = lines(caplog)
    assert line.startswith(f"rank 0: connected to {feeder.endpoint}, lane inband (")
    assert says in line


def test_who_finds_a_feeder_finds_its_lane_and_one_that_is_refused_leaves_anothers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, lane = tmp_path / "feeder.sock", tmp_path / "feeder.sock.lane"
    there: list[tuple[bool, bool]] = []

    def offers(*all_: object) -> LaneOffers:
        made = LaneOffers(*all_)  # type: ignore[arg-type]
        there.append((lane.exists(), address.exists()))
        return made

    monkeypatch.setattr(feeder_io, "LaneOffers", offers)
    with FeederService(ipc(tmp_path), PLAN, synthetic_weights(PLAN), run=RUN):
        assert there == [(True, False)]
        inode = lane.stat().st_ino
        with pytest.raises(StreamError, match="a live feeder has it"):
            FeederService(ipc(tmp_path), PLAN, synthetic_weights(PLAN), run=RUN)
        assert lane.stat().st_ino == inode
    assert os.listdir(tmp_path) == []


def test_a_feeder_that_cannot_listen_leaves_no_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(router: object, endpoint: str) -> str:
        assert (tmp_path / "feeder.sock.lane").exists()
        raise StreamError("cannot listen", "")

    monkeypatch.setattr(feeder_io, "bind", fail)
    with pytest.raises(StreamError, match="cannot listen"):
        FeederService(ipc(tmp_path), PLAN, synthetic_weights(PLAN), run=RUN)
    assert os.listdir(tmp_path) == []


def test_both_lanes_bring_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = synthetic_plan(row_tokens=512, hidden_size=1024)
    brought: list[list[torch.Tensor]] = []
    with feeders(FeederProcess(ipc(tmp_path), plan)) as (feeder,):
        for shared in (True, False):
            monkeypatch.setattr(stream_client, "SHARED_MEMORY", shared)
            with client_of([feeder.endpoint], plan) as client:
                client.connect()
                client.schedule(iter(keys(0, 6)))
                rows = []
                for key in keys(0, 6):
                    with client.take(key) as row:
                        assert row.tensors.features.data_ptr() == row.buffer.data_ptr()  # views, not copies
                        rows.append(row.buffer.clone())
                brought.append(rows)
    assert all(torch.equal(a, b) for a, b in zip(*brought, strict=True))


def test_checksums_are_taken_on_this_lane_if_asked_for(tmp_path: Path) -> None:
    for checksums, found in ((True, 2), (False, 0)):
        behaviour = Behaviour(corrupts=2 if checksums else 0)
        with feeders(FeederProcess(ipc(tmp_path), PLAN, behaviour)) as (feeder,):
            client = RowClient([feeder.endpoint], synthetic_expectations(PLAN), checksums=checksums)
            with client:
                client.connect()
                client.schedule(iter(keys(0, 20)))
                assert len(list(take_all(client, keys(0, 20)))) == 20
                assert client.stats.checksum_errors == found
                assert lanes(feeder) == ["shared_memory"]


# -- the ring in use ------------------------------------------------------------------------------------------------------------------


def test_rows_that_are_held_stay_as_they_are_while_many_others_flow_through_the_rest_of_the_ring(
    tmp_path: Path,
) -> None:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,):
        client = RowClient(
            [feeder.endpoint],
            synthetic_expectations(PLAN),
            held=3,
            stream=stream_client.StreamConfig(window_mib=4 * ROW / 2**20),
        )
        with client:
            client.connect()
            client.schedule(iter(keys(0, 300)))
            held = [client.take(key) for key in keys(0, 2)]
            assert len(list(take_all(client, keys(2, 300)))) == 298
            assert feeder.look()[1] == 4 * ROW
            for row in held:
                right = torch.empty_like(row.buffer)
                synthetic_row(row.key, right)
                assert torch.equal(row.buffer, right)


def test_a_drafter_that_takes_nothing_makes_its_feeder_wait_and_nothing_grow(tmp_path: Path) -> None:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,), client_of([feeder.endpoint], rows=3) as client:
        client.connect()
        client.schedule(iter(keys(0, 30)))
        until(lambda: feeder.look()[0].rows == 3)
        status = feeder.look()[0]
        assert (status.rows, feeder.look()[1]) == (3, 3 * ROW)
        assert len(list(take_all(client, keys(0, 30)))) == 30


def test_a_row_that_no_ring_has_room_for_gets_the_place_of_a_later_one(tmp_path: Path) -> None:
    """The feeder of the next row dies while the other's ring is full of later rows, and nobody will release any of them."""
    slow = Behaviour(stuck_at=0)
    with (
        feeders(FeederProcess(ipc(tmp_path, "a"), behaviour=slow), FeederProcess(ipc(tmp_path, "b"))) as (
            first,
            second,
        ),
        client_of([first.endpoint, second.endpoint], rows=4) as client,
    ):
        client.connect()
        until(lambda: len(client._io.live()) == 2)
        client.schedule(iter([RowKey("train", 0)]))
        until(lambda: first.look()[0].drafters[0].outstanding == 1 or second.look()[0].rows == 1)
        client.schedule(iter(keys(1, 20)))
        until(lambda: second.look()[0].rows >= 2)
        first.kill()
        assert len(list(take_all(client, keys(0, 20)))) == 20


# -- what dies ------------------------------------------------------------------------------------------------------------------------


def test_a_killed_feeders_rows_stay_readable_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    shm, before = set(os.listdir("/dev/shm")), memfds()
    with feeders(FeederProcess(ipc(tmp_path))) as started, client_of([ipc(tmp_path)]) as client:
        client.connect()
        client.schedule(iter(keys(0, 30)))
        held = client.take(RowKey("train", 0))
        started[0].kill()
        assert set(os.listdir(tmp_path)) == {"feeder.sock", "feeder.sock.lane"}
        until(lambda: client._io.links[0].state != "live")
        started.append(FeederProcess(ipc(tmp_path)))
        assert len(list(take_all(client, keys(1, 20)))) == 19
        assert lanes(started[1]) == ["shared_memory"]
        right = torch.empty_like(held.buffer)
        synthetic_row(held.key, right)
        assert torch.equal(held.buffer, right)
        held.release()
        assert len(list(take_all(client, keys(20, 30)))) == 10
        assert started[1].stop() == 0
        assert os.listdir(tmp_path) == []
    del held
    client._io.window = None
    until(lambda: not memfds() - before)
    until(lambda: shared_memory_left(shm) == [])


def test_a_killed_drafters_memory_is_free_in_seconds(tmp_path: Path) -> None:
    def open_rings(pid: int) -> int:
        links = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
        found = 0
        for link in links:
            with contextlib.suppress(FileNotFoundError):
                found += "dflash-mp-rows" in os.readlink(link)
        return found + Path(f"/proc/{pid}/maps").read_text(encoding="ascii").count("dflash-mp-rows")

    with feeders(FeederProcess(ipc(tmp_path), behaviour=Behaviour(silent_seconds=2.0))) as (feeder,):
        dying = start_drafter(feeder.endpoint, shared_memory=True)
        until(lambda: lanes(feeder) == ["shared_memory"])
        assert feeder.look()[1] == 4 * ROW
        assert open_rings(feeder.pid) > 0
        dying.kill()
        dying.join()
        until(lambda: feeder.look()[1] == 0 and open_rings(feeder.pid) == 0)
        with client_of([feeder.endpoint]) as client:
            client.connect()
            client.schedule(iter(keys(0, 9)))
            assert len(list(take_all(client, keys(0, 9)))) == 9


@pytest.mark.parametrize(
    "scenario",
    [
        faults.test_a_killed_feeders_rows_come_from_the_other,
        faults.test_a_feeder_that_starts_again_at_its_address_is_used_again,
        faults.test_a_feeder_that_answers_nothing_is_taken_for_dead,
        faults.test_a_passing_error_is_tried_elsewhere_but_not_for_ever,
        faults.test_a_drafter_that_starts_again_takes_its_own_place,
        test_stream.test_two_drafters_get_their_rows_from_two_feeders_over_ipc_and_tcp,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_what_holds_for_the_other_lane_holds_here(scenario: Callable[[Path], None], tmp_path: Path) -> None:
    scenario(tmp_path)


def test_a_feeder_that_joins_later_gets_its_share_of_the_window(tmp_path: Path) -> None:
    file = tmp_path / "feeders"
    with feeders(FeederProcess(ipc(tmp_path, "a")), FeederProcess(ipc(tmp_path, "b"))) as (first, second):
        file.write_text(f"{first.endpoint}\n", encoding="utf-8")
        with client_of([], rows=8, feeders_file=file) as client:
            client.connect()
            file.write_text(f"{first.endpoint}\n{second.endpoint}\n", encoding="utf-8")
            until(lambda: list(client.lanes.values()) == ["shared_memory"] * 2)
            assert [feeder.look()[1] // ROW for feeder in (first, second)] == [8, 4]


def test_a_ring_that_takes_too_long_to_make_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before the feeder cuts off a connection that says nothing; else they would try for ever."""
    caplog.set_level(logging.INFO)

    def progress_without_end() -> None:
        while not over.is_set():
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                made.append(listener.accept()[0])
            for connection in made:
                with contextlib.suppress(OSError):
                    connection.send(rm.encode(rm.RingProgress(1)), socket.MSG_NOSIGNAL)
            over.wait(0.05)

    over, made = threading.Event(), list[socket.socket]()
    with feeders(FeederProcess(ipc(tmp_path), behaviour=Behaviour(silent_seconds=2.0))) as (feeder,):
        listener = listen(lane_address(feeder.endpoint))
        slow = threading.Thread(target=progress_without_end)
        slow.start()
        try:
            with client_of([feeder.endpoint], silent_seconds=2.0) as client:
                client.connect()
                client.schedule(iter(keys(0, 9)))
                assert len(list(take_all(client, keys(0, 9)))) == 9
        finally:
            over.set()
            slow.join()
            for each in [listener, *made]:
                each.close()
    assert "lane inband (its memory was not there after 3 s)" in lines(caplog)[0]
