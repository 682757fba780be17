"""How long a drafter waits for a row, and what it says meanwhile and in the end.

Every error names the rank, the row, the feeders and the seconds, and tells a feeder that is dead from one that is busy, and one that
is busy from one that is stuck: its process answers, its target does not come to an end.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from dflash_mp.errors import StreamError
from dflash_mp.stream.client_io import ClientIo
from dflash_mp.stream.window import Want

log = logging.getLogger(__name__)
REMIND_SECONDS = 15.0
# After a request to stop, a row may still come for so long, and the step be finished; torchrun kills after 30 s.
_STOP_SECONDS = 5.0  # from a feeder that lives
_STOP_ALONE_SECONDS = 1.0  # when none does


@dataclass(frozen=True)
class StopRequest:
    """That this process was asked to stop, by which signal, and when (monotonic)."""

    number: signal.Signals
    at: float


class StoppedWaiting(StreamError):
    """This process, or another rank, was asked to stop while this one waited for a row, and the row did not come soon."""


class Patience:
    """That of rank `rank` with a row, for `row_seconds` or until `stop` says that the process is to stop."""

    def __init__(self, rank: int, row_seconds: float, io: ClientIo, stop: Callable[[], StopRequest | None]) -> None:
        self._rank, self._row_seconds, self._io, self._stop = rank, row_seconds, io, stop
        self._reminded = 0.0

    def too_late(self, want: Want) -> StreamError:
        """The error of a row that did not come in time."""
        start = f"rank {self._rank}: {want.key} did not come within {self._row_seconds:g} s"
        if want.state == "come":
            return StreamError(
                f"{start}: all of it is here, its checksum has not been taken yet; {self._io.describe()}",
                "this process had no time for it: look at what else runs on the machine, or raise stream.row_seconds",
            )
        if not self._io.live():
            return StreamError(
                f"{start}: no feeder is left: {self._io.describe()}",
                "start a feeder again (dflash-mp feed); the run goes on from its last checkpoint",
            )
        now = time.monotonic()
        asked = ", ".join(f"{r.feeder} was asked {now - r.asked_at:.0f} s ago" for r in want.requests)
        asked = asked or "it was asked of nobody"
        remedy = "look at the feeder's log; if a row takes that long, raise stream.row_seconds"
        if any(link.stuck_for(now) for link in self._io.live()):
            remedy = "the feeder answers, its target does not: look at its log, and start it again; the run goes on from its last checkpoint"
        return StreamError(f"{start}: {asked}; {self._io.describe()}", remedy)

    def unwanted(self, want: Want, start: float) -> StoppedWaiting | None:
        """Whether to wait no longer for a row, because the process is to stop. Called now and then while it waits."""
        self._remind(want, start)
        stop = self._stop()
        if stop is None:
            return None
        patience = _STOP_SECONDS if self._io.live() else _STOP_ALONE_SECONDS
        if time.monotonic() - max(start, stop.at) < patience:
            return None
        return StoppedWaiting(
            f"rank {self._rank}: stopped by {stop.number.name} while waiting for {want.key}, which did not come within "
            f"{patience:g} s more: {self._io.describe()}",
            "the same command resumes from the last step that was finished",
        )

    def _remind(self, want: Want, start: float) -> None:
        """A wait that is long says so, from time to time."""
        now = time.monotonic()
        if now - max(start, self._reminded) > REMIND_SECONDS:
            self._reminded = now
            log.warning(
                "rank %d: has waited %.0f s for %s, and gives up after %g s: %s",
                self._rank,
                now - start,
                want.key,
                self._row_seconds,
                self._io.describe(),
            )
