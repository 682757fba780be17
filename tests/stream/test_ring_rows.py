"""A full ring: which row gives way, and for whom."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from stream_client import keys

from dflash_mp.stream.dealing import RowTime
from dflash_mp.stream.ring_messages import RingOffer
from dflash_mp.stream.ring_rows import RingRows
from dflash_mp.stream.shared_memory import Loan, MappedRing, Ring
from dflash_mp.stream.slots import DeferredSlots
from dflash_mp.stream.window import Request, Want, Window

ROW = 128


@dataclass
class Feeder:
    """What `RingRows` sees of a link: a ring of three rows."""

    endpoint: str
    ring: MappedRing
    has_room: bool = False
    returned: list[int] = field(default_factory=list)
    asked: dict[int, Request] = field(default_factory=dict)
    row_time: RowTime = field(default_factory=RowTime)

    def give_back(self, loan: Loan) -> None:
        if loan.ring is self.ring:
            self.returned.append(loan.slot)
            self.has_room = True


def feeder(name: str) -> Feeder:
    ring = Ring(ROW, 3)
    return Feeder(name, MappedRing(ring.fd, RingOffer("x", ring.rows, ROW, ring.stride)))


@pytest.fixture
def window() -> Window:
    """Rows 0 to 5, none asked for."""
    window = Window(DeferredSlots(6, ROW, pin=False, remedy="").slots)
    window.schedule(iter(keys(0, 6)))
    return window


def place(window: Window, want: Want, link: Feeder, slot: int) -> None:
    request = window.asked(want, link.endpoint)
    window.placed(request, Loan(link.ring, want.sequence, slot))


def starve(window: Window) -> None:
    window._waiting_since = 0.0  # as `take` does


def test_the_last_of_the_later_rows_gives_way_to_the_one_that_the_trainer_waits_for(window: Window) -> None:
    link, wants = feeder("a"), window.waiting(6)
    for slot, want in enumerate(wants[1:4]):
        place(window, want, link, slot)
    rows = RingRows([link])  # type: ignore[list-item]
    assert rows.able(window, [link]) == [link]  # type: ignore[list-item, comparison-overlap]  # nobody waits
    assert link.returned == []
    starve(window)
    assert rows.able(window, [link]) == [link]  # type: ignore[list-item, comparison-overlap]
    assert link.returned == [2]
    assert wants[3] in window.waiting(6)
    assert wants[3].loan is None
    assert [want.state for want in wants[:4]] == ["waiting", "ready", "ready", "waiting"]
    assert window.reasked == 1


def test_of_a_recalled_row_the_rest_of_an_older_sending_is_not_taken(window: Window) -> None:
    """Its first bytes lie in the slot, those that came while the row was in a ring were dropped."""
    link, wants = feeder("a"), window.waiting(6)
    slow = window.asked(wants[1], "slow")
    assert wants[1].accepts(slow, 0.0)
    slow.received = 32
    place(window, wants[1], link, 0)
    assert not wants[1].accepts(slow, 0.0)
    starve(window)
    RingRows([link]).able(window, [link])  # type: ignore[list-item]
    assert wants[1] in window.waiting(6)
    again = window.asked(wants[1], "a")
    assert not wants[1].accepts(slow, 0.0)
    assert wants[1].accepts(again, 0.0)


def test_a_row_that_failed_at_one_feeder_gets_room_at_another(window: Window) -> None:
    failing, other, wants = feeder("failing"), feeder("other"), window.waiting(6)
    failing.has_room, wants[0].failed_at = True, {"failing"}
    for slot, want in enumerate(wants[1:4]):
        place(window, want, other, slot)
    starve(window)
    rows = RingRows([failing, other])  # type: ignore[list-item]
    assert rows.able(window, [failing, other]) == [other]  # type: ignore[list-item, comparison-overlap]
    assert other.returned == [2]


def test_a_second_feeder_is_asked_for_a_late_row_only_if_its_ring_has_room_or_a_later_row(window: Window) -> None:
    link, late, wants = feeder("a"), feeder("late"), window.waiting(6)
    for slot, want in enumerate(wants[:3]):
        place(window, want, link, slot)
    window.asked(wants[3], late.endpoint)
    rows = RingRows([link, late])  # type: ignore[list-item]
    assert not rows.make_room(window, wants[3], link)  # type: ignore[arg-type]  # what is there comes before it
    assert link.returned == []
    wants[0].state = "asked"
    assert rows.make_room(window, wants[0], link)  # type: ignore[arg-type]
    assert link.returned == [2]
