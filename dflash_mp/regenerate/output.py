"""The file of answers: whole or absent under its name, however often the command that writes it is killed.

Answers are appended to `.NAME.partial` as they come, one line each; started again with the same settings, the command goes on with the conversations
that have no line there. A line torn by a kill or a power cut is taken back with all behind it. When every conversation has its
line they are written in order under the file's own name, renamed, and the partial file is removed. The settings lie beside it as
`NAME.settings.json` from the beginning; other settings are refused, since half of the answers would be another model's or
another temperature's. A second writer of the same file is refused, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from dflash_mp.data.origin import settings_file
from dflash_mp.errors import ConfigError, DataError, DflashError
from dflash_mp.file_lock import take

_SYNC_SECONDS = 5.0
_FREE = ("versions", "server")  # recorded, but free to change on the way


class AnswerFile:
    """The file `out`, made with `settings` (values of JSON). A context manager: leaving it closes the partial file, which stays."""

    def __init__(self, out: Path, settings: dict[str, Any], *, force: bool, say: Callable[[str], None]) -> None:
        self._out, self._settings, self._say = out, settings, say
        self._partial = out.with_name(f".{out.name}.partial")
        self._places: dict[int, tuple[int, int]] = {}  # of a conversation's line: offset and length
        self._reasons: dict[int, str] = {}  # of a conversation: its finish_reason
        self.answered = False
        """Whether any conversation has an answer."""
        self._synced = time.monotonic()
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self._partial, "a+b")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise DataError(f"cannot write {out}: {error.strerror}", "choose another --out") from None
        try:
            self._lock()
            self.complete = self._compare(force)
            if not self.complete:
                self._read_back()
        except BaseException:
            self._file.close()
            raise

    @property
    def done(self) -> frozenset[int]:
        """Numbers of the conversations that have their line."""
        return frozenset(self._places)

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Append records, each with its conversation's number as `index`."""
        for record in records:
            line = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
            self._note(record, len(line))
            with _writing(self._partial):
                self._file.write(line)
        with _writing(self._partial):
            self._file.flush()
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()

    def reasons(self) -> dict[str, int]:
        """How many conversations ended how."""
        return dict(Counter(self._reasons.values()))

    def discard(self) -> None:
        """Leave nothing: what is written holds no answer."""
        with _writing(self._partial):
            self._file.truncate(0)
            settings_file(self._out).unlink(missing_ok=True)
            self._partial.unlink()

    def finish(self) -> dict[str, int]:
        """Give the answers their name, in the order of the conversations; returns (and notes in the settings) how many ended how."""
        scratch = self._partial.with_suffix(".sorted")
        with _writing(self._out):
            try:
                self._write_in_order(scratch)
                _write_whole(settings_file(self._out), {**self._settings, "counts": self.reasons()})
                scratch.rename(self._out)
            finally:
                scratch.unlink(missing_ok=True)  # where the disk is full, it is what fills it
            _sync_directory(self._out.parent)
            self._partial.unlink()
        return self.reasons()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        first = contextlib.suppress(OSError) if error else _writing(self._partial)  # the first error is the one to tell
        with first, contextlib.closing(self._file):
            self._file.flush()
            os.fsync(self._file.fileno())

    def _write_in_order(self, file: Path) -> None:
        with open(file, "wb") as out:
            for index in sorted(self._places):
                offset, length = self._places[index]
                self._file.seek(offset)
                out.write(self._file.read(length))
            out.flush()
            os.fsync(out.fileno())

    def _lock(self) -> None:
        if not take(self._file, self._partial):
            raise DflashError(f"another process is writing {self._out}", "wait for it, or end it")

    def _compare(self, force: bool) -> bool:
        """Whether `out` is there, complete, with these settings; writes the settings where there are none, or with `force`."""
        file = settings_file(self._out)
        before = _read_settings(file)
        if force or (before is None and not self._out.exists()):
            with _writing(self._out):
                self._file.truncate(0)
                self._out.unlink(missing_ok=True)
            _write_whole(file, self._settings)
            return False
        if before is None:
            raise DataError(
                f"{self._out} is there already, and {file.name} is not",
                "choose another --out, or replace it with --force",
            )
        wanted = json.loads(json.dumps(self._settings))
        different = [key for key in wanted if key not in _FREE and before.get(key) != wanted[key]]
        if different:
            raise ConfigError(
                f"{self._out} was begun with other settings: "
                + "; ".join(
                    f"{key} {json.dumps(before.get(key))} instead of {json.dumps(wanted[key])}" for key in different
                ),
                "give the same settings to go on, choose another --out, or start over with --force",
            )
        for key in _FREE:
            if key in before and key in wanted and before[key] != wanted[key]:
                self._say(f"{self._out} was begun with {key} {before[key]}, and goes on with {wanted[key]}")
        if self._out.exists():
            self._partial.unlink(missing_ok=True)
            return True
        return False

    def _read_back(self) -> None:
        self._file.seek(0)
        self._end = 0
        for line in self._file:
            record = _record_of(line)
            if record is None or record["index"] in self._places:
                self._say(f"the last answers of {self._partial} were torn; they are written again")
                break
            self._note(record, len(line))
        with _writing(self._partial):
            self._file.truncate(self._end)
        self._file.seek(self._end)

    def _note(self, record: dict[str, Any], length: int) -> None:
        """The next line, of this length, is this record's."""
        self._places[record["index"]] = (self._end, length)
        self._reasons[record["index"]] = reason = record["finish_reason"]
        self.answered |= reason in ("stop", "length") or bool(record.get("answer_tokens"))
        self._end += length


def _record_of(line: bytes) -> dict[str, Any] | None:
    """The record of a line that is whole; None otherwise."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("index"), int)
    return record if whole and isinstance(record.get("finish_reason"), str) else None


def _read_settings(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {error}", "start over with --force") from None
    if not isinstance(found, dict):
        raise DataError(f"{file} does not hold settings", "start over with --force")
    return found


def _write_whole(file: Path, value: dict[str, Any]) -> None:
    scratch = file.with_name(f".{file.name}.new")
    with _writing(file):
        with open(scratch, "w", encoding="utf-8") as out:
            out.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
            out.flush()
            os.fsync(out.fileno())
        scratch.rename(file)
        _sync_directory(file.parent)


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {file}: {error.strerror or error}",
            "free space or permissions there; what is written stays, and the same command goes on",
        ) from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
