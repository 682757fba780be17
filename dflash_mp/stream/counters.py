"""What both ends of the stream have counted, as snapshots that any thread may take at any time.

A snapshot holds the locks that it needs for microseconds: it delays neither a feeder's I/O nor a drafter's training.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from dflash_mp.stream.client_io import ClientIo
from dflash_mp.stream.feeder_io import FeederIo
from dflash_mp.stream.feeder_peers import Peers, TimeSpent
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.slots import SlotPool


@dataclass(frozen=True)
class PeerCounters:
    """One connected drafter, since it connected."""

    rank: int
    rows: int
    outstanding: int


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
    drafters: tuple[PeerCounters, ...]


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
    everyone, delivered, made = (
        peers.all(),
        peers.delivered,
        peers.rows,
    )  # in this order: what is delivered has been made
    _, since = peers.busy or (None, time.monotonic())
    return FeederCounters(
        made_rows=made,
        made_tokens=made * layout.row_tokens,
        delivered_rows=delivered,
        delivered_bytes=delivered * layout.nbytes,
        time_spent=peers.time_spent(),
        queued_rows=peers.queued(),
        held_rows=peers.held(),
        slot_bytes=(pool.made + peers.ring_rows()) * layout.nbytes,
        current_row_seconds=max(0.0, time.monotonic() - since),
        errors={
            "malformed": io.malformed,
            "refused": io.refused,
            "silent": io.silent,
            "disconnected": io.disconnected,
            "row_retryable": peers.failed_rows[True],
            "row_final": peers.failed_rows[False],
        },
        drafters=tuple(PeerCounters(peer.hello.rank, peer.rows, peer.outstanding) for peer in everyone),
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
