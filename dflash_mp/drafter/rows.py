"""Where a trainer's rows come from: the stream, or (in tests and comparisons) a target in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from dflash_mp.data.row import RowKey
from dflash_mp.stream.layout import RowTensors


class TakenRow(Protocol):
    """A row in memory that its taker owns until `release`."""

    @property
    def buffer(self) -> torch.Tensor:
        """The whole row, uint8 [layout.nbytes], on the CPU."""

    @property
    def tensors(self) -> RowTensors:
        """Views of `buffer`."""

    def release(self) -> None:
        """Give the memory back; the views must not be read afterwards."""


class RowSource(Protocol):
    """Delivers rows by key. `stream.client.RowClient` is one."""

    def schedule(self, keys: Iterator[RowKey]) -> None:
        """Announce every row that will be taken, in order."""

    def take(self, key: RowKey) -> TakenRow:
        """Wait for the row; raises `StreamError` after a bounded time."""
