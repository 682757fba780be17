"""Peers that lie about the shared-memory lane: they are dropped, and no row of anybody else is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zmq
from feeder_process import FeederProcess, feeders, until
from stream_client import client_of, keys
from test_feeder_bounds import RawPeer
from test_shared_memory import ask
from test_stream import ipc

from dflash_mp.bench.synthetic import synthetic_expectations, synthetic_plan, synthetic_row
from dflash_mp.data.row import RowKey
from dflash_mp.stream import messages as m
from dflash_mp.stream.lane_offers import LaneOffers
from dflash_mp.stream.lane_request import LaneRequest, lane_wishes
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.shared_memory import Ring

PLAN = synthetic_plan()
ROW = RowLayout.of(PLAN).nbytes
pytestmark = pytest.mark.usefixtures("shared_memory")


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
