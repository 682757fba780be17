"""A feeder: makes rows on request and serves them, with the target's frozen weights, to any number of drafters.

`FeederService` holds no state of the run: what it serves is a function of the plan. `serve` computes in the caller's thread while an
I/O thread talks; a row is computed straight into the slot that it is sent from, and is not copied again on this side. Where `compute` leaves a
row to a device, the next one is started before it has arrived, one at most. Memory is
bounded by `memory_mib`, whatever peers do. A `compute` that raises costs its row only: the drafter gets the reason. Failures of the
service itself (address taken, too little memory) are `StreamError`; an I/O thread that dies takes `serve` with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch
import xxhash

from dflash_mp.data.row import RowKey
from dflash_mp.errors import DflashError, StreamError
from dflash_mp.stream.arrival import ARRIVED, Arrival
from dflash_mp.stream.codec import printable
from dflash_mp.stream.counters import FeederCounters, feeder_counters
from dflash_mp.stream.feeder_io import FeederIo
from dflash_mp.stream.feeder_peer import Job
from dflash_mp.stream.feeder_peers import SLOTS_PER_PEER, Peers
from dflash_mp.stream.feeder_snapshot import DrafterStatus, Snapshot
from dflash_mp.stream.keys import FeederKeys
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.messages import Bye, reason
from dflash_mp.stream.plan import StreamPlan
from dflash_mp.stream.slots import SlotPool
from dflash_mp.stream.weights import FrozenWeights, WeightsServer

Compute = Callable[[RowKey, torch.Tensor], "Arrival | None"]
log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_ARRIVAL_POLL_SECONDS = 0.0005  # between two looks at a row that a device computes, while nobody asks for another


@dataclass(frozen=True)
class FeederStatus:
    """What a feeder did in the last `seconds`. The three shares are of the compute thread's time."""

    seconds: float
    rows: int  # since the start
    rows_per_second: float
    tokens_per_second: float
    gigabytes_per_second: float
    computing: float
    idle: float  # waited for drafters to ask
    blocked: float  # waited for drafters to take
    malformed: int  # messages refused since the start
    drafters: tuple[DrafterStatus, ...]

    @property
    def possible_rows_per_second(self) -> float:
        """The rate of rows if it never had to wait; 0 when it made none."""
        return self.rows_per_second / self.computing if self.computing > 0 else 0.0

    def line(self) -> str:
        """The status on one line."""
        connected = ", ".join(f"{printable(d.name)} ({d.lane}, {d.outstanding} asked)" for d in self.drafters) or "none"
        waits = "nothing"
        if max(self.idle, self.blocked) >= 0.05:
            waits = "drafters to ask" if self.idle >= self.blocked else "drafters to take"
        return (
            f"{self.rows} rows | {self.rows_per_second:.2f} rows/s, {self.tokens_per_second:,.0f} tokens/s, "
            f"{self.gigabytes_per_second:.3f} GB/s | computing {self.computing:.0%}, idle {self.idle:.0%}, "
            f"blocked {self.blocked:.0%}: waits for {waits}, could make {self.possible_rows_per_second:.2f} rows/s | drafters: {connected}"
        )


