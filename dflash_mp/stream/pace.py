"""How fast the feeders could be, seen from a drafter: what their pongs say of rows made and of the time that took.

Time in which a feeder waited for drafters doesn't count, so this is what it could make, not what it makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflash_mp.stream.messages import Pong


@dataclass(frozen=True)
class FeedersPace:
    """`feeders` are connected, and could make `rows_per_second` together; None as long as none has said enough."""

    feeders: int
    rows_per_second: float | None


class PaceMeter:
    """Differences between pongs of each feeder."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, float]] = {}

    def read(self, pongs: Mapping[str, Pong | None]) -> FeedersPace:
        """The pace since the first reading, of the live feeders `pongs` by address. One that hasn't made a row is taken for an average one."""
        paces = [pace for name, pong in pongs.items() if pong is not None and (pace := self._pace(name, pong))]
        return FeedersPace(len(pongs), len(pongs) * sum(paces) / len(paces) if paces else None)

    def _pace(self, name: str, pong: Pong) -> float | None:
        rows, seconds = self._first.setdefault(name, (pong.rows, pong.computing_seconds))
        if pong.rows < rows or pong.computing_seconds < seconds:  # it was started again
            rows, seconds = self._first[name] = (0, 0.0)
        made, spent = pong.rows - rows, pong.computing_seconds - seconds
        return made / spent if made > 0 and spent > 0 else None
