"""The prepared dataset on disk, memory-mapped: rows of tokens, their documents and loss mask, in shards.

    manifest.json                         see data/manifest.py
    held_out_prompts.jsonl                prompts of the held-out documents, for decoding
    train-00000.input_ids.npy             int32 [rows, T]
    train-00000.loss_mask.npy             uint8 [rows, T]
    train-00000.lengths.npy               int32 [documents]: tokens of each document, row after row
    train-00000.bounds.npy                int32 [rows + 1]: documents of row r are bounds[r] … bounds[r + 1] - 1
    held_out-00000.…                      the same for the held-out share

Opening reads the manifest and the sizes of the files; a missing or truncated file is a `DataError` that names it. A row is copied
out of the map (5 bytes a token); positions and document ids are derived from the lengths.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_mp.config import RunConfig
from dflash_mp.data.manifest import PROMPTS, Manifest, SplitCounts, read_manifest
from dflash_mp.data.order import dataset_row
from dflash_mp.data.row import RowKey, Split, TokenRow
from dflash_mp.errors import DataError

ARRAYS = ("input_ids", "loss_mask", "lengths", "bounds")
_AGAIN = "run dflash-mp prepare --force"
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Prompt:
    """What a held-out document asks: `messages` up to the last assistant turn, or the first part of a plain `text`.

    `source` is the place of the document, as "file:line" without the file's directory.
    """

    messages: list[dict[str, Any]] | None
    text: str | None
    source: str
    tools: list[dict[str, Any]] | None = None


class PreparedDataset:
    """A prepared dataset, opened for reading. Can be used from several threads and processes at once."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._shards: dict[tuple[Split, int], dict[str, Array]] = {}

    @staticmethod
    def open(path: Path) -> PreparedDataset:
        """Open the dataset in directory `path`. Raises `DataError` when it isn't one, or not whole."""
        manifest = read_manifest(path)
        for name, expected in manifest.files.items():
            try:
                size = (path / name).stat().st_size
            except OSError as error:
                raise DataError(f"{path / name} of the prepared dataset: {error.strerror}", _AGAIN) from None
            if size != expected.bytes:
                raise DataError(f"{path / name} has {size} bytes instead of {expected.bytes}: it is not whole", _AGAIN)
        return PreparedDataset(path, manifest)

    def verify(self) -> None:
        """Read everything and compare checksums. Raises `DataError` naming the first file that differs."""
        for name, expected in self.manifest.files.items():
            digest = hashlib.sha256()
            with (self.path / name).open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            if digest.hexdigest() != expected.sha256:
                raise DataError(f"{self.path / name} is damaged: its checksum differs from the manifest's", _AGAIN)

    def rows(self, split: Split) -> int:
        """Stored rows of `split`."""
        return self._counts(split).rows

    def row(self, split: Split, index: int) -> TokenRow:
        """Stored row `index` of `split`; the arrays are the caller's own. Raises `DataError` when there is no such row."""
        if not 0 <= index < self.rows(split):
            raise DataError(
                f"{self.path} has no {split} row {index}, only {self.rows(split)}",
                "use another row, or prepare more documents (data.held_out sets the share of the held-out ones)",
            )
        number, place = divmod(index, self.manifest.shard_rows)
        shard = self._shard(split, number)
        first, after = shard["bounds"][place : place + 2]
        positions, documents = _layout(np.asarray(shard["lengths"][first:after]), self.manifest.row_tokens)
        return TokenRow(np.array(shard["input_ids"][place]), positions, documents, np.array(shard["loss_mask"][place]))

    def run_row(self, key: RowKey, seed: int) -> TokenRow:
        """The row that `key` names in a run with this `seed`: `train` in the run's shuffled order, `held_out` as stored."""
        if key.split == "held_out" or not self.rows("train"):
            return self.row(key.split, key.ordinal)
        return self.row("train", dataset_row(key.ordinal, self.rows("train"), seed))

    def held_out_prompts(self) -> Iterator[Prompt]:
        """The prompts of the held-out documents, in the order of their sources."""
        with (self.path / PROMPTS).open(encoding="utf-8") as lines:
            for line in lines:
                yield Prompt(**json.loads(line))

    def _counts(self, split: Split) -> SplitCounts:
        return self.manifest.train if split == "train" else self.manifest.held_out

    def _shard(self, split: Split, number: int) -> dict[str, Array]:
        if (split, number) not in self._shards:
            self._shards[split, number] = {name: self._map(file_name(split, number, name)) for name in ARRAYS}
        return self._shards[split, number]

    def _map(self, name: str) -> Array:
        try:
            return np.load(self.path / name, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot map {self.path / name}: {error}", _AGAIN) from None


def open_dataset(config: RunConfig) -> PreparedDataset:
    """The run's dataset. Raises `DataError` if it isn't whole, holds no rows, or rows of another length than configured."""
    dataset = PreparedDataset.open(config.data.path)
    if dataset.manifest.row_tokens != config.data.row_tokens:
        raise DataError(
            f"{config.data.path} has rows of {dataset.manifest.row_tokens} tokens, data.row_tokens is {config.data.row_tokens}",
            "run `dflash-mp prepare` again, or set data.row_tokens to what was prepared",
        )
    if not dataset.rows("train"):
        raise DataError(f"{config.data.path} holds no rows to train on", "prepare more documents")
    return dataset


def file_name(split: Split, shard: int, array: str) -> str:
    """Name of the file of `array` (one of `ARRAYS`) in a shard."""
    return f"{split}-{shard:05d}.{array}.npy"


def _layout(lengths: npt.NDArray[np.int32], row_tokens: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Position ids and document ids [row_tokens] of a row with documents of these `lengths`, padding after them."""
    parts = np.append(lengths, row_tokens - lengths.sum())
    starts = np.cumsum(parts) - parts
    positions = np.arange(row_tokens, dtype=np.int32) - np.repeat(starts, parts).astype(np.int32)
    numbers = np.append(np.arange(1, len(lengths) + 1, dtype=np.int32), np.int32(0))
    return positions, np.repeat(numbers, parts)
