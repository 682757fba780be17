"""Directories that a run writes to, the clock that stamps what it writes, and the keys that it shows."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from dflash_mp.doctor.finding import Finding, gib, green, of_error, red, yellow
from dflash_mp.errors import DflashError
from dflash_mp.stream.keys import DrafterKeys, FeederKeys

_SKEW_SECONDS = 2.0
_EARLIEST = 1_735_689_600  # 2025-01-01: a clock before it was never set


def check_directory(about: str, directory: Path, needed: int, why: str) -> Finding:
    """Whether `directory`, or the nearest one above it that exists, can be written and has `needed` bytes free for `why`."""
    place = _nearest(directory)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return red(
            about,
            f"{place} can't be written: {error.strerror}",
            "change its owner or mode, or choose another directory",
        )
    free = shutil.disk_usage(place).free
    text = f"{directory}: {gib(free)} free"
    if free < needed:
        return red(about, f"{text}; {why} takes {gib(needed)}", "free space, or choose another directory")
    if free < 2 * needed:
        return yellow(about, f"{text}; {why} takes {gib(needed)}", "free space, or choose another directory")
    return green(about, f"{text}, writable" + (f"; {why} takes {gib(needed)}" if needed else ""))


def check_clock(directory: Path) -> Finding:
    """This host's clock against the file system's at `directory`, which may be another host's."""
    now, place = time.time(), _nearest(directory)
    if now < _EARLIEST:
        return red("clock", f"it says {time.strftime('%Y-%m-%d %H:%M')}", "set it (timedatectl set-ntp true)")
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=place) as file:
        before = time.time()
        file.write(b"x")
        file.flush()
        ahead = os.fstat(file.fileno()).st_mtime - (before + time.time()) / 2
        if abs(ahead) > _SKEW_SECONDS:
            return _skewed(f"the file system at {place}", ahead)
        return green("clock", f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, the file system agrees")
    return green(
        "clock", f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}; {place} can't be written, so nothing to compare it with"
    )


def check_other_clock(who: str, ahead: float, uncertain: float) -> Finding:
    """Another host's clock, `ahead` seconds of this one, give or take `uncertain`."""
    if abs(ahead) > _SKEW_SECONDS + uncertain:
        return _skewed(who, ahead)
    return green("clock", f"{who} agrees (±{_SKEW_SECONDS:g} s)")


def check_keys(directory: Path) -> list[Finding]:
    """The keys of the roles that this host has a secret for. Red if one can be read by others, is damaged, or none is there."""
    about, findings = "keys", []
    for role, load in (("feeder", FeederKeys.load), ("drafter", DrafterKeys.load)):
        if not (directory / f"{role}.secret").exists() and directory.is_dir():
            continue
        try:
            load(directory)
            findings.append(green(about, f"{directory}: the {role}'s keys are whole, and secret"))
        except DflashError as error:
            findings.append(of_error(about, error))
            if not directory.is_dir():
                break
    if not findings:
        findings.append(red(about, f"{directory} holds no secret key", "dflash-mp keygen makes one", 5))
    return findings


def _skewed(who: str, ahead: float) -> Finding:
    how = "ahead of" if ahead > 0 else "behind"
    return yellow(
        "clock", f"{who} is {abs(ahead):.1f} s {how} this host", "synchronise both (timedatectl set-ntp true)"
    )


def _nearest(directory: Path) -> Path:
    place = directory.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place
