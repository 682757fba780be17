"""When a row is in its buffer: at once, or when copies from a device that are still under way have ended.

`torch.cuda.Event` is an `Arrival`. Whoever starts a row keeps its buffer, and reads nothing of it, until `synchronize` has returned or
`query` has said True; both raise what went wrong on the device meanwhile.
"""

from __future__ import annotations

from typing import Protocol


class Arrival(Protocol):
    """The end of something that was started."""

    def query(self) -> bool:
        """Whether it has ended. Doesn't wait."""

    def synchronize(self) -> None:
        """Wait for the end."""


class _Arrived:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


ARRIVED: Arrival = _Arrived()
