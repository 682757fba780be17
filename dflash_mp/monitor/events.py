"""The last warnings and errors that a process logged, for those who look from elsewhere.

A handler on the package's logger: it stores the text (redacted as in the log, cut to `_CHARACTERS`), at most `_KEPT` of them, and counts by level.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from dflash_mp.logs import redacted

_KEPT = 50
_CHARACTERS = 500
LEVELS = ("warning", "error")


class EventLog(logging.Handler):
    """`attach` it; `counts` are totals by level."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts = dict.fromkeys(LEVELS, 0)
        self._events: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    def attach(self) -> None:
        """Listen to all that the package logs."""
        logging.getLogger("dflash_mp").addHandler(self)

    def detach(self) -> None:
        """Listen no more."""
        logging.getLogger("dflash_mp").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        level = "error" if record.levelno >= logging.ERROR else "warning"
        self.counts[level] += 1
        text = redacted(record.getMessage())[:_CHARACTERS]
        self._events.append({"time": record.created, "level": level, "text": text})

    def last(self) -> list[dict[str, Any]]:
        """Time (seconds since the epoch), level and text of each, the oldest first."""
        return list(self._events)
