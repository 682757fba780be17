"""What both ends of the stream have counted, as snapshots that any thread may take at any time.

A snapshot holds the locks that it needs for microseconds: it delays neither a feeder's I/O nor a drafter's training.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_mp.stream.client_io import ClientIo
from dflash_mp.stream.feeder_io import FeederIo
from dflash_mp.stream.feeder_peers import Peers
from dflash_mp.stream.feeder_snapshot import DrafterStatus, TimeSpent
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.slots import SlotPool


@dataclass(frozen=True)
class FeederCounters:
    """A feeder's totals since its start, and what it holds now."""

    made_rows: int
    made_tokens: int
    delivered_rows: int
    delivered_bytes: int
    time_spent: TimeSpent
    queued_rows: int
    held_rows: int
    slot_bytes: int
    current_row_seconds: float  # of the row in the making; 0 when there is none
    errors: dict[str, int]  # by kind
    drafters: tuple[DrafterStatus, ...]


@dataclass(frozen=True)
class ClientCounters:
    """A drafter's totals since its start, and the state of its window."""

    bytes: int
    rows_by_feeder: dict[str, int]
    connected: dict[str, bool]  # by feeder
    seconds_waited: float  # a wait that goes on included
    window: dict[str, int]  # rows by state
    window_bytes: int
    reasked: int
    duplicates: int
    errors: dict[str, int]  # by kind


def feeder_counters(peers: Peers, io: FeederIo, pool: SlotPool, layout: RowLayout) -> FeederCounters:
    """The counters of a feeder made of these."""
    now = peers.snapshot()
    return FeederCounters(
        made_rows=now.made,
        made_tokens=now.made * layout.row_tokens,
        delivered_rows=now.delivered,
        delivered_bytes=now.delivered * layout.nbytes,
        time_spent=now.spent,
        queued_rows=now.queued,
        held_rows=now.held,
        slot_bytes=(pool.made + now.ring_rows) * layout.nbytes,
        current_row_seconds=now.current_seconds,
        errors={
            "malformed": io.malformed,
            "refused": io.refused,
            "silent": io.silent,
            "disconnected": io.disconnected,
            "row_retryable": now.failed[True],
            "row_final": now.failed[False],
        },
        drafters=now.drafters,
    )


def client_counters(io: ClientIo) -> ClientCounters:
    """The counters of the drafter that talks through `io`, connected or not yet."""
    window, links = io.window, list(io.links)  # feeders may join and leave meanwhile
    return ClientCounters(
        bytes=0 if window is None else window.rows * io.row_bytes,
        rows_by_feeder={link.endpoint: link.rows for link in links},
        connected={link.endpoint: link.state == "live" for link in links},
        seconds_waited=0.0 if window is None else window.waited(),
        window={} if window is None else window.states(),
        window_bytes=0 if window is None else window.size * io.row_bytes,
        reasked=0 if window is None else window.reasked,
        duplicates=0 if window is None else window.duplicates,
        errors={**io.errors, "corrupted": io.checksum_errors},
    )
