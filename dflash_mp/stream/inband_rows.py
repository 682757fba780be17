"""A drafter's rows that come as frames: each copied into its slot, summed there by another thread, and handed on when the sum is right.

A row has come when its last byte is here: its feeder is told so and asked for the next one, whatever becomes of the sum. From then on the
row's slot takes nothing more, and only the sum decides: the row is ready, or it's asked for again. So it makes no difference to it if its feeder
is lost meanwhile.
"""

from __future__ import annotations

import time
from functools import partial

from dflash_mp.stream import messages as m
from dflash_mp.stream.client_link import Link
from dflash_mp.stream.codec import ProtocolError
from dflash_mp.stream.ring_rows import Corrupted
from dflash_mp.stream.sums import Sums
from dflash_mp.stream.window import Request, Window


class InbandRows:
    """Belongs to the stream's thread; `corrupted` is called for a row whose checksum differs."""

    def __init__(self, sums: Sums, corrupted: Corrupted) -> None:
        self._sums, self._corrupted = sums, corrupted

    def receive(self, link: Link, row: m.Row, window: Window | None, row_bytes: int) -> None:
        """Take the frame that follows `row`, one of `row_bytes` bytes in all. Raises `ProtocolError` if it isn't what is due."""
        request = link.asked.get(row.request)
        if request is None or window is None:
            raise ProtocolError(f"ROW answers request {row.request}, which was not made")
        want = request.want
        if row.key != want.key or row.nbytes != row_bytes or row.offset != request.received:
            raise ProtocolError(
                f"ROW brings byte {row.offset} of {row.nbytes} of {row.key}; "
                f"byte {request.received} of {row_bytes} of {want.key} is due"
            )
        nbytes = min(m.CHUNK_BYTES, row_bytes - row.offset)
        if row.offset + nbytes == row_bytes:  # all is on this side: the slot over there can be filled again
            link.post(m.Release(row.request, row.slot))
        if want.accepts(request, now := time.monotonic()):
            place = want.slot.view[row.offset : row.offset + nbytes]
            link.payload_into(place)
            self._sums.add(request.digest, place)
        else:
            link.payload_dropped(nbytes)
        request.received += nbytes
        request.heard = now
        if request.received == row_bytes:
            self._whole(link, row, request, window)

    def _whole(self, link: Link, row: m.Row, request: Request, window: Window) -> None:
        del link.asked[row.request]
        link.row_time.done(request.asked_at, request.heard)
        if window.came(request):
            self._sums.end(request.digest, partial(self._judge, link, request, window, row.checksum))
        else:
            window.duplicate(request)

    def _judge(self, link: Link, request: Request, window: Window, right: int, found: int) -> None:
        if found == right:
            link.rows += 1
            window.ready(request)
        else:
            self._corrupted(link, request, window)
