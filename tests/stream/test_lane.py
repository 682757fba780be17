"""The shared-memory lane between real processes: chosen where it works, and as faithful as the other one whatever dies."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import stream_client
import test_stream
import test_stream_faults as faults
import torch
import zmq
from drafter_process import start_drafter
from feeder_process import Behaviour, FeederProcess, feeders, until
from stream_client import PATIENT, client_of, keys, take_all
from test_feeder_bounds import RawPeer
from test_shared_memory import ask, memfds
from test_stream import ipc

from dflash_mp.bench.chaos_fleet import shared_memory_left
from dflash_mp.bench.synthetic import RUN, synthetic_expectations, synthetic_plan, synthetic_row, synthetic_weights
from dflash_mp.data.row import RowKey
from dflash_mp.errors import StreamError
from dflash_mp.stream import feeder_io
from dflash_mp.stream import messages as m
from dflash_mp.stream import ring_messages as rm
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.fd_passing import lane_address, listen
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.keys import DrafterKeys, keygen
from dflash_mp.stream.lane_offers import LaneOffers
from dflash_mp.stream.lane_request import LaneRequest, lane_wishes
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.shared_memory import Ring

PLAN = synthetic_plan()
ROW = RowLayout.of(PLAN).nbytes


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_client, "SHARED_MEMORY", True)
    monkeypatch.setitem(stream_client.QUICK, "silent_seconds", 4.0)  # a ring is waited for half as long again


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
        until(lambda: feeder.look()[1] == 0 and open_rings(feeder.pid) == 0, seconds=20)
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


# -- hostile peers --------------------------------------------------------------------------------------------------------------------


class RawDrafter(RawPeer):
    """A drafter with a ring that can say what it likes."""

    def __init__(self, endpoint: str, rank: int) -> None:
        super().__init__(endpoint)
        wishes = lane_wishes(rank, 3, window_bytes=3 * ROW, least=2, pin=False, checksums=False)
        self.lane: LaneRequest = ask(Path(), wishes, endpoint)
        assert self.lane.ring is not None, self.lane.why
        lane = f"shared_memory/{self.lane.ring.token}"
        self.send(
            m.Hello(m.VERSION, f"rank {rank}", "raw", rank, 3, synthetic_expectations(PLAN), None, (lane, "inband"))
        )
        welcome = self.receive()
        assert isinstance(welcome, m.Welcome)
        assert welcome.lane == lane

    def ask_for(self, ordinal: int) -> m.Placed:
        self.send(m.Get((m.RowRequest(ordinal, RowKey("train", ordinal)),)))
        placed = self.receive()
        assert isinstance(placed, m.Placed)
        return placed


@pytest.fixture
def feeder(tmp_path: Path) -> Iterator[FeederProcess]:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,):
        yield feeder


@pytest.mark.parametrize("wrong", ["twice", "another's", "another slot", "before it was placed"])
def test_who_releases_what_it_does_not_hold_is_dropped_and_touches_nobodys_rows(
    wrong: str, feeder: FeederProcess
) -> None:
    victim, hostile = RawDrafter(feeder.endpoint, 1), RawDrafter(feeder.endpoint, 2)
    theirs, own = victim.ask_for(17), hostile.ask_for(5)
    releases: list[m.Message] = {
        "twice": [m.Release(own.request, own.slot)] * 2,
        "another's": [m.Release(theirs.request, theirs.slot)],
        "another slot": [m.Release(own.request, (own.slot + 1) % 3)],
        "before it was placed": [m.Get((m.RowRequest(9, RowKey("train", 9)),)), *[m.Release(9, n) for n in range(3)]],
    }[wrong]
    for message in releases:
        hostile.send(message)
    answer = hostile.receive()
    while isinstance(answer, m.Placed):
        answer = hostile.receive()
    assert isinstance(answer, m.Refused)
    assert (answer.code, "which it does not hold" in answer.reason) == ("malformed", True)
    until(lambda: [drafter.name for drafter in feeder.look()[0].drafters] == ["rank 1"])
    for ordinal in range(20, 40):  # what is freed by mistake would be filled again
        placed = victim.ask_for(ordinal)
        victim.send(m.Release(placed.request, placed.slot))
    assert victim.lane.ring is not None
    right = torch.empty(ROW, dtype=torch.uint8)
    synthetic_row(theirs.key, right)
    assert torch.equal(victim.lane.ring.rows[theirs.slot], right)
    for peer in (victim, hostile):
        peer.close()


def test_a_token_is_worth_nothing_to_another_drafter(feeder: FeederProcess) -> None:
    owner = RawDrafter(feeder.endpoint, 1)
    thief = RawPeer(feeder.endpoint)
    assert owner.lane.ring is not None
    stolen = f"shared_memory/{owner.lane.ring.token}"
    thief.send(m.Hello(m.VERSION, "rank 2", "x", 2, 3, synthetic_expectations(PLAN), None, (stolen, "inband")))
    welcome = thief.receive()
    assert isinstance(welcome, m.Welcome)
    assert welcome.lane == "inband"
    for peer in (owner, thief):
        peer.close()


Lie = Callable[[m.Placed], m.Message]
LIES: dict[str, tuple[Lie, str]] = {
    "a slot that there is not": (lambda p: replace(p, slot=99), "PLACED in slot 99, which is not free"),
    "a slot that is lent": (lambda p: replace(p, slot=0), "PLACED in slot 0, which is not free"),
    "a row not asked for": (lambda p: replace(p, request=10**9), "which was not made"),
    "another row": (lambda p: replace(p, key=RowKey("train", 99)), "PLACED brings train row 99"),
    "bytes in-band": (lambda p: m.Row(p.request, p.key, p.slot, 0, ROW, 0), "wrong number of frames"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_feeder_that_lies_about_its_ring_is_not_used(lie: str, tmp_path: Path, feeder: FeederProcess) -> None:
    change, says = LIES[lie]
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(ipc(tmp_path, "liar"))
    offers = LaneOffers(ipc(tmp_path, "liar"), ROW, 8, lambda but: 0, None, lambda count, text: None)
    offers.start()
    rings: list[Ring] = []
    try:
        with client_of([ipc(tmp_path, "liar"), feeder.endpoint]) as client:
            client._io.start()
            link = client._io.links[0]
            number = 0

            def serve() -> bool:
                nonlocal number
                while router.poll(10):
                    identity, frame = router.recv_multipart()
                    message = m.decode(frame)
                    if isinstance(message, m.Hello):
                        lane, ring = offers.claim("rank 0", message.lanes)
                        assert ring is not None
                        rings.append(ring)
                        router.send_multipart([identity, m.encode(m.Welcome(m.VERSION, "x", PLAN, lane, ROW, 3))])
                    elif isinstance(message, m.Get):
                        for request in message.requests:
                            placed = m.Placed(request.request, request.key, number, 0)
                            router.send_multipart([identity, m.encode(change(placed) if number else placed)])
                            number += 1
                return link.refusal is not None

            until(lambda: serve() or len(client._io.live()) == 2)
            client._io.start = lambda: None  # type: ignore[method-assign]  # it was started
            client.connect()
            client.schedule(iter(keys(0, 30)))
            until(serve)
            assert link.refusal is not None
            assert says in link.refusal.reason
            rows = client._io.live()
            assert [each.endpoint for each in rows] == [feeder.endpoint]
    finally:
        offers.close()
        context.destroy(linger=0)
