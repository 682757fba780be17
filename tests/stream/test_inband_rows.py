"""A row between its last byte and its sum: whatever happens meanwhile, it becomes ready once, or is asked for again once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import xxhash
from stream_client import keys

from dflash_mp.bench.fuzz_drafter import FuzzLink
from dflash_mp.bench.synthetic import synthetic_expectations, synthetic_plan
from dflash_mp.data.row import RowKey
from dflash_mp.errors import StreamError
from dflash_mp.stream import messages as m
from dflash_mp.stream import window as windows
from dflash_mp.stream.client_io import ClientIo
from dflash_mp.stream.handshake import INBAND
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.slots import make_slots
from dflash_mp.stream.window import ATTEMPTS, STALLED_SECONDS, Want, Window

PLAN = synthetic_plan()
ROW = RowLayout.of(PLAN).nbytes
CHUNK = -(-ROW // 3)
ROWS = 3


def bits(key: RowKey) -> bytes:
    return bytes([key.ordinal + 1]) * ROW


def not_yet(want: Want) -> StreamError:
    return StreamError("not yet")


class Drafter:
    """A drafter whose threads are calls: `turn` is one of the stream's, `take_sums` does what that of the sums has to do. Feeders `a` and `b`."""

    def __init__(self) -> None:
        hello = m.Hello(m.VERSION, "rank 0", "1", 0, 1, synthetic_expectations(PLAN), None, (INBAND,))
        self.io = ClientIo([], lambda plan: replace(hello, plan=plan), "rank 0", 1e9)
        self.a, self.b = (FuzzLink(f"ipc:///{name}", self.io._context, self.io._poller) for name in "ab")
        self.io.links += [self.a, self.b]
        self.io._context.term()
        self.io.settled()
        self.window = self.io.window = Window(make_slots(0, ROWS, ROW, pin=False, remedy=""))
        self.window.schedule(iter(keys(0, ROWS)))

    def connect(self, link: FuzzLink) -> None:
        self.io._attend(link)
        link.dealer.incoming.append([m.encode(m.Welcome(m.VERSION, link.endpoint, PLAN, INBAND, ROW, 3))])
        self.io._attend(link)
        assert link.state == "live"

    def turn(self) -> None:
        self.io._ask_for_rows()

    def ask_too(self, want: Want, link: FuzzLink) -> None:
        """Ask `link` for a row that another one owes."""
        link.post(m.Get((link.ask(self.window.asked(want, link.endpoint)),)))

    def ask_both(self) -> tuple[m.RowRequest, m.RowRequest, Want]:
        """Ask `a` for the rows, and `b`, which is connected now, for the first of them, too: what both were asked for that one, and the row."""
        self.turn()
        first, *_ = self.asked_of(self.a)
        self.connect(self.b)
        want = self.a.asked[first.request].want
        self.ask_too(want, self.b)
        (too,) = self.asked_of(self.b)
        return first, too, want

    def asked_of(self, link: FuzzLink) -> list[m.RowRequest]:
        """What `link` has been asked for since the last call."""
        said = [m.decode(link.dealer.sent.popleft()) for _ in range(len(link.dealer.sent))]
        return [request for message in said if isinstance(message, m.Get) for request in message.requests]

    def answer(self, link: FuzzLink, asked: m.RowRequest, chunks: slice = slice(None), *, right: bool = True) -> None:
        """`link` sends the row, or some `chunks` of it; if it isn't `right` all are damaged."""
        sent = bits(asked.key)
        checksum = xxhash.xxh3_64_intdigest(sent)
        for offset in range(0, ROW, CHUNK)[chunks]:
            payload = sent[offset : offset + CHUNK] if right else bytes(len(sent[offset : offset + CHUNK]))
            row = m.Row(asked.request, asked.key, 0, offset, ROW, checksum)
            link.dealer.incoming.append([m.encode(row), payload])
        for _ in range(ROWS):
            self.io._attend(link)

    def take_sums(self) -> None:
        while not self.io._sums._jobs.empty():
            self.io._sums._one()

    def sum_up(self) -> None:
        self.take_sums()
        self.io._sums.pump()

    def take(self) -> Want:
        want = self.window.take(self.window._order[0].key, 0.0, not_yet)
        assert bytes(want.slot.view) == bits(want.key)
        return want

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Rows that feeder a gave, that b gave, that were asked for again, that came twice."""
        return self.a.rows, self.b.rows, self.window.reasked, self.window.duplicates


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drafter]:
    monkeypatch.setattr(m, "CHUNK_BYTES", CHUNK)
    made = Drafter()
    made.connect(made.a)
    yield made
    made.io._wakeup.close()


def test_a_row_is_ready_when_its_sum_is_there_and_its_feeder_is_done_before(drafter: Drafter) -> None:
    drafter.turn()
    first, *_ = drafter.asked_of(drafter.a)
    drafter.answer(drafter.a, first)
    assert first.request not in drafter.a.asked
    assert [m.decode(frame) for frame in drafter.a.dealer.sent] == [m.Release(first.request, 0)]
    assert drafter.window.states() == {"unasked": 0, "asked": ROWS, "ready": 0, "held": 0, "free": 0}
    with pytest.raises(StreamError, match="not yet"):
        drafter.take()
    drafter.sum_up()
    assert drafter.take().feeder == drafter.a.endpoint
    assert drafter.counts == (1, 0, 0, 0)


def lose(drafter: Drafter) -> None:
    drafter.io._lose(drafter.a, "killed")


def refuse(drafter: Drafter) -> None:
    drafter.io._refused(drafter.a, m.Refused("full", "no room"))


def leave(drafter: Drafter) -> None:
    drafter.io._follow([drafter.b.endpoint])


def nothing(drafter: Drafter) -> None:
    pass


ENDS = pytest.mark.parametrize("end", [lose, refuse, leave, nothing])


@ENDS
def test_a_row_whose_feeder_is_gone_before_its_sum_is_there_is_taken(
    drafter: Drafter, end: Callable[[Drafter], None]
) -> None:
    drafter.turn()
    drafter.answer(drafter.a, drafter.asked_of(drafter.a)[0])
    end(drafter)
    drafter.connect(drafter.b)
    drafter.turn()
    again = [asked.key.ordinal for asked in drafter.asked_of(drafter.b)]
    assert again == ([] if end is nothing else [1, 2])
    drafter.sum_up()
    drafter.turn()
    assert not drafter.asked_of(drafter.b)
    drafter.take()
    assert drafter.counts == (1, 0, len(again), 0)


@ENDS
def test_a_damaged_row_whose_feeder_is_gone_before_its_sum_is_there_is_asked_for_again_once(
    drafter: Drafter, end: Callable[[Drafter], None]
) -> None:
    drafter.turn()
    drafter.answer(drafter.a, drafter.asked_of(drafter.a)[0], right=False)
    end(drafter)
    drafter.connect(drafter.b)
    drafter.turn()
    others = drafter.asked_of(drafter.b)
    drafter.sum_up()
    drafter.turn()
    drafter.turn()
    (again,) = drafter.asked_of(drafter.b)
    assert again.key.ordinal == 0
    assert drafter.io.checksum_errors == 1
    drafter.answer(drafter.b, again)
    drafter.sum_up()
    drafter.take()
    assert drafter.counts == (0, 1, len(others) + 1, 0)


@pytest.mark.parametrize("right", [True, False])
def test_what_another_feeder_sends_of_a_row_that_has_come_is_dropped(drafter: Drafter, right: bool) -> None:
    first, too, _ = drafter.ask_both()
    drafter.answer(drafter.a, first, right=right)
    drafter.answer(drafter.b, too, right=not right)  # it must neither mend nor spoil the row
    assert drafter.counts == (0, 0, 0, 1)
    drafter.sum_up()
    assert drafter.counts == (int(right), 0, int(not right), 1)
    if not right:
        drafter.turn()
        drafter.answer(drafter.b, next(asked for asked in drafter.asked_of(drafter.b) if asked.key == first.key))
        drafter.sum_up()
    drafter.take()


@pytest.mark.parametrize("begun", [0, 1])
def test_a_damaged_row_is_left_to_another_feeder_that_has_yet_to_begin_with_it(drafter: Drafter, begun: int) -> None:
    first, too, _ = drafter.ask_both()
    drafter.answer(drafter.a, first, right=False)
    drafter.answer(drafter.b, too, slice(begun))
    drafter.sum_up()
    assert drafter.window.reasked == begun  # of a row whose beginning was dropped, the rest is of no use
    drafter.answer(drafter.b, too, slice(begun, None))
    if begun:
        drafter.turn()
        drafter.answer(drafter.b, next(asked for asked in drafter.asked_of(drafter.b) if asked.key == first.key))
    drafter.sum_up()
    drafter.take()
    assert drafter.counts == (0, 1, begun, begun)


def test_a_row_that_has_come_does_not_stall(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    first, too, want = drafter.ask_both()
    drafter.answer(drafter.a, first)
    monkeypatch.setattr(windows, "STALLED_SECONDS", -STALLED_SECONDS)
    assert want not in drafter.window.under_way()
    drafter.answer(drafter.b, too, right=False)
    drafter.sum_up()
    drafter.take()
    assert drafter.counts == (1, 0, 0, 1)


@pytest.mark.parametrize("summed", [True, False])
def test_the_sum_of_a_feeder_that_was_given_up_says_nothing_of_its_successors_row(
    drafter: Drafter, monkeypatch: pytest.MonkeyPatch, summed: bool
) -> None:
    first, too, _ = drafter.ask_both()
    drafter.answer(drafter.a, first, slice(2), right=False)
    if summed:
        drafter.sum_up()
    with monkeypatch.context() as patch:
        patch.setattr(windows, "STALLED_SECONDS", -STALLED_SECONDS)
        drafter.answer(drafter.b, too, slice(1))
    drafter.answer(drafter.a, first, slice(2, None), right=False)
    drafter.answer(drafter.b, too, slice(1, None))
    assert drafter.counts == (0, 0, 0, 1)
    drafter.sum_up()
    drafter.take()
    assert (drafter.counts, drafter.io.checksum_errors) == ((0, 1, 0, 1), 0)


def test_sums_of_a_lost_conversation_say_nothing_of_the_row_that_the_next_one_brings(drafter: Drafter) -> None:
    drafter.turn()
    drafter.answer(drafter.a, drafter.asked_of(drafter.a)[0], slice(2), right=False)
    lose(drafter)
    drafter.connect(drafter.a)
    drafter.turn()
    drafter.answer(drafter.a, drafter.asked_of(drafter.a)[0])
    drafter.sum_up()
    drafter.take()
    assert (drafter.counts, drafter.io.checksum_errors) == ((1, 0, ROWS, 0), 0)


@pytest.mark.parametrize("right", [True, False])
def test_an_error_elsewhere_fails_no_row_that_has_come(drafter: Drafter, right: bool) -> None:
    drafter.turn()
    first, *_ = drafter.asked_of(drafter.a)
    drafter.connect(drafter.b)
    want = drafter.a.asked[first.request].want
    drafter.answer(drafter.a, first, right=right)
    lose(drafter)
    for retryable in [True] * ATTEMPTS + [False]:
        drafter.ask_too(want, drafter.b)
        (too,) = drafter.asked_of(drafter.b)
        drafter.b.dealer.incoming.append([m.encode(m.RowError(too.request, too.key, "no memory", retryable))])
        drafter.io._attend(drafter.b)
    assert want.state == "come"
    drafter.sum_up()
    assert want.state == ("ready" if right else "failed")
    if right:
        drafter.take()
    else:
        with pytest.raises(StreamError, match=rf"it arrived corrupted \({ATTEMPTS + 1} attempts\)"):
            drafter.take()


def test_a_row_is_ready_as_soon_as_it_is_summed_though_others_come_in_one_go(drafter: Drafter) -> None:
    drafter.turn()
    first, second, _ = drafter.asked_of(drafter.a)
    drafter.answer(drafter.a, first)
    drafter.take_sums()
    drafter.answer(drafter.a, second, slice(1))
    drafter.take()


def test_rows_come_while_none_has_been_summed(drafter: Drafter) -> None:
    drafter.turn()
    for asked in drafter.asked_of(drafter.a):
        drafter.answer(drafter.a, asked)
    assert not drafter.a.asked
    drafter.sum_up()
    for _ in range(ROWS):
        drafter.take()
