"""What a long-running process says: one line per event, with time, role and number, for people or as JSON.

    2026-11-29 22:43:01 drafter 0 | step 10/60  loss 3.1415 …
    {"time": "2026-11-29T22:43:01.250Z", "level": "info", "role": "drafter", "rank": 0, "event": "step", "message": "…", "loss": 3.1415}

Modules log with `logging.getLogger(__name__)`; a process calls `start` once. Lines go to standard error. The package's own events are shown
from `Settings.level` on, those of libraries from warnings on; handlers that libraries brought along are removed, so that their lines look the same.
What C++ code writes to the descriptor itself stays as it is. Values of environment variables that look like credentials, and
passwords in addresses, are replaced by `***` in whatever is logged. Costs some 60 µs a line, and 0.2 µs a detail that is not shown.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
FORMAT_VARIABLE, LEVEL_VARIABLE = "DFLASH_MP_LOG_FORMAT", "DFLASH_MP_LOG_LEVEL"

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_SECRET_LENGTH = 8  # shorter values are words that may stand in any line
_PASSWORD_IN_ADDRESS = re.compile(r"(\w://[^\s/@:]*):[^\s/@]+@")
_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [a-z]+( \d+)? \| |\{\"time\": ")
_COLOURS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}


@dataclass(frozen=True)
class Settings:
    """How a process logs: `format` is one of `FORMATS`, `level` one of `LEVELS`."""

    format: str = "text"
    level: str = "info"

    @staticmethod
    def of(environment: Mapping[str, str]) -> Settings:
        """Those that a parent handed on; unknown values count as the default."""
        chosen = environment.get(FORMAT_VARIABLE, "").lower(), environment.get(LEVEL_VARIABLE, "").lower()
        return Settings(
            chosen[0] if chosen[0] in FORMATS else Settings.format,
            chosen[1] if chosen[1] in LEVELS else Settings.level,
        )

    def environment(self) -> dict[str, str]:
        """What hands these settings on to a child."""
        return {FORMAT_VARIABLE: self.format, LEVEL_VARIABLE: self.level}


DEFAULT = Settings()


@dataclass(frozen=True)
class Speaker:
    """Who speaks: `role` is feeder, drafter, run or a command's name; `rank` the feeder's or drafter's number, if it has one."""

    role: str
    rank: int | None = None

    @property
    def name(self) -> str:
        return self.role if self.rank is None else f"{self.role} {self.rank}"


def facts(event: str, **fields: Any) -> dict[str, Any]:
    """For `extra=` of a log call: the event's short name and figures, which become keys of the JSON object."""
    return {"event": event, "fields": fields}


def start(speaker: Speaker, settings: Settings, out: TextIO | None = None) -> None:
    """Have this process log as `speaker`, to `out` or to what is standard error at the time. A second call replaces the first."""
    root, own = logging.getLogger(), logging.getLogger("dflash_mp")
    for handler in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(handler)
    root.addHandler(_Handler(speaker, settings, out))
    own.setLevel(settings.level.upper())
    root.setLevel(max(own.level, logging.WARNING))
    logging.captureWarnings(True)
    _adopt_libraries()
    if settings.format == "json":
        sys.excepthook = _log_uncaught


def tells_errors() -> bool:
    """Whether the error that ends this process belongs into its log: that is JSON, or the process is a part of a run."""
    own = [handler for handler in logging.getLogger().handlers if isinstance(handler, _Handler)]
    return any(handler.settings.format == "json" or handler.speaker.rank is not None for handler in own)


def is_line(text: str) -> bool:
    """Whether `text` is a line that some process's log wrote, so that it already says when and who."""
    return _LINE.match(text) is not None


