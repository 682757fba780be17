"""The errors that people read.

Every failure that a user can cause or cure is a `DflashError`: the command line prints its text (what happened, where, and what
to do) without a traceback and exits with its `exit_code`. Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations


class DflashError(Exception):
    """Something went wrong that the user can act on. `remedy` says how; it is printed on a line of its own."""

    exit_code = 1

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  → {self.remedy}" if self.remedy else self.what


class ConfigError(DflashError):
    """The configuration is wrong: unknown key, wrong type, or values that cannot go together."""

    exit_code = 2


class DataError(DflashError):
    """A data file or a prepared dataset cannot be used."""

    exit_code = 3


class TargetError(DflashError):
    """The target model or its tokenizer cannot be used."""

    exit_code = 4


class StreamError(DflashError):
    """A feeder or a drafter refused, vanished, stalled or broke the protocol."""

    exit_code = 5


class CheckpointError(DflashError):
    """A checkpoint or an export cannot be read or written."""

    exit_code = 6
