"""A drafter's rows that lie in feeders' rings: received, given back, and recalled when they are in the way.

A row keeps its slot of the feeder's ring until the trainer has released it, so a ring can be full of rows that the trainer wants later while
it waits for one that no ring has room for (its feeder died, say). Then the last of the later rows gives way and is asked for again:
it's a function of its key, so nothing is lost but the time to make it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import xxhash

from dflash_mp.stream.client_link import Link
from dflash_mp.stream.codec import ProtocolError
from dflash_mp.stream.dealing import candidates
from dflash_mp.stream.messages import Placed
from dflash_mp.stream.shared_memory import Loan
from dflash_mp.stream.window import Request, Want, Window

Corrupted = Callable[[Link, Request, Window], None]


class RingRows:
    """`give_back` may be called from any thread; the rest belongs to the stream's."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._returned: deque[Loan] = deque()

    def give_back(self, loan: Loan) -> None:
        """The trainer needs the row no longer; its feeder is told by `pump`."""
        self._returned.append(loan)

    def pump(self) -> None:
        """Tell the feeders what was given back."""
        while self._returned:
            loan = self._returned.popleft()
            for link in self._links:
                link.give_back(loan)

    def receive(self, link: Link, placed: Placed, window: Window | None, corrupted: Corrupted) -> None:
        """Hand a row on to the window, or to `corrupted` if its checksum differs. Raises `ProtocolError` if it isn't what was asked for."""
        request = link.asked.get(placed.request)
        if request is None or window is None:
            raise ProtocolError(f"PLACED answers request {placed.request}, which was not made")
        if placed.key != request.want.key:
            raise ProtocolError(f"PLACED brings {placed.key}; {request.want.key} is due")
        loan = link.borrow(placed)
        del link.asked[placed.request]
        request.heard = time.monotonic()
        link.row_time.done(request.asked_at, request.heard)
        if request.want.state != "asked":
            link.give_back(loan)
            window.duplicate(request)
        elif link.checksums and xxhash.xxh3_64_intdigest(loan.buffer.numpy().data) != placed.checksum:
            link.give_back(loan)
            corrupted(link, request, window)
        else:
            link.rows += 1
            window.placed(request, loan)

    def able(self, window: Window, live: list[Link]) -> list[Link]:
        """Which of the `live` feeders rows can be asked of; makes room for a row that the trainer waits for."""
        stuck = window.stuck() if live else None
        if stuck is None:
            return live
        apart = candidates(stuck, live, time.monotonic())
        if not any(link.has_room for link in apart):
            self._recall(window, stuck, apart)
        return [link for link in apart if link.has_room]

    def make_room(self, window: Window, want: Want, link: Link) -> bool:
        """Whether `link` can be asked for `want` beside others; a later row gives way if it must."""
        return link.has_room or self._recall(window, want, [link])

    def _recall(self, window: Window, want: Want, links: Sequence[Link]) -> bool:
        loan = window.recall([link.ring for link in links if link.ring is not None], after=want)
        if loan is not None:
            self.give_back(loan)
            self.pump()
        return loan is not None
