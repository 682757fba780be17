"""From rows in host memory to a micro-batch on the rank's device.

On a CPU the features of a single row are used where they lie, in the slot that received them. On CUDA each row is one copy on a side stream,
overlapped with the computation before it; its slot is given back when the copy is done. Rows that do not exist (the global batch does
not divide evenly) are empty: no document, no anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_mp.data.row import RowKey
from dflash_mp.drafter.anchors import Blocks, make_blocks
from dflash_mp.drafter.rows import RowSource, TakenRow
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.stream.layout import RowLayout, RowTensors

# Held-out rows draw their anchors from another stream of random numbers than the training rows with the same ordinals.
_HELD_OUT_SEED = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class MicroBatch:
    """`b` rows on the device: `features` [b, T, K·H], `positions` and `documents` int32 [b, T], and their blocks.

    `last_hidden` [b, T, H] when the stream carries it.
    """

    features: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    blocks: Blocks
    tokens: int
    last_hidden: torch.Tensor | None = None


class BatchLoader:
    """Takes rows from `source` and makes micro-batches of them."""

    def __init__(
        self,
        source: RowSource,
        layout: RowLayout,
        shape: DrafterShape,
        *,
        seed: int,
        anchors_per_row: int,
        device: torch.device,
    ) -> None:
        self._source, self._layout, self._shape = source, layout, shape
        self._seed, self._anchors, self._device = seed, anchors_per_row, device
        self._empty = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[TakenRow] = []
        self._copied: torch.cuda.Event | None = None

    def load(self, keys: Sequence[RowKey | None]) -> MicroBatch:
        """Wait for the rows of `keys` (all of one split) and put them on the device. Ends the use of the batch before.

        Raises `StreamError` when a row does not come in time.
        """
        self.release()
        taken = [None if key is None else self._source.take(key) for key in keys]
        self._held = [row for row in taken if row is not None]
        buffers = [self._empty if row is None else row.buffer for row in taken]
        rows = [self._layout.views(buffer) for buffer in buffers]
        held_out = any(key is not None and key.split == "held_out" for key in keys)
        blocks = make_blocks(
            rows,
            [0 if key is None else key.ordinal for key in keys],
            seed=self._seed ^ _HELD_OUT_SEED if held_out else self._seed,
            anchors_per_row=self._anchors,
            block_size=self._shape.block_size,
            mask_token_id=self._shape.mask_token_id,
            pin=self._copies is not None,
        )
        if self._copies is None:
            stacked = _stack(rows)
        else:
            stacked, blocks = self._copy(buffers, blocks, self._copies)
        features, positions, documents, last = stacked
        tokens = len(self._held) * self._layout.row_tokens
        return MicroBatch(features, positions, documents, blocks, tokens, last)

    def release(self) -> None:
        """Give back the memory of the batch before; on a CPU its tensors must not be used any more."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        for row in self._held:
            row.release()
        self._held = []

    def _copy(
        self, buffers: Sequence[torch.Tensor], blocks: Blocks, stream: torch.cuda.Stream
    ) -> tuple[_Stacked, Blocks]:
        main = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            on_device = torch.empty((len(buffers), self._layout.nbytes), dtype=torch.uint8, device=self._device)
            for row, buffer in zip(on_device, buffers, strict=True):
                row.copy_(buffer, non_blocking=True)
            blocks = blocks.to(self._device)
            stacked = _stack([self._layout.views(row) for row in on_device])
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
        main.wait_event(self._copied)
        for tensor in (on_device, *stacked, blocks.packed):
            if tensor is not None:
                tensor.record_stream(main)
        return stacked, blocks


_Stacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"]


def _stack(rows: Sequence[RowTensors]) -> _Stacked:
    """Features, positions, documents and last hidden states with a batch dimension; a single row is not copied."""
    features, positions, documents = (
        _batched(column)
        for column in zip(*((row.features, row.position_ids, row.document_ids) for row in rows), strict=True)
    )
    last = [row.last_hidden for row in rows if row.last_hidden is not None]
    return features, positions, documents, _batched(last) if last else None


def _batched(column: Sequence[torch.Tensor]) -> torch.Tensor:
    return column[0][None] if len(column) == 1 else torch.stack(list(column))