class FeederService:
    """Listens from construction on; `serve` answers. A context manager: leaving it closes."""

    def __init__(
        self,
        endpoint: str,
        plan: StreamPlan,
        weights: FrozenWeights,
        *,
        run: str,
        silent_seconds: float = 15.0,
        memory_mib: float = 8192.0,
        insecure_no_auth: bool = False,
        keys: FeederKeys | None = None,
        pin: bool = False,
    ) -> None:
        """Take the address. `run` names the run's directory; with `keys`, only listed drafters get in by tcp; `pin` makes slots of
        memory pinned for the current CUDA device, which must be the target's.
        """
        self.plan = plan
        self.layout = RowLayout.of(plan)
        capacity = int(memory_mib * 2**20) // self.layout.nbytes
        if capacity < 1:
            needed = SLOTS_PER_PEER * self.layout.nbytes / 2**20
            raise StreamError(
                f"feed.memory_mib is {memory_mib:g}, but one row has {self.layout.nbytes / 2**20:.1f} MiB",
                f"set it to at least {needed:.0f} for each drafter that will connect",
            )
        pool = SlotPool(capacity, self.layout.nbytes, pin=pin)
        self._peers = Peers(pool, self.layout.nbytes, plan.data.held_out_rows)
        self._io = FeederIo(
            endpoint=endpoint,
            insecure_no_auth=insecure_no_auth,
            run=run,
            plan=plan,
            row_bytes=self.layout.nbytes,
            peers=self._peers,
            weights=WeightsServer(weights, plan),
            silent_seconds=silent_seconds,
            keys=keys,
            cuda_device=torch.cuda.current_device() if pin and torch.cuda.is_available() else None,
        )
        self._meter = _Meter(self._peers, self.layout)
        self._pool = pool
        self._coming: deque[_Coming] = deque()
        self._closed = False

    @property
    def endpoint(self) -> str:
        """The address listened on, with the port that was got."""
        return self._io.endpoint

    @property
    def slot_bytes(self) -> int:
        """Memory that rows take up now."""
        return (self._pool.made + self._peers.snapshot().ring_rows) * self.layout.nbytes

    def serve(self, compute: Compute, stop: threading.Event, stats_seconds: float = 10.0) -> None:
        """Answer drafters until `stop` is set, then take leave of them.

        `compute(key, buffer)` fills `buffer`, uint8 [layout.nbytes], with the row `key`, or starts that, and returns an `Arrival`
        that says when it is filled. A `DflashError` that either raises is passed on to the drafter as final; any other exception as worth
        another attempt, and is logged here with its traceback.
        """
        self._io.start()
        bye = Bye("failed", "the feeder failed; its own log says why")
        try:
            due = time.monotonic() + stats_seconds
            while not stop.is_set():
                if self._io.broken is not None:
                    raise StreamError("the feeder's I/O thread failed", "this is a bug: report it") from self._io.broken
                self._log_notes()
                self._turn(compute, _POLL_SECONDS)
                if time.monotonic() >= due:
                    log.info("%s", self.status().line())
                    due = time.monotonic() + stats_seconds
            self._settle(ahead=0)
            if (rest := self.status()).rows_per_second > 0:  # in the time since the last such line
                log.info("%s", rest.line())
            bye = Bye("stopped", "the feeder was told to stop")
        finally:
            self._settle(ahead=0)  # a device writes to their buffers
            self.close(bye)

    def status(self) -> FeederStatus:
        """What happened since the last call, or the start."""
        return self._meter.read(self._io.malformed)

    def counters(self) -> FeederCounters:
        """Totals since the start. Any thread may call."""
        return feeder_counters(self._peers, self._io, self._pool, self.layout)

    def close(self, bye: Bye | None = None) -> None:
        """Take leave of the drafters (at most two seconds) and give up the address."""
        if not self._closed:
            self._closed = True
            self._io.close(bye or Bye("stopped", "the feeder was closed"))
            self._log_notes()

    def __enter__(self) -> FeederService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _turn(self, compute: Compute, seconds: float) -> bool:
        """Start the next row, waiting at most `seconds` for one, and hand over what has arrived; whether there was one."""
        job = self._peers.next_job(_ARRIVAL_POLL_SECONDS if self._coming else seconds)
        if job is not None:
            started = time.monotonic()
            try:
                arrival = compute(job.key, job.transfer.slot.buffer) or ARRIVED
            except Exception as error:
                self._fail(job, error)
            else:
                self._coming.append(_Coming(job, arrival, started))
        self._settle(ahead=1)
        return job is not None

    def _settle(self, ahead: int) -> None:
        """Hand over the rows that have arrived, in the order in which they were started; wait for all but the `ahead` last ones."""
        while self._coming and (len(self._coming) > ahead or self._coming[0].arrived()):
            self._finish(self._coming.popleft())

    def _finish(self, coming: _Coming) -> None:
        """Wait until the row is there, and hand it over."""
        job, view = coming.job, coming.job.transfer.slot.view
        try:
            coming.arrival.synchronize()
        except Exception as error:
            self._fail(job, error)
            return
        self._peers.finish(job, xxhash.xxh3_64_intdigest(view) if job.peer.checksummed_whole else 0)
        log.debug("%s made in %.3f s", job.key, time.monotonic() - coming.started)
        self._io.wake()

    def _fail(self, job: Job, error: Exception) -> None:
        if isinstance(error, DflashError):
            log.error("%s can't be made: %s", job.key, error)
            self._peers.fail(job, reason(str(error)), retryable=False)
        else:
            log.error("%s could not be made", job.key, exc_info=error)
            self._peers.fail(job, reason(f"{type(error).__name__}: {error}"), retryable=True)
        self._io.wake()

    def _log_notes(self) -> None:
        for _ in range(len(self._io.notes)):  # not those that come meanwhile: there may always be more
            log.info("%s", self._io.notes.popleft())


@dataclass(frozen=True)
class _Coming:
    """A row that was started at `started`."""

    job: Job
    arrival: Arrival
    started: float

    def arrived(self) -> bool:
        """Whether waiting for it ends at once, be it with an error."""
        try:
            return self.arrival.query()
        except Exception:
            return True


class _Meter:
    """Differences of the peers' counters between two readings."""

    def __init__(self, peers: Peers, layout: RowLayout) -> None:
        self._peers, self._layout = peers, layout
        self._last = peers.snapshot()

    def read(self, malformed: int) -> FeederStatus:
        last, self._last = self._last, self._peers.snapshot()
        rows, computing, idle, blocked = (
            now - before for now, before in zip(_totals(self._last), _totals(last), strict=True)
        )
        seconds = max(computing + idle + blocked, 1e-9)
        rate = rows / seconds
        return FeederStatus(
            seconds=seconds,
            rows=self._last.made,
            rows_per_second=rate,
            tokens_per_second=rate * self._layout.row_tokens,
            gigabytes_per_second=rate * self._layout.nbytes / 1e9,
            computing=computing / seconds,
            idle=idle / seconds,
            blocked=blocked / seconds,
            malformed=malformed,
            drafters=self._last.drafters,
        )


def _totals(snapshot: Snapshot) -> tuple[float, float, float, float]:
    spent = snapshot.spent
    return snapshot.made, spent.computing, spent.idle, spent.blocked