def line(speaker: Speaker, settings: Settings, message: str, level: int = logging.INFO) -> str:
    """The line for `message`, for output that doesn't go through `logging`."""
    record = logging.LogRecord("dflash_mp", level, "", 0, message, None, None)
    return _formatter(speaker, settings, colour=False).format(record)


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without the values of credentials in `environment` (default: this process's) and without passwords in addresses."""
    for name, value in (os.environ if environment is None else environment).items():
        if len(value) >= _SECRET_LENGTH and _SECRET_NAME.search(name) and value in text:
            text = text.replace(value, "***")
    return _PASSWORD_IN_ADDRESS.sub(r"\1:***@", text)


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # takes no type before Python 3.11


class _Handler(_StreamHandler):
    """Writes to `out`, or to what is standard error when an event happens."""

    def __init__(self, speaker: Speaker, settings: Settings, out: TextIO | None) -> None:
        self.speaker, self.settings, self._out = speaker, settings, out
        logging.Handler.__init__(self)
        self.setFormatter(_formatter(speaker, settings, "NO_COLOR" not in os.environ and self.stream.isatty()))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return self._out or sys.stderr

    def handleError(self, record: logging.LogRecord) -> None:
        """A terminal that hung up and a pipe whose reader ended get nothing more; other errors are told as logging does."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError) and error.errno in (errno.EIO, errno.EPIPE):
            to_nowhere(self.stream)
        else:
            super().handleError(record)


def to_nowhere(stream: TextIO) -> None:
    """Let `stream`, whose reader is gone, write to /dev/null. What it has buffered would fail again, at the latest when the process ends, and
    make its exit code 120."""
    with contextlib.suppress(OSError):  # a stream without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class _TextFormatter(logging.Formatter):
    """One line; a traceback follows on lines of its own, indented."""

    def __init__(self, speaker: Speaker, colour: bool) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._name, self._colour = speaker.name, colour

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno in (logging.INFO, logging.DEBUG) else f"{record.levelname.lower()}: "
        text = f"{self.formatTime(record, self.datefmt)} {self._name} | {level}{_message(record)}"
        if record.exc_info:
            trace = redacted(self.formatException(record.exc_info))
            text += "".join(f"\n    {one}" for one in trace.splitlines())
        colour = _COLOURS.get(record.levelno) if self._colour else None
        return f"\x1b[{colour}m{text}\x1b[0m" if colour else text


class _JsonFormatter(logging.Formatter):
    """One object: time (UTC), level, role, rank, event (when it has a name), message, then the event's own figures."""

    def __init__(self, speaker: Speaker) -> None:
        super().__init__()
        self._speaker = speaker

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        tree: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "role": self._speaker.role,
            "rank": self._speaker.rank,
        }
        event = getattr(record, "event", None)
        if event:
            tree["event"] = event
        tree["message"] = _message(record)
        if record.exc_info:
            tree["traceback"] = redacted(self.formatException(record.exc_info))
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        tree.update({name: _plain(value) for name, value in fields.items() if name not in tree})
        return json.dumps(tree, ensure_ascii=False)


def _formatter(speaker: Speaker, settings: Settings, colour: bool) -> logging.Formatter:
    return _JsonFormatter(speaker) if settings.format == "json" else _TextFormatter(speaker, colour)


def _message(record: logging.LogRecord) -> str:
    """On one line. Redacted before that, and before JSON encodes it: both change what is looked for."""
    return " ".join(part.strip() for part in redacted(record.getMessage()).splitlines() if part.strip())


def _plain(value: Any) -> Any:
    """What JSON can say. It has no NaN: null says that there is no figure."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, int) else redacted(str(value))


def _adopt_libraries() -> None:
    """Take away the handlers that libraries gave themselves for the terminal; what they log then reaches the process's own."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            for handler in [one for one in logger.handlers if type(one) is logging.StreamHandler]:
                logger.removeHandler(handler)
                logger.propagate = True


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    text = traceback.format_exception_only(kind, error)[-1].strip()
    logging.getLogger("dflash_mp").critical("%s", text, exc_info=(kind, error, trace))
