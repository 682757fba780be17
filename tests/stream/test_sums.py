"""The drafter's checksums on their own thread: what it does, and what becomes of a row between its last byte and its sum."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
import xxhash
from feeder_process import Behaviour, FeederProcess, feeders, until
from stream_client import PATIENT, client_of, keys, take_all
from test_stream import ipc

from dflash_mp.bench.synthetic import synthetic_plan, synthetic_weights
from dflash_mp.errors import StreamError
from dflash_mp.stream import dealing
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.sums import Sums

PATIENCE = 10.0  # seconds


class Gate:
    """A digest that waits until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go, self.pieces = threading.Event(), threading.Event(), 0

    def update(self, piece: memoryview) -> None:
        self.reached.set()
        assert self.go.wait(PATIENCE)
        self.pieces += 1

    def intdigest(self) -> int:
        return self.pieces


def gate() -> tuple[Gate, xxhash.xxh3_64]:
    made = Gate()
    return made, cast("xxhash.xxh3_64", made)


class Started(Sums):
    """Started, and `woken` for each call of `wake`."""

    def __init__(self) -> None:
        self.woken = threading.Semaphore(0)
        super().__init__(self.woken.release)
        self.start()

    def pump_one(self) -> None:
        assert self.woken.acquire(timeout=PATIENCE)
        self.pump()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()


@pytest.fixture
def sums() -> Iterator[Started]:
    made = Started()
    yield made
    made.close(PATIENCE)
    assert not made.alive


def test_a_sum_is_that_of_the_pieces_in_order_and_is_told_where_it_is_asked_for(sums: Started) -> None:
    told: list[tuple[int, threading.Thread]] = []
    rows = [bytes([n]) * 300_000 + b"end" for n in range(4)]
    digests = [xxhash.xxh3_64() for _ in rows]
    for start in (0, 200_000):  # pieces of several rows in turn
        for row, digest in zip(rows, digests, strict=True):
            sums.add(digest, memoryview(row)[start : start + 200_000])
    for digest in digests:
        sums.end(digest, lambda found: told.append((found, threading.current_thread())))
    for _ in rows:
        sums.pump_one()
    assert told == [(xxhash.xxh3_64_intdigest(row), threading.current_thread()) for row in rows]


def test_nothing_is_kept_of_what_was_summed(sums: Started) -> None:
    memory = bytearray(1000)

    def seen() -> bool:
        try:
            memory.append(1)
        except BufferError:
            return True
        return False

    slow, digest = gate()
    sums.add(digest, memoryview(memory))
    assert slow.reached.wait(PATIENCE)
    assert seen()
    slow.go.set()
    until(lambda: not seen())


def test_what_ends_the_thread_is_raised_where_sums_are_handed_out(sums: Started) -> None:
    sums.add(xxhash.xxh3_64(), cast("memoryview", object()))
    with pytest.raises(TypeError, match="a bytes-like object is required"):
        sums.pump_one()
    until(lambda: not sums.alive)


def test_closing_waits_for_one_piece_at_most_and_not_for_ever() -> None:
    sums = Started()
    slow, digest = gate()
    for _ in range(3):
        sums.add(digest, memoryview(b"piece"))
    assert slow.reached.wait(PATIENCE)
    start = time.monotonic()
    sums.close(0.2)
    assert 0.1 < time.monotonic() - start < PATIENCE / 2
    assert sums.alive
    slow.go.set()
    sums.close(PATIENCE)
    assert (sums.alive, slow.pieces) == (False, 1)


def test_closing_what_never_started_is_nothing() -> None:
    Sums(lambda: None).close(PATIENCE)


# -- in a client ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No sum is taken in the test's clients until this is set."""
    one, go = Sums._one, threading.Event()

    def wait(self: Sums) -> bool:
        go.wait(4 * PATIENCE)
        return one(self)

    monkeypatch.setattr(Sums, "_one", wait)
    yield go
    go.set()


def summing(client: RowClient) -> bool:
    return client._io._sums._thread.is_alive()


def test_a_row_that_waits_for_its_sum_is_given_up_in_time_and_said_to_have_come(
    tmp_path: Path, late: threading.Event
) -> None:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,):
        client = client_of([feeder.endpoint], row_seconds=1.0)
        with client:
            client.connect()
            client.schedule(iter(keys(0, 4)))
            window = client._io.window
            assert window is not None
            until(lambda: [want.state for want in window._order] == ["come"] * 4)
            with pytest.raises(StreamError, match="all of it is here, its checksum has not been taken yet"):
                client.take(keys(0, 1)[0])
            assert client.counters().window == {"unasked": 0, "asked": 4, "ready": 0, "held": 0, "free": 0}
            assert feeder.look()[0].rows == 4  # the feeder has nothing to wait for
            start = time.monotonic()
        assert time.monotonic() - start < PATIENCE / 2
        assert summing(client)
        late.set()
        until(lambda: not summing(client))


