"""The time that fuzzed code sees: drawn from a seed, for rows are dealt by how long they took, and the machine's own time repeats nothing."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

_CALL_SECONDS = 1e-6
_STEP_SECONDS = (1e-4, 1e-4, 1e-4, 1e-4, 1e-3, 0.02)  # a feeder that is usual, or late
_RARELY = 0.002
_RARE_SECONDS = (0.5, 3.0, 30.0)  # stopped for so long that others take its rows over


class FuzzTime:
    """`time.monotonic` within `step`."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(f"{seed} time")
        self._now = 0.0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Some time has passed since the last step; each look at the clock takes some more. For code on one thread."""
        rare = self._draw.random() < _RARELY
        self._now += self._draw.choice(_RARE_SECONDS if rare else _STEP_SECONDS)
        real, time.monotonic = time.monotonic, self._look
        try:
            yield
        finally:
            time.monotonic = real

    def _look(self) -> float:
        self._now += _CALL_SECONDS
        return self._now
