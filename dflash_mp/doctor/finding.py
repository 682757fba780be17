"""What a check says: one line for people, green, yellow or red, with the remedy when it isn't green."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dflash_mp.errors import DflashError

Level = Literal["green", "yellow", "red"]
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """`red`: a run would fail or be wrong; `yellow`: it may; `exit_code` is that of `dflash_mp.errors` for a red one."""

    about: str
    level: Level
    found: str
    remedy: str = ""
    exit_code: int = 1
    details: tuple[str, ...] = ()  # how it was reckoned, a line each


def green(about: str, found: str, details: tuple[str, ...] = ()) -> Finding:
    return Finding(about, "green", found, details=details)


def yellow(about: str, found: str, remedy: str) -> Finding:
    return Finding(about, "yellow", found, remedy)


def red(about: str, found: str, remedy: str, exit_code: int = 1) -> Finding:
    return Finding(about, "red", found, remedy, exit_code)


def of_error(about: str, error: DflashError) -> Finding:
    """A red finding from what a run would end with."""
    return red(about, error.what, error.remedy, error.exit_code)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 if nothing is red, else the code of the first red finding."""
    return next((finding.exit_code for finding in findings if finding.level == "red"), 0)


def gib(nbytes: float) -> str:
    """Bytes in words."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB / 10 else f"{nbytes / 2**20:.1f} MiB"
