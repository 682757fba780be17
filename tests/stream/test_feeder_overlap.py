"""Rows that a device computes: the next one is started meanwhile, and none is handed over before it has arrived."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import stream_client
import torch
from feeder_process import until
from stream_client import PATIENT, client_of, keys, take_all

from dflash_mp.bench.synthetic import RUN, synthetic_plan, synthetic_row, synthetic_weights
from dflash_mp.data.row import RowKey
from dflash_mp.errors import DataError, StreamError
from dflash_mp.stream.feeder import FeederService

PLAN = synthetic_plan()


class Device:
    """Starts rows at once; they lie in their buffers, which hold something else until then, when `end` says so."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.fails: dict[int, Exception] = {}  # when waited for
        self.refuses: dict[int, Exception] = {}  # when started
        self._ends: dict[int, threading.Event] = {}
        self._lock = threading.Lock()

    def compute(self, key: RowKey, buffer: torch.Tensor) -> _Work:
        buffer.fill_(0xA5)
        self.started.append(key.ordinal)
        if error := self.refuses.pop(key.ordinal, None):
            raise error
        return _Work(self.end_of(key.ordinal), key, buffer, self.fails.pop(key.ordinal, None))

    def end_of(self, ordinal: int) -> threading.Event:
        with self._lock:
            return self._ends.setdefault(ordinal, threading.Event())

    def end(self, *ordinals: int) -> None:
        for ordinal in ordinals:
            self.end_of(ordinal).set()


class _Work:
    def __init__(self, end: threading.Event, key: RowKey, buffer: torch.Tensor, error: Exception | None) -> None:
        self._end, self._key, self._buffer, self._error = end, key, buffer, error

    def query(self) -> bool:
        if self._end.is_set():
            self._arrive()
        return self._end.is_set()

    def synchronize(self) -> None:
        assert self._end.wait(20)
        self._arrive()

    def _arrive(self) -> None:
        if self._error is not None:
            raise self._error
        synthetic_row(self._key, self._buffer)


@contextlib.contextmanager
def serving(tmp_path: Path, device: Device) -> Iterator[tuple[FeederService, threading.Event]]:
    stop = threading.Event()
    with FeederService(f"ipc://{tmp_path}/f.sock", PLAN, synthetic_weights(PLAN), run=RUN, memory_mib=8) as service:
        thread = threading.Thread(target=service.serve, args=(device.compute, stop, 1e9))
        thread.start()
        try:
            yield service, stop
        finally:
            stop.set()
            device.end(*range(100))
            thread.join(20)
            assert not thread.is_alive()


def test_one_row_is_started_before_the_one_before_has_arrived_and_they_come_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_client, "SHARED_MEMORY", True)  # in-band there are no slots for more
    device = Device()
    with serving(tmp_path, device) as (service, _), client_of([service.endpoint], rows=4) as client:
        client.connect()
        client.schedule(iter(keys(0, 6)))
        rows = take_all(client, keys(0, 6))
        device.end(2, 4)  # before those before them: they wait for their turn
        for ordinal, ahead in ((0, 1), (1, 2), (3, 4)):
            until(lambda: device.started == list(range(ahead + 1)))  # noqa: B023  # called here
            time.sleep(0.02)
            assert device.started == list(range(ahead + 1)), "one ahead at most"
            assert service.counters().made_rows == ordinal, "none before it has arrived"
            device.end(ordinal)
            assert next(rows) == RowKey("train", ordinal)
            if ordinal:
                assert next(rows) == RowKey("train", ordinal + 1)
        device.end(5)
        assert next(rows) == RowKey("train", 5)


def test_a_row_after_which_nobody_asks_for_another_is_handed_over_when_it_has_arrived(tmp_path: Path) -> None:
    device = Device()
    with serving(tmp_path, device) as (service, _), client_of([service.endpoint]) as client:
        client.connect()
        client.schedule(iter(keys(0, 1)))
        until(lambda: device.started == [0])
        assert service._peers.busy is not None
        device.end(0)
        assert list(take_all(client, keys(0, 1))) == keys(0, 1)
        assert service._peers.busy is None
        time_spent = service.counters().time_spent
        assert time_spent.computing > 0
        assert time_spent.blocked < 0.5 * (time_spent.computing + time_spent.idle)


def test_an_error_is_that_of_the_row_whose_work_failed(tmp_path: Path) -> None:
    """It shows only when the next row is under way already, and costs neither that one nor those before."""
    device = Device()
    device.fails[1] = RuntimeError("a launch failed")  # once: worth another attempt
    device.refuses[3] = RuntimeError("no memory now")
    device.fails[4] = DataError("row is broken")  # for good

    def started_after(ordinal: int) -> bool:
        """After row 2 it may be row 1 again, if that is asked for early enough."""
        return ordinal + 1 in device.started or (ordinal == 2 and device.started.count(1) == 2)

    def end_each_when_the_next_is_started() -> None:
        for ordinal in range(4):
            until(lambda: started_after(ordinal))  # noqa: B023  # called here
            device.end(ordinal)
        device.end(4)

    ends = threading.Thread(target=end_each_when_the_next_is_started)
    with (
        serving(tmp_path, device) as (service, _),
        client_of([service.endpoint], silent_seconds=PATIENT) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 5)))
        ends.start()
        assert list(take_all(client, keys(0, 4))) == keys(0, 4)
        with pytest.raises(StreamError, match=r"train row 4.*row is broken"):
            client.take(RowKey("train", 4))
        ends.join(20)
        assert sorted(device.started) == [0, 1, 1, 2, 3, 3, 4]
        assert client.stats.reasked == 2
        assert service.counters().errors["row_retryable"] == 2
        assert service.counters().errors["row_final"] == 1


def test_a_feeder_that_is_stopped_waits_for_what_its_device_still_writes(tmp_path: Path) -> None:
    device = Device()
    with serving(tmp_path, device) as (service, stop), client_of([service.endpoint]) as client:
        client.connect()
        client.schedule(iter(keys(0, 4)))
        until(lambda: device.started == [0, 1])
        stop.set()
        device.end(0)
        until(lambda: service.status().rows == 1)
        time.sleep(0.05)
        assert not service._closed
        device.end(1)
        until(lambda: service._closed)
        assert service.status().rows == 2


def test_a_slot_of_a_drafter_that_left_is_not_used_again_while_the_device_writes_to_it(tmp_path: Path) -> None:
    device = Device()
    with serving(tmp_path, device) as (service, _):
        with client_of([service.endpoint], rank=0, world=2) as leaving:
            leaving.connect()
            leaving.schedule(iter(keys(0, 4)))
            until(lambda: device.started == [0, 1])
        until(lambda: not service.counters().drafters)
        assert service._pool.used == 2
        device.end(0, 1)
        until(lambda: service._pool.used == 0)
        with client_of([service.endpoint], rank=1, world=2) as client:
            client.connect()
            device.end(7, 8)
            client.schedule(iter(keys(7, 9)))
            assert list(take_all(client, keys(7, 9))) == keys(7, 9)
