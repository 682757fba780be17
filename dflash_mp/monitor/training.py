"""What the training last reported, kept for the metrics endpoint."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainingRecord:
    """Written by the training's thread at each line of metrics, read by the endpoint's. `tokens_per_step` may be set later."""

    steps: int = 0
    tokens_per_step: int = 0
    _first: int | None = None
    _step: int = 0
    _figures: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def resume(self, step: int) -> None:
        """Training begins after this step."""
        with self._lock:
            self._first = self._step = step

    def update(self, kind: str, step: int, figures: Mapping[str, Any]) -> None:
        """The figures of a line of metrics; `kind`: train or held_out."""
        with self._lock:
            self._figures[kind] = dict(figures)
            self._step = max(step, self._step)
            if self._first is None:
                self._first = step

    def read(self) -> tuple[int, int, dict[str, Mapping[str, Any]]]:
        """The last step, the tokens trained on in this process's time, and the last figures by kind."""
        with self._lock:
            steps = self._step - (self._step if self._first is None else self._first)
            return self._step, steps * self.tokens_per_step, dict(self._figures)
