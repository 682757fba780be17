"""The rows that a drafter has asked for ahead: which, in which slots, and how far each is.

Shared by the trainer's thread, which schedules, takes and releases, and the stream's thread, which asks and receives. Slots are the
only memory for rows and there is a fixed number of them, so nothing can grow; a row is asked for when it has a slot. Rows are taken in
the order scheduled. A row may be asked of several feeders: the first that sends it fills the slot, what the others send is dropped and
counted. Every wait is bounded, and ends at once when the stream's thread fails.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import xxhash

from dflash_mp.data.row import RowKey
from dflash_mp.errors import StreamError
from dflash_mp.stream.shared_memory import Loan, MappedRing
from dflash_mp.stream.slots import DeferredSlot, Slot

_LOOK_SECONDS = 0.5  # between two looks at whether a wait is still wanted
ATTEMPTS = 3  # times that a row is asked for before its error is final
STALLED_SECONDS = 1.0  # without a byte, and another feeder's copy of the row is taken instead


@dataclass(eq=False)
class Request:
    """A row asked of one feeder. `received` counts the bytes that came, kept or not, the last of them at `heard`."""

    want: Want
    feeder: str
    asked_at: float
    heard: float
    received: int = 0
    digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)  # of bytes kept; of use if all were


@dataclass(eq=False)
class Want:
    """A row that has a slot. `source` is the request whose bytes go there; with a `loan` the row lies in a feeder's ring instead.

    It has come when all its bytes are in the slot, and is ready when they are known to be right.
    """

    sequence: int
    key: RowKey
    slot: Slot | DeferredSlot
    state: Literal["waiting", "asked", "come", "ready", "failed"] = "waiting"
    requests: list[Request] = field(default_factory=list)  # that have not ended, oldest first
    source: Request | None = None
    loan: Loan | None = None
    feeder: str = ""  # asked last, or who sent it
    failures: int = 0
    failed_at: set[str] = field(default_factory=set)  # the feeders that could not make it
    failure: StreamError | None = None

    @property
    def buffer(self) -> torch.Tensor:
        """The whole row, uint8, once it is ready."""
        return self.slot.buffer if self.loan is None else self.loan.buffer

    def accepts(self, request: Request, now: float) -> bool:
        """Whether the bytes of `request`, at its current place, belong into the slot; makes it the source if there is none that gets on."""
        if self.state != "asked":
            return False
        if request.received == 0 and (self.source is None or now - self.source.heard > STALLED_SECONDS):
            self.source = request
        return self.source is request


class Window:
    """`slots` rows ahead at most."""

    def __init__(self, slots: Sequence[Slot | DeferredSlot], starved: Callable[[], None] = lambda: None) -> None:
        """`starved` is called when a wait begins."""
        self.changed = threading.Condition()
        self.seconds_waited = 0.0
        self.rows = 0
        self.reasked = 0
        self.duplicates = 0
        self._starved = starved
        self.size = len(slots)
        self._waiting_since: float | None = None
        self._free = list(slots)
        self._keys: Iterator[RowKey] = iter(())
        self._exhausted = True
        self._numbers = itertools.count()
        self._order: deque[Want] = deque()  # not taken yet
        self._waiting: list[Want] = []  # those that nobody has been asked for, in order
        self._broken: StreamError | None = None

    # -- trainer's thread ---------------------------------------------------------------------------------------------------------

    def schedule(self, keys: Iterator[RowKey]) -> None:
        """Rows to take after those scheduled before."""
        with self.changed:
            self._keys = itertools.chain(self._keys, keys)
            self._exhausted = False
            self._fill()

    def take(
        self,
        key: RowKey,
        seconds: float,
        late: Callable[[Want], StreamError],
        unwanted: Callable[[Want, float], StreamError | None] = lambda want, start: None,
    ) -> Want:
        """Wait until the next row, which must be `key`, is there. After `seconds`, raises the error that `late` makes; earlier, the one
        that `unwanted` makes of the row and the start of the wait (monotonic), which is called now and then.
        """
        start = time.monotonic()
        with self.changed:
            want = self._next(key)
            self._waiting_since = start
            if want.state not in ("ready", "failed"):
                self._starved()
            while want.state not in ("ready", "failed"):
                if self._broken is not None:
                    raise self._broken
                left = start + seconds - time.monotonic()
                if left <= 0:
                    raise late(want)
                if (error := unwanted(want, start)) is not None:
                    raise error
                self.changed.wait(min(left, _LOOK_SECONDS))
            self.seconds_waited += time.monotonic() - start
            self._waiting_since = None
            if want.failure is not None:
                raise want.failure
            self._order.popleft()
            self.rows += 1
            return want

    def release(self, want: Want) -> None:
        """The taker needs the row's memory no longer."""
        with self.changed:
            self._free.append(want.slot)
            self._fill()

    # -- any thread ---------------------------------------------------------------------------------------------------------------

    @property
    def starving(self) -> bool:
        """Whether the taker waits."""
        return self._waiting_since is not None

    def waited(self) -> float:
        """Seconds spent in `take`, those of a wait that goes on included."""
        with self.changed:
            since = self._waiting_since
            return self.seconds_waited + (0.0 if since is None else time.monotonic() - since)

    def states(self) -> dict[str, int]:
        """Rows by state: unasked, asked, ready, held by their taker, free."""
        with self.changed:
            found = Counter(want.state for want in self._order)
            free, known = len(self._free), len(self._order)
        ready = found["ready"] + found["failed"]
        held = self.size - free - known
        asked = found["asked"] + found["come"]
        return {"unasked": found["waiting"], "asked": asked, "ready": ready, "held": held, "free": free}

    # -- stream's thread ----------------------------------------------------------------------------------------------------------

    def waiting(self, most: int) -> list[Want]:
        """The first rows in order that nobody has been asked for."""
        with self.changed:
            return self._waiting[:most]

    def under_way(self) -> list[Want]:
        """The rows that were asked for and have not come, in order."""
        with self.changed:
            return [want for want in self._order if want.state == "asked"]

    def asked(self, want: Want, feeder: str) -> Request:
        """`want` is asked of `feeder`, as the first or as one more."""
        with self.changed:
            if want.state == "waiting":
                self._waiting.remove(want)
                want.state = "asked"
            now = time.monotonic()
            request = Request(want, feeder, now, now)
            want.requests.append(request)
            want.feeder = feeder
            return request

    def came(self, request: Request) -> bool:
        """All bytes of `request` have come. Whether they are those in the slot: then `ready` or `again` is to follow, and nothing else
        changes the row until then.
        """
        with self.changed:
            want = request.want
            if want.state != "asked" or want.source is not request:
                return False
            want.state = "come"
            return True

    def ready(self, request: Request) -> None:
        """A row is there, and it is right."""
        with self.changed:
            want = request.want
            want.requests.remove(request)
            want.state, want.feeder = "ready", request.feeder
            self.changed.notify_all()

    def placed(self, request: Request, loan: Loan) -> None:
        """The row lies in its feeder's ring."""
        with self.changed:
            request.want.loan = loan
            self.ready(request)

    def stuck(self) -> Want | None:
        """The row that the trainer waits for, if nobody has been asked for it."""
        with self.changed:
            next_ = self._order[0] if self.starving and self._order else None
            return next_ if next_ is not None and next_.state == "waiting" else None

    def recall(self, rings: Sequence[MappedRing], after: Want) -> Loan | None:
        """Have the last row after `after` that lies in one of `rings` and has not been taken asked for again; returns its loan, which has ended."""
        with self.changed:
            for want in reversed(self._order):
                if want is after:
                    return None
                if want.state == "ready" and want.loan is not None and want.loan.ring in rings:
                    loan, want.loan = want.loan, None
                    self._wait_again(want)
                    return loan
            return None

    def duplicate(self, request: Request) -> None:
        """A feeder has sent all of a row that came from another."""
        with self.changed:
            self.duplicates += 1
            request.want.requests.remove(request)
            self._ask_if_nobody_sends(request.want)

    def again(self, request: Request, counts: bool, why: str, untried: bool = False) -> None:
        """The request failed: another feeder sends the row, or it is asked for again; if that `counts` too often, it fails because of `why`,
        unless a feeder is left that has not tried.
        """
        with self.changed:
            want = request.want
            want.requests.remove(request)
            if want.source is request:
                want.source = None
                if want.state == "come":
                    want.state = "asked"
            if counts:
                want.failures += 1
                want.failed_at.add(request.feeder)
            if want.failures >= ATTEMPTS and want.state == "asked" and not untried:
                self._fail(want, request.feeder, f"{why} ({want.failures} attempts)")
            self._ask_if_nobody_sends(want)

    def fail(self, request: Request, why: str) -> None:
        """The row can't be had."""
        with self.changed:
            request.want.requests.remove(request)
            if request.want.state == "asked":
                self._fail(request.want, request.feeder, why)

    def break_off(self, error: StreamError) -> None:
        """No row will come any more."""
        with self.changed:
            self._broken = error
            self.changed.notify_all()

    # -- both, locked -------------------------------------------------------------------------------------------------------------

    def _next(self, key: RowKey) -> Want:
        if not self._order:
            held = self.size - len(self._free)
            if held and not self._exhausted:
                raise RuntimeError(f"{key} can't come: all {held} slots of the window are held; release a row first")
            raise RuntimeError(f"{key} was not scheduled")
        if self._order[0].key != key:
            raise RuntimeError(f"rows are taken in the order scheduled: {self._order[0].key} is next, not {key}")
        return self._order[0]

    def _fill(self) -> None:
        while self._free and not self._exhausted:
            key = next(self._keys, None)
            if key is None:
                self._exhausted = True
                self._keys = iter(())
                return
            want = Want(next(self._numbers), key, self._free.pop())
            self._order.append(want)
            self._waiting.append(want)

    def _ask_if_nobody_sends(self, want: Want) -> None:
        """Of a request whose first bytes were dropped the row can't come."""
        if want.state == "asked" and not any(r is want.source or r.received == 0 for r in want.requests):
            self._wait_again(want)

    def _wait_again(self, want: Want) -> None:
        self.reasked += 1
        want.state, want.source = "waiting", None  # of what a source sent meanwhile, bytes may have been dropped
        bisect.insort(self._waiting, want, key=lambda each: each.sequence)

    def _fail(self, want: Want, feeder: str, why: str) -> None:
        want.state, want.failure = "failed", StreamError(f"{feeder} could not give {want.key}: {why}")
        self.changed.notify_all()
