"""The order in which rows are asked for, and asked for again."""

from __future__ import annotations

import time

import pytest
import xxhash
from stream_client import keys

from dflash_mp.errors import StreamError
from dflash_mp.stream.slots import make_slots
from dflash_mp.stream.window import ATTEMPTS, STALLED_SECONDS, Request, Want, Window


def window_of(rows: int, *, scheduled: int) -> Window:
    window = Window(make_slots(0, rows, 64, pin=False, remedy=""))
    window.schedule(iter(keys(0, scheduled)))
    return window


def ask(window: Window, feeder: str = "feeder") -> Request:
    return window.asked(window.waiting(1)[0], feeder)


def late(want: Want) -> StreamError:
    return StreamError(f"{want.key} is late")


def test_rows_owed_by_a_lost_feeder_are_asked_again_first_and_in_order() -> None:
    window = window_of(5, scheduled=5)
    asked = [ask(window) for _ in range(4)]
    for request in (asked[2], asked[0], asked[3]):
        window.again(request, counts=False, why="")
    assert [ask(window).want.key.ordinal for _ in range(4)] == [0, 2, 3, 4]
    assert window.reasked == 3


def test_losing_feeders_never_uses_up_a_rows_attempts_and_errors_do() -> None:
    window = window_of(1, scheduled=1)
    for _ in range(3 * ATTEMPTS):
        window.again(ask(window), counts=False, why="")
    for _ in range(ATTEMPTS):
        assert window.waiting(1)
        window.again(ask(window), counts=True, why="out of memory")
    with pytest.raises(StreamError, match=rf"feeder could not give train row 0: out of memory \({ATTEMPTS} attempts\)"):
        window.take(keys(0, 1)[0], 0.1, late)


def test_a_row_asked_again_starts_from_nothing() -> None:
    window = window_of(1, scheduled=1)
    request = ask(window)
    assert request.want.accepts(request, 0.0)
    request.digest.update(b"half")
    request.received = 32
    window.again(request, counts=False, why="")
    second = ask(window)
    assert second.want is request.want
    assert second.want.accepts(second, 0.0)
    assert (second.received, second.digest.intdigest()) == (0, xxhash.xxh3_64().intdigest())


def test_of_two_feeders_the_first_that_sends_fills_the_slot_and_the_other_is_counted() -> None:
    window = window_of(1, scheduled=1)
    first = ask(window)
    second = window.asked(first.want, "another")
    now = time.monotonic()
    assert second.want.accepts(second, now)
    second.received = 32
    assert not first.want.accepts(first, now)
    window.ready(second)
    assert not first.want.accepts(first, now)
    window.duplicate(first)
    assert window.take(keys(0, 1)[0], 1, late).feeder == "another"
    assert (window.duplicates, window.reasked) == (1, 0)


def test_a_row_whose_source_is_lost_is_waited_for_only_if_another_can_still_send_all_of_it() -> None:
    for dropped in (0, 32):
        window = window_of(1, scheduled=1)
        source = ask(window)
        other = window.asked(source.want, "another")
        assert source.want.accepts(source, source.heard)
        other.received = dropped
        window.again(source, counts=False, why="")
        assert len(window.waiting(1)) == (dropped > 0)
        assert other.want.accepts(other, other.heard) == (dropped == 0)


def test_a_source_that_stalls_gives_way_to_another() -> None:
    window = window_of(1, scheduled=1)
    source = ask(window)
    other = window.asked(source.want, "another")
    now = source.heard
    assert source.want.accepts(source, now)
    source.received = 32
    assert not other.want.accepts(other, now + STALLED_SECONDS / 2)
    assert other.want.accepts(other, now + 2 * STALLED_SECONDS)
    assert not source.want.accepts(source, now + 2 * STALLED_SECONDS)


def test_a_row_that_is_there_can_be_taken_though_the_stream_has_failed() -> None:
    window = window_of(2, scheduled=2)
    window.ready(ask(window))
    window.break_off(StreamError("the end"))
    assert window.take(keys(0, 1)[0], 1, late).key.ordinal == 0
    with pytest.raises(StreamError, match="the end"):
        window.take(keys(1, 2)[0], 1, late)
