"""The rows that a drafter has asked for ahead: which, in which slots, and how far each is.

Shared by the trainer's thread, which schedules, takes and releases, and the stream's thread, which asks and receives. Slots are the
only memory for rows and there is a fixed number of them, so nothing can grow; a row is asked for when it has a slot. Rows are taken in
the order scheduled. Every wait is bounded, and ends at once when the stream's thread fails.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from dflash_mp.data.row import RowKey
from dflash_mp.errors import StreamError
from dflash_mp.stream.slots import Slot

_LOOK_SECONDS = 0.5  # between two looks at whether a wait is still wanted
ATTEMPTS = 3  # times that a row is asked for before its error is final


@dataclass(eq=False)
class Want:
    """A row that has a slot. `feeder` is who was asked last, since `asked_at`; `received` counts the bytes that came."""

    sequence: int
    key: RowKey
    slot: Slot
    state: Literal["waiting", "asked", "ready", "failed"] = "waiting"
    feeder: str = ""
    asked_at: float = 0.0
    received: int = 0
    checksum: int = 0
    digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    attempts: int = 0
    failure: StreamError | None = None


class Window:
    """`slots` rows ahead at most."""

    def __init__(self, slots: list[Slot]) -> None:
        self.changed = threading.Condition()
        self.seconds_waited = 0.0
        self.rows = 0
        self.reasked = 0
        self.size = len(slots)
        self._waiting_since: float | None = None
        self._free = slots
        self._keys: Iterator[RowKey] = iter(())
        self._exhausted = True
        self._numbers = itertools.count()
        self._order: deque[Want] = deque()  # not taken yet
        self._waiting: list[tuple[int, Want]] = []  # heap of those that nobody has been asked for
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
        return {"unasked": found["waiting"], "asked": found["asked"], "ready": ready, "held": held, "free": free}

    # -- stream's thread ----------------------------------------------------------------------------------------------------------

    def waiting(self) -> Want | None:
        """The first row in order that nobody has been asked for."""
        with self.changed:
            return self._waiting[0][1] if self._waiting else None

    def asked(self, want: Want, feeder: str) -> None:
        """`want`, got from `waiting`, has been asked of `feeder`."""
        with self.changed:
            heapq.heappop(self._waiting)
            want.state, want.feeder, want.asked_at = "asked", feeder, time.monotonic()
            want.attempts += 1

    def ready(self, want: Want) -> None:
        with self.changed:
            want.state = "ready"
            self.changed.notify_all()

    def again(self, want: Want, counts: bool, why: str) -> None:
        """Have the row asked for again; if the attempt `counts` and was the last, it fails because of `why`."""
        with self.changed:
            if counts and want.attempts >= ATTEMPTS:
                self._fail(want, f"{why} ({want.attempts} attempts)")
                return
            if not counts:
                want.attempts -= 1
            self.reasked += 1
            want.state, want.received, want.digest = "waiting", 0, xxhash.xxh3_64()
            heapq.heappush(self._waiting, (want.sequence, want))

    def fail(self, want: Want, why: str) -> None:
        """The row can't be had."""
        with self.changed:
            self._fail(want, why)

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
            heapq.heappush(self._waiting, (want.sequence, want))

    def _fail(self, want: Want, why: str) -> None:
        want.state, want.failure = "failed", StreamError(f"{want.feeder} could not give {want.key}: {why}")
        self.changed.notify_all()
