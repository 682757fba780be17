"""The order in which rows are asked for, and asked for again."""

from __future__ import annotations

import pytest
from stream_client import keys

from dflash_mp.errors import StreamError
from dflash_mp.stream.slots import make_slots
from dflash_mp.stream.window import ATTEMPTS, Want, Window


def window_of(rows: int, *, scheduled: int) -> Window:
    window = Window(make_slots(0, rows, 64, pin=False, remedy=""))
    window.schedule(iter(keys(0, scheduled)))
    return window


def ask(window: Window) -> Want:
    want = window.waiting()
    assert want is not None
    window.asked(want, "feeder")
    return want


def late(want: Want) -> StreamError:
    return StreamError(f"{want.key} is late")


def test_rows_owed_by_a_lost_feeder_are_asked_again_first_and_in_order() -> None:
    window = window_of(5, scheduled=5)
    asked = [ask(window) for _ in range(4)]
    for want in (asked[2], asked[0], asked[3]):
        window.again(want, counts=False, why="")
    assert [ask(window).key.ordinal for _ in range(4)] == [0, 2, 3, 4]
    assert window.reasked == 3


def test_losing_feeders_never_uses_up_a_rows_attempts_and_errors_do() -> None:
    window = window_of(1, scheduled=1)
    for _ in range(3 * ATTEMPTS):
        window.again(ask(window), counts=False, why="")
    for _ in range(ATTEMPTS):
        assert window.waiting() is not None
        window.again(ask(window), counts=True, why="out of memory")
    with pytest.raises(StreamError, match=rf"feeder could not give train row 0: out of memory \({ATTEMPTS} attempts\)"):
        window.take(keys(0, 1)[0], 0.1, late)


def test_a_row_asked_again_starts_from_nothing() -> None:
    window = window_of(1, scheduled=1)
    want = ask(window)
    want.received = 32
    want.digest.update(b"half")
    window.again(want, counts=False, why="")
    assert (want.received, want.digest.intdigest()) == (0, Want(0, want.key, want.slot).digest.intdigest())


def test_a_row_that_is_there_can_be_taken_though_the_stream_has_failed() -> None:
    window = window_of(2, scheduled=2)
    window.ready(ask(window))
    window.break_off(StreamError("the end"))
    assert window.take(keys(0, 1)[0], 1, late).key.ordinal == 0
    with pytest.raises(StreamError, match="the end"):
        window.take(keys(1, 2)[0], 1, late)
