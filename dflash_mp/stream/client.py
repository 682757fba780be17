"""A drafter rank's end of the stream.

`RowClient` gives rows by key, in the order scheduled, as views of preallocated memory. What a row holds depends on its key alone: which
feeder made it, or how often it had to be asked for, cannot be seen in it. Rows are asked for ahead, as many as fit `window_mib`.
Every wait is bounded, and its `StreamError` names the rank, the row, the feeder and the seconds, and whether that feeder is dead, busy, or
none is left. A received byte is copied once on this side: from the socket's message into its place in the slot. Where a feeder shares its memory
none is copied: views are of the feeder's ring, can only be read, and stay valid until their release, even if the feeder dies.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

import torch

from dflash_mp.config import RunConfig, StreamConfig
from dflash_mp.data.row import RowKey
from dflash_mp.errors import StreamError
from dflash_mp.stream.client_io import ClientIo
from dflash_mp.stream.client_link import Link
from dflash_mp.stream.client_patience import Patience, StopRequest
from dflash_mp.stream.counters import ClientCounters, client_counters
from dflash_mp.stream.curve import refusal_behind
from dflash_mp.stream.endpoints import check_endpoint
from dflash_mp.stream.handshake import INBAND, SHARED_MEMORY, expectations
from dflash_mp.stream.keys import DrafterKeys
from dflash_mp.stream.lane_request import lane_wishes
from dflash_mp.stream.layout import RowLayout, RowTensors
from dflash_mp.stream.messages import VERSION, Bye, Expectations, Hello
from dflash_mp.stream.pace import FeedersPace, PaceMeter
from dflash_mp.stream.plan import StreamPlan
from dflash_mp.stream.roster import Roster
from dflash_mp.stream.slots import DeferredSlots
from dflash_mp.stream.software import own_software
from dflash_mp.stream.weights import FrozenWeights, WeightsBuilder
from dflash_mp.stream.window import Want, Window

log = logging.getLogger(__name__)
_REMIND_SECONDS = 15.0
_HANG_UPS = 3  # in a handshake, before the reason is looked for
_SETTLE_SECONDS = 1.0  # how long other feeders may take to answer once one has


@dataclass(frozen=True)
class ClientStats:
    """Totals since the connection. `seconds_waited` was spent in `take`; `reasked` counts rows that had to be asked for again,
    `duplicates` rows that came twice, because the feeder asked first was late."""

    rows: int
    bytes: int
    seconds_waited: float
    reasked: int
    duplicates: int
    checksum_errors: int
    rows_by_feeder: dict[str, int]


class ReceivedRow:
    """A row in its slot, until `release` (or the end of a `with` block) gives the slot back. Views must not be read after that."""

    def __init__(self, want: Want, layout: RowLayout, client: RowClient) -> None:
        self.key = want.key
        self.feeder = want.feeder
        self.buffer: torch.Tensor = want.buffer  # the whole row: uint8 [layout.nbytes]
        self.layout = layout
        self._want: Want | None = want
        self._client = client

    @cached_property
    def tensors(self) -> RowTensors:
        """Typed views of `buffer`."""
        return self.layout.views(self.buffer)

    def release(self) -> None:
        """Give the memory back, once; later calls do nothing."""
        want, self._want = self._want, None
        if want is not None:
            self._client._release(want)

    def __enter__(self) -> ReceivedRow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _turned_away(link: Link) -> bool:
    """Whether it is of no use to wait for this feeder. One that is full may have room soon: of a drafter that died, say."""
    refusal = link.refusal
    return link.state == "refused" and refusal is not None and refusal.code != "full"


class RowClient:
    """One per drafter process. `connect`, then `fetch_weights`, `schedule` and `take`; `close` at the end (or use `with`)."""

    def __init__(
        self,
        endpoints: list[str],
        expects: Expectations,
        *,
        rank: int = 0,
        world: int = 1,
        plan: StreamPlan | None = None,
        stream: StreamConfig | None = None,
        held: int = 1,
        pin: bool = False,
        stop: Callable[[], StopRequest | None] = lambda: None,
        insecure_no_auth: bool = False,
        keys: DrafterKeys | None = None,
        shared_memory: bool = True,
        checksums: bool = False,
    ) -> None:
        """`plan` is that of the checkpoint that is resumed; `held` the most rows taken and not yet released at any time;
        `pin` asks for pinned slots (CUDA); `keys` are shown to feeders reached by tcp, which must have the pinned one. Memory is shared
        with feeders of this machine unless `shared_memory` is False; `checksums` has rows checksummed there as well. Raises `StreamError`
        if an endpoint may not be used.
        """
        self._stream = stream or StreamConfig()
        file = self._stream.feeders_file
        roster = Roster(endpoints, file, lambda each: check_endpoint(each, insecure_no_auth, keys is not None))
        endpoints = roster.endpoints
        if insecure_no_auth:
            log.warning(
                "rank %d: feed.insecure_no_auth is set: whoever answers at %s is taken for a feeder",
                rank,
                ", ".join(endpoints),
            )
        self._expects, self._rank, self._world, self._resumed = expects, rank, world, plan
        self._held, self._pin = held, pin
        self._incarnation = secrets.token_hex(8)
        window_bytes = int(self._stream.window_mib * 2**20)
        wishes = lane_wishes(rank, world, window_bytes=window_bytes, least=held + 1, pin=pin, checksums=checksums)
        self._io = ClientIo(
            endpoints,
            self._hello,
            f"rank {rank}",
            self._stream.silent_seconds,
            keys,
            wishes if shared_memory else None,
            roster,
        )
        self._layout: RowLayout | None = None
        self._pace = PaceMeter()
        self._patience = Patience(rank, self._stream.row_seconds, self._io, stop)
        self._closed = False

    @staticmethod
    def of(
        config: RunConfig,
        rank: int,
        world: int,
        *,
        plan: StreamPlan | None = None,
        held: int = 1,
        pin: bool = False,
        stop: Callable[[], StopRequest | None] = lambda: None,
    ) -> RowClient:
        """The client of this run's configuration."""
        return RowClient(
            config.feeder_endpoints(),
            expectations(config),
            rank=rank,
            world=world,
            plan=plan,
            stream=config.stream,
            held=held,
            pin=pin,
            stop=stop,
            insecure_no_auth=config.feed.insecure_no_auth,
            keys=None if config.stream.keys is None else DrafterKeys.load(config.stream.keys),
        )

    def connect(self) -> StreamPlan:
        """Wait at most `connect_seconds` for a feeder; others may join later. Returns what is served.

        Raises `StreamError` if none answers, one refuses, two serve different rows, or the window is too small.
        """
        self._io.start()
        self._await_feeder()
        self._io.settled()
        plan = self._io.plan
        if plan is None:
            raise RuntimeError("a live feeder without a plan")
        self._layout = RowLayout.of(plan)
        slots = self._make_slots(self._layout)
        if any(link.ring is None for link in self._io.live()):
            slots.make()
        self._io.window = Window(slots.slots, self._io.wake)
        self._raise_if_broken()
        return plan

    def fetch_weights(self) -> FrozenWeights:
        """The target's embedding and head. Raises `StreamError` if nothing comes for `row_seconds`, or it arrives corrupted twice."""
        plan = self._connected_plan()
        weights = WeightsBuilder(plan)
        self._io.weights = weights
        self._io.wake()
        received, deadline = 0, time.monotonic() + self._stream.row_seconds
        with self._io.changed:
            while not weights.done:
                self._raise_if_broken()
                if weights.bytes_received != received:
                    received, deadline = weights.bytes_received, time.monotonic() + self._stream.row_seconds
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StreamError(
                        f"rank {self._rank}: no more of the target's frozen weights came for {self._stream.row_seconds:g} s, "
                        f"after {received / 2**20:.1f} MiB: {self._io.describe()}",
                        "look at the feeder's log",
                    )
                self._io.changed.wait(min(left, 1.0))
        return weights.result()

    def schedule(self, keys: Iterator[RowKey]) -> None:
        """Rows that will be taken, in order, after those scheduled before. Read lazily, as the window has room."""
        self._connected_window().schedule(keys)
        self._io.wake()

    def take(self, key: RowKey) -> ReceivedRow:
        """Wait at most `row_seconds` for the row. Rows must be taken in the order scheduled; at most `held` may be unreleased.

        After a request to stop the wait ends early, with `StoppedWaiting`.
        """
        window = self._connected_window()
        want = window.take(key, self._stream.row_seconds, self._patience.too_late, self._patience.unwanted)
        return ReceivedRow(want, self._connected_layout(), self)

    @property
    def stats(self) -> ClientStats:
        window = self._connected_window()
        return ClientStats(
            rows=window.rows,
            bytes=window.rows * self._connected_layout().nbytes,
            seconds_waited=window.seconds_waited,
            reasked=window.reasked,
            duplicates=window.duplicates,
            checksum_errors=self._io.checksum_errors,
            rows_by_feeder={link.endpoint: link.rows for link in self._io.links},
        )

    def counters(self) -> ClientCounters:
        """Totals since the start, connected or not yet. Any thread may call."""
        return client_counters(self._io)

    def feeding(self) -> FeedersPace:
        """What the connected feeders could make, whatever this rank takes."""
        return self._pace.read({link.endpoint: link.pong for link in self._io.live()})

    @property
    def lanes(self) -> dict[str, str]:
        """The lane of each feeder that is connected, by its address."""
        return {link.endpoint: INBAND if link.ring is None else SHARED_MEMORY for link in self._io.live()}

    @property
    def described_lanes(self) -> dict[str, str]:
        """The same in words, with the reason where a lane is not the better one."""
        return {link.endpoint: link.describe_lane() for link in self._io.live()}

    def close(self, bye: Bye | None = None) -> None:
        """Take leave of the feeders (at most a second or so). Slots not yet released stay readable."""
        if not self._closed:
            self._closed = True
            self._io.close(bye or Bye("done", "the drafter has all its rows"))

    def __enter__(self) -> RowClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(None if kind is None else Bye("failed", f"the drafter failed: {kind.__name__}"))

    # -- private ------------------------------------------------------------------------------------------------------------------

    def _hello(self, plan: StreamPlan | None) -> Hello:
        return Hello(
            version=VERSION,
            peer=f"rank {self._rank}",
            incarnation=self._incarnation,
            rank=self._rank,
            world=self._world,
            expects=self._expects,
            plan=self._resumed or plan,
            lanes=(INBAND,),
            software=own_software(),
            running_checksums=True,
        )

    def _await_feeder(self) -> None:
        start = time.monotonic()
        deadline, reminder = start + self._stream.connect_seconds, start + _REMIND_SECONDS / 5
        settled: float | None = None
        while True:
            with self._io.changed:
                self._raise_if_broken()
                now = time.monotonic()
                live = self._io.live()
                if live and settled is None:
                    settled = now + _SETTLE_SECONDS
                if settled is not None and (len(live) == len(self._io.links) or now >= settled):
                    return
                if now >= deadline or all(_turned_away(link) for link in self._io.links):
                    raise StreamError(
                        f"rank {self._rank}: no feeder after {now - start:.0f} s: {self._io.describe()}",
                        "start the feeders (dflash-mp feed), check feed.endpoints, or raise stream.connect_seconds",
                    )
                if settled is None and now >= reminder:
                    reminder = now + _REMIND_SECONDS
                    log.warning("rank %d: waiting for a feeder: %s", self._rank, self._io.describe())
                self._io.changed.wait(min(0.2, deadline - now))
            self._find_wrong_keys()

    def _find_wrong_keys(self) -> None:
        """A feeder with another key than the pinned one just hangs up, as does a tunnel without a feeder: ask which it is."""
        for link in self._io.links:
            if link.state == "connecting" and link.hung_up >= _HANG_UPS and link.hung_up % _HANG_UPS == 0:
                refusal = refusal_behind(link.endpoint, link.keys is not None)
                if refusal is not None:
                    self._raise_if_broken()
                    raise StreamError(f"rank {self._rank}: {link.endpoint}: {refusal.reason}", refusal.remedy)

    def _make_slots(self, layout: RowLayout) -> DeferredSlots:
        count = int(self._stream.window_mib * 2**20) // layout.nbytes
        if count < self._held + 1:
            raise StreamError(
                f"rank {self._rank}: stream.window_mib is {self._stream.window_mib:g}, but {self._held} rows are in use at once and "
                f"one must be under way, of {layout.nbytes / 2**20:.2f} MiB each",
                f"set stream.window_mib to at least {math.ceil((self._held + 1) * layout.nbytes / 2**20 * 100) / 100}",
            )
        return DeferredSlots(count, layout.nbytes, pin=self._pin, remedy="lower stream.window_mib")

    def _release(self, want: Want) -> None:
        if want.loan is not None:
            self._io.give_back(want.loan)
        self._connected_window().release(want)
        self._io.wake()

    def _raise_if_broken(self) -> None:
        if self._io.broken is not None:
            raise self._io.broken

    def _connected_plan(self) -> StreamPlan:
        self._raise_if_broken()
        if self._io.plan is None:
            raise RuntimeError("connect first")
        return self._io.plan

    def _connected_window(self) -> Window:
        if self._io.window is None:
            raise RuntimeError("connect first")
        return self._io.window

    def _connected_layout(self) -> RowLayout:
        if self._layout is None:
            raise RuntimeError("connect first")
        return self._layout
