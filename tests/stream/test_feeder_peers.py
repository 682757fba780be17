"""The feeder's bookkeeping: turns, order, and slots that nobody overwrites too early."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import cast

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mp.bench.synthetic import synthetic_expectations, synthetic_plan
from dflash_mp.data.row import RowKey
from dflash_mp.stream import messages as m
from dflash_mp.stream.codec import ProtocolError
from dflash_mp.stream.feeder_peer import OUTSTANDING, RING_OUTSTANDING, Job, Peer, Transfer
from dflash_mp.stream.feeder_peers import Peers
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.shared_memory import Ring
from dflash_mp.stream.slots import SlotPool
from dflash_mp.stream.weights import WeightsServer

PLAN = synthetic_plan()
ROW = RowLayout.of(PLAN).nbytes
NO_WEIGHTS: WeightsServer = None  # type: ignore[assignment]  # never asked for here


def admit(peers: Peers, number: int, ring: Ring | None = None, running: bool = False, world: int = 1) -> Peer:
    expects = synthetic_expectations(PLAN)
    hello = m.Hello(m.VERSION, f"rank {number}", "x", 0, world, expects, None, (), running_checksums=running)
    refused, _ = peers.greet(bytes([number]), hello, ring)
    assert refused is None
    found = peers.find(bytes([number]))
    assert found is not None
    return found


def ask(peers: Peers, peer: Peer, *requests: int) -> None:
    peers.get(peer, m.Get(tuple(m.RowRequest(n, RowKey("train", n)) for n in requests)))


def make(peers: Peers) -> Job | None:
    job = peers.next_job(0)
    if job is not None:
        peers.finish(job, 0)
    return job


def send_all(peers: Peers, peer: Peer) -> list[m.Message]:
    sent = []
    while (outgoing := peers.next_outgoing(peer, NO_WEIGHTS)) is not None:
        peers.sent(peer, outgoing[0])
        sent.append(outgoing[0])
    return sent


@pytest.mark.parametrize("running", [True, False])
def test_checksums_are_of_what_was_sent_so_far_or_of_the_whole_row(running: bool) -> None:
    nbytes = 2 * m.CHUNK_BYTES + 100
    peers = Peers(SlotPool(2, nbytes, pin=False), nbytes, 8)
    peer = admit(peers, 1, running=running)
    assert peer.checksummed_whole is not running
    ask(peers, peer, 1)
    job = peers.next_job(0)
    assert job is not None
    job.transfer.slot.buffer.random_(generator=torch.Generator().manual_seed(1))
    row = bytes(job.transfer.slot.view)
    peers.finish(job, 0 if running else xxhash.xxh3_64_intdigest(row))
    found, sent = [], b""
    while (outgoing := peers.next_outgoing(peer, NO_WEIGHTS)) is not None:
        assert peers.next_outgoing(peer, NO_WEIGHTS) == outgoing  # until it has been sent
        header, payload = outgoing
        assert isinstance(header, m.Row)
        assert payload is not None
        sent += payload
        found.append((header.offset, header.checksum, xxhash.xxh3_64_intdigest(sent if running else row)))
        peers.sent(peer, header)
    assert sent == row
    assert [offset for offset, _, _ in found] == [0, m.CHUNK_BYTES, 2 * m.CHUNK_BYTES]
    assert all(said == right for _, said, right in found)


def test_peers_take_turns_and_each_keeps_its_order() -> None:
    peers = Peers(SlotPool(6, ROW, pin=False), ROW, 8)
    first, second, third = (admit(peers, n) for n in range(3))
    ask(peers, first, 1, 2, 3)
    ask(peers, third, 7)
    ask(peers, second, 4, 5)
    made = []
    while (job := make(peers)) is not None:
        made.append((job.peer.hello.peer, job.key.ordinal))
    assert made == [("rank 0", 1), ("rank 1", 4), ("rank 2", 7), ("rank 0", 2), ("rank 1", 5)]  # 3 awaits a release
    assert [row.key.ordinal for row in send_all(peers, first) if isinstance(row, m.Row)] == [1, 2]


def test_waiting_for_a_release_counts_as_blocked_and_waiting_for_a_request_as_idle() -> None:
    peers = Peers(SlotPool(2, ROW, pin=False), ROW, 8)
    peer = admit(peers, 0)
    peers.next_job(0.05)
    assert peers.time_spent().idle >= 0.05 > peers.time_spent().blocked
    ask(peers, peer, 1, 2, 3)
    assert [make(peers) is not None for _ in range(3)] == [True, True, False]
    idle = peers.time_spent().idle
    assert peers.next_job(0.2) is None
    assert peers.time_spent().blocked >= 0.2
    assert peers.time_spent().idle == idle


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_slot_is_used_twice_at_a_time_and_all_come_back(data: st.DataObject) -> None:
    pool = SlotPool(6, ROW, pin=False)
    peers = Peers(pool, ROW, 8)
    alive: dict[int, Peer] = {}
    numbers = iter(range(1, 10_000))
    making: list[Job] = []
    unreleased: list[tuple[Peer, m.Row]] = []
    for action in data.draw(st.lists(st.sampled_from("hgjfesrx"), min_size=20, max_size=60)):
        peer = alive[data.draw(st.sampled_from(sorted(alive)))] if alive else None
        if action == "h":
            number = data.draw(st.integers(0, 2))
            alive[number] = admit(peers, number)
        elif action == "g" and peer and peer.outstanding < OUTSTANDING:
            ask(peers, peer, next(numbers))
        elif action == "j" and len(making) < 2:
            making += [job] if (job := peers.next_job(0)) is not None else []
        elif action in "fe" and making:
            job = making.pop(data.draw(st.integers(0, len(making) - 1)))
            peers.finish(job, 0) if action == "f" else peers.fail(job, "no", True)
        elif action == "s" and peer:
            unreleased += [(peer, row) for row in send_all(peers, peer) if isinstance(row, m.Row)]
        elif action == "r" and unreleased:
            owner, row = unreleased.pop(0)
            if not owner.gone:
                peers.release(owner, m.Release(row.request, row.slot))
        elif action == "x" and peer:
            peers.remove(peer)
            alive = {n: p for n, p in alive.items() if p is not peer}
        used = Counter(t.slot.index for p in alive.values() for t in p.transfers.values())
        used.update(job.transfer.slot.index for job in making if job.peer.gone)
        assert (peers.busy[0] if peers.busy else None) == (making[0].key if making else None)
        assert not used or max(used.values()) == 1
        assert sum(used.values()) + len(pool._free) == pool.made <= pool.capacity
    for job in making:
        peers.finish(job, 0)
    for peer in alive.values():
        peers.remove(peer)
    assert len(pool._free) == pool.made


def test_a_snapshot_looks_at_what_a_drafter_has_asked_for_under_the_lock() -> None:
    """Any thread takes one, and the I/O thread changes those dicts."""

    class Watched(dict[int, Transfer]):
        def __len__(self) -> int:
            locked.append(peers._changed._is_owned())  # type: ignore[attr-defined]
            return super().__len__()

    locked: list[bool] = []
    peers = Peers(SlotPool(6, ROW, pin=False), ROW, 8)
    peer = admit(peers, 0)
    peer.transfers = Watched()
    ask(peers, peer, 1, 2)
    assert make(peers) is not None
    locked.clear()
    now = peers.snapshot()
    assert locked
    assert all(locked)
    assert (now.made, now.queued, now.held, now.drafters[0].outstanding) == (1, 1, 1, 2)


def test_memory_of_drafters_that_left_is_room_for_rings() -> None:
    peers = Peers(pool := SlotPool(4, ROW, pin=False), ROW, 8)
    ask(peers, first := admit(peers, 0), 1, 2)
    ask(peers, second := admit(peers, 1), 3)
    made = [make(peers) for _ in range(3)]
    assert all(made)
    assert peers.rows_in_use("rank 0") == 2
    peers.remove(second)
    assert pool.made == 2
    admit(peers, 0, Ring(ROW, 4))  # the first again, which holds rows of the pool
    assert first.gone
    assert pool.made == 0
    ask(peers := Peers(pool := SlotPool(4, ROW, pin=False), ROW, 8), third := admit(peers, 2), 1)
    assert make(peers) is not None
    row = send_all(peers, third)[0]
    assert isinstance(row, m.Row)
    peers.release(third, m.Release(row.request, row.slot))
    assert pool.made == 1
    peers.remove(third)
    assert pool.made == 0


def test_memory_set_aside_for_rings_is_no_room_for_others() -> None:
    peers = Peers(SlotPool(4, ROW, pin=False), ROW, 8)
    hello = m.Hello(m.VERSION, "rank 9", "x", 0, 1, synthetic_expectations(PLAN), None, ())
    refused, _ = peers.greet(b"9", hello, None, reserved=3)
    assert refused is not None
    assert refused.code == "full"
    assert peers.greet(b"9", hello, None, reserved=2) == (None, [])


@pytest.mark.parametrize(
    ("capacity", "world", "slots"), [(6, 1, 3), (5, 1, 2), (9, 2, 3), (8, 2, 2), (2, 1, 2), (1, 1, 1)]
)
def test_a_peer_holds_a_third_row_where_the_whole_run_and_one_drafter_more_could(
    capacity: int, world: int, slots: int
) -> None:
    peers = Peers(SlotPool(capacity, ROW, pin=False), ROW, 8)
    ask(peers, admit(peers, 0, world=world), 1, 2, 3)
    assert len(list(iter(lambda: make(peers), None))) == slots


def test_third_rows_are_counted_and_given_up_for_a_drafter_that_needs_the_room() -> None:
    peers = Peers(pool := SlotPool(9, ROW, pin=False), ROW, 8)
    greedy, second = admit(peers, 0), admit(peers, 1)
    ask(peers, greedy, 1, 2, 3)
    assert all(make(peers) for _ in range(3))
    assert peers.rows_in_use("") == 6
    assert admit(peers, 2).slots == 2  # three more would leave a fourth drafter no room for as many
    assert (second.slots, peers.rows_in_use("")) == (3, 8)
    hello = m.Hello(m.VERSION, "rank 3", "x", 0, 1, synthetic_expectations(PLAN), None, ())
    assert peers.greet(b"3", hello) == (None, [])
    assert (greedy.slots, second.slots, peers.rows_in_use("")) == (3, 2, 9)  # three are held
    refused, _ = peers.greet(b"4", replace(hello, peer="rank 4"))
    assert refused is not None
    ask(peers, second, 1, 2, 3)
    assert len(list(iter(lambda: make(peers), None))) == 2
    peers.remove(greedy)
    assert pool.made <= 6


def test_nothing_waits_while_a_checksum_is_taken() -> None:
    peers = Peers(SlotPool(2, ROW, pin=False), ROW, 8)
    ask(peers, peer := admit(peers, 0, running=True), 1)
    job = make(peers)
    assert job is not None

    class Digest:
        def update(self, data: object) -> None:
            other = threading.Thread(target=peers.next_job, args=(0,), daemon=True)
            other.start()
            other.join(5)
            assert not other.is_alive()

        def intdigest(self) -> int:
            return 1

    job.transfer.digest = cast("xxhash.xxh3_64", Digest())
    assert len(send_all(peers, peer)) == 1


def test_a_peer_may_ask_for_more_rows_where_they_wait_in_its_own_ring() -> None:
    for ring, most in ((None, OUTSTANDING), (Ring(ROW, 4), RING_OUTSTANDING)):
        peers = Peers(SlotPool(6, ROW, pin=False), ROW, 8)
        peer = admit(peers, 1, ring)
        ask(peers, peer, *range(most))
        with pytest.raises(ProtocolError, match=f"more than {most} rows at once"):
            ask(peers, peer, most)
