"""What a feeder knows of its drafters and of its own time, at one moment: plain data, made under the lock of `Peers`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TimeSpent:
    """Seconds of the compute thread since the start, by what it did."""

    computing: float = 0.0
    idle: float = 0.0  # no drafter wanted a row
    blocked: float = 0.0  # rows wanted, but every slot that may be used awaits its release


@dataclass(frozen=True)
class DrafterStatus:
    """One connected drafter. `rows` are those that it has received, `outstanding` those asked for and not delivered."""

    name: str
    rank: int
    lane: str
    outstanding: int
    rows: int


@dataclass(frozen=True)
class Snapshot:
    """All peers at one moment."""

    made: int  # rows, as the other numbers
    delivered: int
    failed: dict[bool, int]  # by whether another attempt may help
    queued: int
    held: int  # in slots: made or in the making, and not released
    ring_rows: int  # of memory in rings
    current_seconds: float  # of the row in the making; 0 when there is none
    spent: TimeSpent
    drafters: tuple[DrafterStatus, ...]
