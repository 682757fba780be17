"""Key files: who may take rows, and which feeder is the right one.

`keygen` writes a pair as NAME.public and NAME.secret (0600, in a directory of 0700) and never overwrites. One directory (`stream.keys`)
holds what a process needs: a feeder its feeder.secret and the allowed drafters' public keys (every *.public but feeder.public), a drafter
its drafter.secret and the feeder.public that it pins. Secrets are read once, at the start; a feeder's list of drafters again when the directory
changed (`AllowList`). Secrets stay out of every text: errors name paths only, and `repr` hides them. A secret that others can read, or a
directory that they can change, is refused. All failures are `StreamError`.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from dflash_mp.errors import StreamError

_FEEDER, _DRAFTER = "feeder", "drafter"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LOOK_SECONDS = 1.0
_HEADERS = {"public": "dflash-mp public key", "secret": "dflash-mp secret key"}


@dataclass(frozen=True)
class FeederKeys:
    """`drafters` gives the name of each allowed drafter's public key (32 bytes)."""

    secret: bytes = field(repr=False)  # Z85, as libzmq takes it
    drafters: dict[bytes, str] = field(repr=False)
    directory: Path | None = field(default=None, repr=False)

    @staticmethod
    def load(directory: Path) -> FeederKeys:
        """A feeder's part of `directory`."""
        _check_directory(directory)
        drafters = _read_drafters(directory)
        secret = _read(directory / f"{_FEEDER}.secret", "secret")
        if not drafters:
            raise StreamError(
                f"{directory} holds no drafter's public key, so the feeder would refuse everyone",
                "copy drafter.public of each drafters' host there, under any name that ends in .public",
            )
        return FeederKeys(secret, drafters, directory)


class AllowList:
    """The drafters that a feeder admits, as the files say now: read again, at most once a second, when the directory has changed."""

    def __init__(self, keys: FeederKeys, note: Callable[[str], None]) -> None:
        """`note` is told what changed, and why a changed directory is not used: the list then stays as it was."""
        self._drafters, self._directory, self._note = keys.drafters, keys.directory, note
        self._seen, self._looked = self._state(), time.monotonic()

    def name_of(self, key: bytes) -> str | None:
        """The drafter with this public key (32 bytes); None if it is not listed."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._look()
        return self._drafters.get(key)

    def _look(self) -> None:
        state, self._looked = self._state(), time.monotonic()
        if self._directory is None or state == self._seen:
            return
        self._seen = state
        try:
            _check_directory(self._directory)
            drafters = _read_drafters(self._directory)
        except StreamError as error:
            self._note(f"{error.what}; the drafters listed before stay listed")
            return
        for what, names in (
            ("listed", set(drafters.values()) - set(self._drafters.values())),
            ("no longer listed", set(self._drafters.values()) - set(drafters.values())),
        ):
            if names:
                self._note(f"{', '.join(sorted(names))} {what} in {self._directory}")
        self._drafters = drafters

    def _state(self) -> list[tuple[str, int, int]]:
        if self._directory is None:
            return []
        try:
            files = sorted(self._directory.glob("*.public"))
            return [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        except OSError:  # changing just now
            return []


@dataclass(frozen=True)
class DrafterKeys:
    """A drafter's own pair, and the one public key that a feeder must prove to have. All in Z85."""

    secret: bytes = field(repr=False)
    public: bytes = field(repr=False)
    feeder: bytes = field(repr=False)

    @staticmethod
    def load(directory: Path) -> DrafterKeys:
        """A drafter's part of `directory`."""
        _check_directory(directory)
        secret = _read(directory / f"{_DRAFTER}.secret", "secret")
        return DrafterKeys(secret, zmq.curve_public(secret), _read(directory / f"{_FEEDER}.public", "public"))


def keygen(directory: Path, names: Sequence[str] = (_FEEDER, _DRAFTER)) -> list[Path]:
    """Write a new pair for each name and return the files. Raises `StreamError`, having written nothing, if one of them exists."""
    files = []
    for name in names:
        if not _NAME.fullmatch(name):
            raise StreamError(f"{name!r} can't name a key", "use letters, digits, dots, dashes and underscores")
        files += [directory / f"{name}.public", directory / f"{name}.secret"]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StreamError(f"cannot make {directory}: {error.strerror}", "give another directory") from None
    _check_directory(directory)
    for file in files:
        if file.exists():
            raise StreamError(f"{file} exists, and keys are never overwritten", "give another directory or --name")
    for public_file, secret_file in zip(files[::2], files[1::2], strict=True):
        public, secret = zmq.curve_keypair()
        _write(secret_file, "secret", secret, 0o600)
        _write(public_file, "public", public, 0o644)
    return files


def _read_drafters(directory: Path) -> dict[bytes, str]:
    files = sorted(directory.glob("*.public"))
    return {z85.decode(_read(file, "public")): file.stem for file in files if file.stem != _FEEDER}


def _write(file: Path, kind: str, key: bytes, mode: int) -> None:
    text = f"{_HEADERS[kind]}\n{key.decode('ascii')}\n"
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as out:
            out.write(text)
    except OSError as error:
        raise StreamError(
            f"cannot write {file}: {error.strerror}", "cure that, remove what was written of this pair, and repeat"
        ) from None


def _read(file: Path, kind: str) -> bytes:
    """The key in `file`, in Z85."""
    try:
        with file.open("rb") as opened:
            if kind == "secret" and os.fstat(opened.fileno()).st_mode & 0o077:
                raise StreamError(
                    f"{file} can be read by other users", f"chmod 600 {file}; if they may have read it, make a new pair"
                )
            header, _, rest = opened.read(256).decode("ascii", "replace").partition("\n")
    except OSError as error:
        raise StreamError(
            f"cannot read the key {file}: {error.strerror}",
            "dflash-mp keygen makes keys; docs/guide.md (Between hosts) says which go where",
        ) from None
    key = rest.strip().encode("ascii", "replace")
    try:
        whole = header == _HEADERS[kind] and len(z85.decode(key)) == 32
    except (ValueError, KeyError, OverflowError):  # not Z85; the message must not show the text
        whole = False
    if not whole:
        raise StreamError(f"{file} is no {kind} key of dflash-mp keygen", "copy the file again, whole")
    return key


def _check_directory(directory: Path) -> None:
    try:
        mode = directory.stat().st_mode
    except OSError as error:
        raise StreamError(
            f"cannot read stream.keys {directory}: {error.strerror}", "dflash-mp keygen DIR makes keys"
        ) from None
    if not stat.S_ISDIR(mode):
        raise StreamError(f"stream.keys {directory} is no directory", "dflash-mp keygen DIR makes one")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StreamError(
            f"other users can change what is in {directory}, so they could let anyone in", f"chmod 700 {directory}"
        )