def test_sums_are_looked_at_when_they_are_there_and_not_when_something_else_happens(tmp_path: Path) -> None:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,), client_of([feeder.endpoint], silent_seconds=60) as client:
        client.connect()
        seconds: list[float] = []
        for key in keys(0, 8):
            client.schedule(iter([key]))
            start = time.monotonic()
            client.take(key).release()
            seconds.append(time.monotonic() - start)
        for _ in range(8):
            start = time.monotonic()
            client.fetch_weights()
            seconds.append(time.monotonic() - start)
        assert statistics.median(seconds) < 0.25  # half a second and more, if it took a ping


def test_weights_that_wait_for_their_sum_are_given_up_in_time(tmp_path: Path, late: threading.Event) -> None:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,), client_of([feeder.endpoint], row_seconds=0.5) as client:
        client.connect()
        with pytest.raises(StreamError, match=r"no more of the target's frozen weights came for 0\.5 s"):
            client.fetch_weights()


def test_weights_are_fetched_while_sums_are_late(tmp_path: Path, late: threading.Event) -> None:
    plan = synthetic_plan(hidden_size=1024, vocab_size=4500)  # three chunks each
    with feeders(FeederProcess(ipc(tmp_path), plan)) as (feeder,), client_of([feeder.endpoint], plan) as client:
        client.connect()
        timer = threading.Timer(0.5, late.set)
        timer.start()
        weights, right = client.fetch_weights(), synthetic_weights(plan)
        assert torch.equal(weights.embedding, right.embedding)
        assert torch.equal(weights.head, right.head)
        timer.join()


def test_a_client_that_closes_while_rows_wait_for_their_sums_ends_the_thread(
    tmp_path: Path, late: threading.Event
) -> None:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,):
        client = client_of([feeder.endpoint])
        client.connect()
        client.schedule(iter(keys(0, 4)))
        until(lambda: not client._io._sums._jobs.empty())
        timer = threading.Timer(0.2, late.set)
        timer.start()
        client.close()
        assert not summing(client)
        timer.join()


@pytest.mark.parametrize("fetching", [False, True])
def test_a_failure_of_the_thread_surfaces_where_the_client_waits(
    fetching: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Sums, *_: object) -> None:
        raise MemoryError("no sum today")

    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,), client_of([feeder.endpoint]) as client:
        client.connect()
        monkeypatch.setattr(Sums, "_end", fail)
        client.schedule(iter([] if fetching else keys(0, 4)))
        with pytest.raises(StreamError, match="the stream's thread failed: MemoryError: no sum today") as caught:
            client.fetch_weights() if fetching else client.take(keys(0, 1)[0])
        assert isinstance(caught.value.__cause__, MemoryError)


def test_rows_are_right_and_counted_once_though_sums_lag_and_feeders_die_and_damage_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Sums._one

    def lag(self: Sums) -> bool:
        time.sleep(0.004)
        return one(self)

    monkeypatch.setattr(Sums, "_one", lag)
    monkeypatch.setattr(dealing, "_SLACK_SECONDS", PATIENT)  # what comes twice is dropped, damaged or not
    behaviour = Behaviour(seconds_per_row=0.002, corrupts=2, silent_seconds=PATIENT)
    with (
        feeders(*(FeederProcess(ipc(tmp_path, name), behaviour=behaviour) for name in "ab")) as both,
        client_of([feeder.endpoint for feeder in both], rows=8, silent_seconds=PATIENT) as client,
    ):
        client.connect()
        until(lambda: len(client._io.live()) == 2)
        client.schedule(iter(keys(0, 120)))
        for key in take_all(client, keys(0, 120)):
            if key.ordinal == 60:
                both[0].kill()
        stats = client.stats
        assert (stats.rows, sum(stats.rows_by_feeder.values())) == (120, 120)
        assert stats.checksum_errors == 4
        assert stats.reasked >= 4


_FORK_AND_EXIT = """
import os, sys, time
from stream_client import client_of, keys
from dflash_mp.stream.sums import Sums

one = Sums._one
def slow(self):
    time.sleep(0.2)
    return one(self)
Sums._one = slow
client = client_of([sys.argv[1]])
client.connect()
client.schedule(iter(keys(0, 4)))
client.take(keys(0, 1)[0])
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.take(keys(1, 2)[0])
"""


def test_a_process_with_sums_under_way_forks_and_ends(tmp_path: Path) -> None:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,):
        command = [sys.executable, "-W", "ignore", "-c", _FORK_AND_EXIT, feeder.endpoint]
        here = Path(__file__).parent
        ended = subprocess.run(command, cwd=here, timeout=60, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
