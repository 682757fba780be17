"""Write a prepared dataset so that it is there whole or not at all.

Everything goes into `.NAME.preparing` beside the destination, is flushed to the disk and renamed. That directory is locked meanwhile:
a second `prepare` of the same destination fails at once, and what a killed one left is removed by the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from dflash_mp.data.manifest import FILE, PROMPTS, SplitCounts, StoredFile
from dflash_mp.data.packing import PackedRow
from dflash_mp.data.row import Split
from dflash_mp.data.store import Prompt, file_name
from dflash_mp.errors import DataError
from dflash_mp.file_lock import take


class SplitWriter:
    """Writes the rows of one split into `directory`, `shard_rows` at a time; memory is one shard's."""

    def __init__(self, directory: Path, split: Split, row_tokens: int, shard_rows: int) -> None:
        self.counts = SplitCounts()
        self.files: dict[str, StoredFile] = {}
        self._directory = directory
        self._split: Split = split
        self._row_tokens = row_tokens
        self._shard_rows = shard_rows
        self._rows: list[PackedRow] = []
        self._content = hashlib.sha256()

    def add(self, row: PackedRow) -> None:
        """Append a row."""
        counts, tokens = self.counts, int(row.lengths.sum())
        counts.rows += 1
        counts.documents += len(row.lengths)
        counts.tokens += tokens
        counts.supervised_tokens += int(row.loss_mask.sum())
        counts.padding_tokens += self._row_tokens - tokens
        for array in (row.input_ids, row.loss_mask, row.lengths):
            self._content.update(array.data)
        self._rows.append(row)
        if len(self._rows) == self._shard_rows:
            self._flush()

    def finish(self) -> None:
        """Write what is left; afterwards `counts` and `files` are final."""
        if self._rows:
            self._flush()
        self.counts.content = self._content.hexdigest()

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        shard = (self.counts.rows - 1) // self._shard_rows
        shape = (len(rows), self._row_tokens)
        bounds = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(row.lengths) for row in rows], out=bounds[1:])
        arrays: dict[str, tuple[tuple[int, ...], Sequence[np.ndarray[Any, Any]]]] = {
            "input_ids": (shape, [row.input_ids for row in rows]),
            "loss_mask": (shape, [row.loss_mask for row in rows]),
            "lengths": ((int(bounds[-1]),), [row.lengths for row in rows]),
            "bounds": (bounds.shape, [bounds]),
        }
        for name, (full_shape, parts) in arrays.items():
            with CheckedFile(self._directory / file_name(self._split, shard, name)) as file:
                header = {"descr": parts[0].dtype.str, "fortran_order": False, "shape": full_shape}
                np.lib.format.write_array_header_1_0(file, header)
                for part in parts:
                    file.write(part.data)
            self.files[file.name] = file.stored


class PromptWriter:
    """Writes `held_out_prompts.jsonl` into `directory`."""

    def __init__(self, directory: Path) -> None:
        self._file = CheckedFile(directory / PROMPTS)

    def add(self, prompt: Prompt) -> None:
        """Append a prompt."""
        self._file.write(json.dumps(asdict(prompt)).encode() + b"\n")

    def finish(self) -> dict[str, StoredFile]:
        """Close the file and describe it, by name."""
        self._file.close()
        return {self._file.name: self._file.stored}


class CheckedFile:
    """A new file that knows its size and SHA-256, and is on the disk when closed."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.stored = StoredFile(0, "")
        self._file: BinaryIO = path.open("xb")
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`, a contiguous buffer."""
        self._digest.update(data)
        return self._file.write(data)

    def close(self) -> None:
        """Flush to the disk; afterwards `stored` is final."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.stored = StoredFile(self._file.tell(), self._digest.hexdigest())
        self._file.close()

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()


@contextmanager
def replacing(destination: Path) -> Iterator[Path]:
    """Give an empty directory to fill; it becomes `destination` (replacing a dataset there) if the block succeeds, and vanishes if not.

    Raises `DataError` when another process is filling it, when `destination` holds something else, or when it cannot be written.
    """
    _check_replaceable(destination)
    work = destination.absolute().parent / f".{destination.name}.preparing"
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DataError(f"cannot write {work}: {error.strerror}", "check data.path and its permissions") from None
    try:
        _take(lock, work)
        try:
            _empty(work)
            yield work
            os.fsync(lock)
            _swap(work, destination)
        except OSError as error:
            raise DataError(
                f"cannot write {destination}: {error}", "check the space and permissions of data.path"
            ) from error
        finally:
            if work.exists() and os.path.samestat(work.stat(), os.fstat(lock)):
                shutil.rmtree(work)
    finally:
        os.close(lock)


def _check_replaceable(destination: Path) -> None:
    if (
        destination.exists()
        and not (destination / FILE).exists()
        and (not destination.is_dir() or any(destination.iterdir()))
    ):
        raise DataError(
            f"{destination} exists and is no prepared dataset, so it will not be replaced",
            "choose another data.path or move it",
        )


def _take(lock: int, work: Path) -> None:
    if not (take(lock, work) and work.exists() and os.path.samestat(work.stat(), os.fstat(lock))):
        raise DataError(f"another dflash-mp prepare is writing {work}", "wait for it to end")


def _empty(directory: Path) -> None:
    for left_over in directory.iterdir():
        if left_over.is_dir() and not left_over.is_symlink():
            shutil.rmtree(left_over)
        else:
            left_over.unlink()


def _swap(work: Path, destination: Path) -> None:
    replaced = work.with_name(f".{destination.name}.replaced")
    if replaced.exists():
        shutil.rmtree(replaced)
    if destination.exists():
        destination.rename(replaced)
    work.rename(destination)
    if replaced.exists():
        shutil.rmtree(replaced)
