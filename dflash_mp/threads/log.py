"""What a drafter did, step by step, in a file that survives the process: `drafter-N.jsonl`.

One line per completed step, one per new kind of error with its traceback, and the counts of errors at most once a second and at the end.
`read_log` makes the same of a file cut short by a kill as of a whole one.
"""

from __future__ import annotations

import json
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

_COUNTS_SECONDS = 1.0
_KIND_CHARACTERS = 100


@dataclass(frozen=True)
class Step:
    """A completed optimizer step. `at`: seconds from the common start to its end; `seconds`: its wall time, waiting included."""

    step: int
    at: float
    seconds: float
    loss: float
    eager: int  # calls of compiled layers that did not run compiled


@dataclass
class DrafterLog:
    """A drafter's log, read back."""

    steps: list[Step] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    tracebacks: dict[str, str] = field(default_factory=dict)


class LogWriter:
    """Writes one drafter's log. `last_event` is when something last happened to it, on `time.monotonic`."""

    def __init__(self, file: Path) -> None:
        self._lines = file.open("w", encoding="utf-8")
        self._started, self._counted = time.monotonic(), 0.0
        self._errors: Counter[str] = Counter()
        self.last_event = self._started

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._counts()
        self._lines.close()

    def begin(self, started: float) -> None:
        """The common start, on `time.monotonic`."""
        self._started = self.last_event = started

    def step(self, step: int, seconds: float, loss: float, eager: int) -> None:
        """A step was completed just now."""
        self.last_event = time.monotonic()
        at = self.last_event - self._started
        self._write({"step": step, "at": at, "seconds": seconds, "loss": loss.hex(), "eager": eager})

    def error(self, error: BaseException) -> None:
        """A step failed just now."""
        self.last_event = time.monotonic()
        kind = kind_of(error)
        self._errors[kind] += 1
        if self._errors[kind] == 1:
            self._write({"kind": kind, "traceback": "".join(traceback.format_exception(error))})
        if self.last_event - self._counted > _COUNTS_SECONDS:
            self._counts()

    def _counts(self) -> None:
        self._counted = time.monotonic()
        if self._errors:
            self._write({"errors": self._errors})

    def _write(self, line: dict[str, Any]) -> None:
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()


def log_file(directory: Path, number: int) -> Path:
    """Where drafter `number` writes its log."""
    return directory / f"drafter-{number}.jsonl"


def read_log(file: Path) -> DrafterLog:
    """Read a log; a last line that is incomplete is left out, a missing file is an empty log."""
    log = DrafterLog()
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    for text in lines:
        line = json.loads(text)
        if "step" in line:
            log.steps.append(Step(**{**line, "loss": float.fromhex(line["loss"])}))
        elif "kind" in line:
            log.tracebacks[line["kind"]] = line["traceback"]
            log.errors.setdefault(line["kind"], 1)
        else:
            log.errors.update(line["errors"])
    return log


def kind_of(error: BaseException) -> str:
    """A short name for errors of one cause: type and beginning of the message, of the inner error where a compiler wrapped one."""
    inner = getattr(error, "inner_exception", None) or error
    first = next((line.strip() for line in str(inner).splitlines() if line.strip()), "")
    wrapper = f"{type(error).__name__} from " if inner is not error else ""
    return f"{wrapper}{type(inner).__name__}: {first[:_KIND_CHARACTERS]}"
