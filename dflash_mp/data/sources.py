"""Records from files: every record of every source, in an order that depends on names only, or a `DataError`.

A source is a `.jsonl`, `.jsonl.gz` or `.parquet` file, a directory of those (all levels, in the order of their relative paths), or
`hf:NAME`, a data set of the Hugging Face hub. Records are streamed: memory holds one line, or one batch of a Parquet row group.
Nothing is skipped except blank lines: an unreadable or empty file and a malformed line raise `DataError` naming file and line.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_mp.config import SourceConfig
from dflash_mp.data.documents import KNOWN_KEYS, Record
from dflash_mp.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
HUB_PREFIX = "hf:"
_PARQUET_BATCH = 512


def read_source(source: SourceConfig) -> Iterator[Record]:
    """Yield the records of `source`, at most `source.limit`. Raises `DataError` when there are none."""
    records = _read_hub(source) if source.path.startswith(HUB_PREFIX) else _read_files(source_files(source))
    count = 0
    for count, record in enumerate(records, start=1):
        yield record
        if count == source.limit:
            return
    if not count:
        raise DataError(f"{source.path} has no records", "remove it from data.sources, or fill it")


def source_files(source: SourceConfig) -> list[Path]:
    """The files of a local source, sorted; empty for `hf:`. Raises `DataError` when there are none of a known kind."""
    if source.path.startswith(HUB_PREFIX):
        return []
    path = Path(source.path)
    kinds = ", ".join(SUFFIXES)
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.name.endswith(SUFFIXES) and not _hidden(p.relative_to(path))]
        if not found:
            raise DataError(f"the directory {path} holds no {kinds} file", "check data.sources")
        return sorted(found, key=lambda p: p.relative_to(path).as_posix())
    if not path.exists():
        raise DataError(
            f"the data file {path} does not exist", "check data.sources; paths start at the current directory"
        )
    if not path.name.endswith(SUFFIXES):
        raise DataError(
            f"{path} is none of {kinds}", "convert it to JSON lines: one record a line (for a JSON array: jq -c '.[]')"
        )
    return [path]


def describe_file(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a data file's content."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                size += len(block)
    except OSError as error:
        raise _unreadable(path, error) from None
    return size, digest.hexdigest()


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _read_files(files: list[Path]) -> Iterator[Record]:
    for path in files:
        empty = True
        for record in _read_parquet(path) if path.suffix == ".parquet" else _read_lines(path):
            empty = False
            yield record
        if empty:
            raise DataError(f"the data file {path} has no records", "remove it from data.sources, or fill it")


def _read_lines(path: Path) -> Iterator[Record]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = f"{path}:{number}"
                    yield Record(place, _parse(line, place))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged after line {number}: {error}", "fetch or compress it again") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line.rstrip(b"\r\n").decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 (byte {error.start + 1} of the line)", "re-encode the file") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not valid JSON: {error.msg} at column {error.colno}", "fix the line") from None
    except RecursionError:
        raise DataError(f"{place}: JSON is nested too deeply", "fix the line") from None
    except ValueError as error:  # Python reads no number of thousands of digits
        raise DataError(f"{place}: not valid JSON: {error}", "fix the line") from None
    if not isinstance(fields, dict):
        raise DataError(f"{place}: a record must be a JSON object, not {type(fields).__name__}", "fix the line")
    return fields


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"{path}: Parquet files need pyarrow", "pip install 'dflash-mp[datasets]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in KNOWN_KEYS]
            if not columns:
                raise DataError(
                    f"{path} has only the columns {', '.join(file.schema_arrow.names)}",
                    f"rename the one with the documents to one of: {', '.join(sorted(KNOWN_KEYS))}",
                )
            number = 0
            for batch in file.iter_batches(_PARQUET_BATCH, columns=columns):
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}, row {number}", fields)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}", "write or fetch the file again") from None


def _read_hub(source: SourceConfig) -> Iterator[Record]:
    name = source.path[len(HUB_PREFIX) :]
    os.environ["HF_DATASETS_TRUST_REMOTE_CODE"] = "0"  # versions before 4 could run a data set's script
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(
            f"{source.path} needs the Hugging Face datasets library", "pip install 'dflash-mp[datasets]'"
        ) from None
    number = 0
    try:
        for fields in load_dataset(name, source.subset, split=source.split, streaming=True):
            number += 1
            yield Record(f"{source.path}, record {number}", fields)
    except Exception as error:  # whatever the library's file systems and builders raise
        raise DataError(
            f"{source.path} (subset {source.subset or 'default'}, split {source.split}) fails after record {number}: "
            f"{type(error).__name__}: {error}",
            "check the name, subset and split, and that the hub can be reached (HF_TOKEN for a gated one)",
        ) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read the data file {path}: {error.strerror or error}", "check the path and its permissions"
    )
