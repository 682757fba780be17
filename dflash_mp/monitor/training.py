"""What the training last reported, kept for the metrics endpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainingRecord:
    """Written by the training's thread, read by the endpoint's. `tokens_per_step` may be set later."""

    steps: int = 0
    tokens_per_step: int = 0
    _step: Callable[[], int] = lambda: 0
    _first: int = 0
    _figures: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def follow(self, step: Callable[[], int]) -> None:
        """Training begins; `step` says how many steps are finished, and may be asked by any thread."""
        with self._lock:
            self._step, self._first = step, step()

    def update(self, kind: str, figures: Mapping[str, Any]) -> None:
        """The figures of a line of metrics; `kind`: train or held_out."""
        with self._lock:
            self._figures[kind] = dict(figures)

    def read(self) -> tuple[int, int, dict[str, Mapping[str, Any]]]:
        """The steps finished, the tokens trained on in this process's time, and the last figures by kind."""
        with self._lock:
            step = self._step()
            return step, (step - self._first) * self.tokens_per_step, dict(self._figures)
