"""From rows in host memory to a micro-batch on the rank's device.

On a CPU the features of a single row are used where they lie, in the slot that received them, unless they came in fp8. On CUDA each row
is one copy on a side stream, overlapped with the computation before it, also with the last of the step before; its slot is given back
with the next micro-batch's loading, when the copy is long done. Rows that do not exist (the global batch does not divide evenly) are empty: no document, no anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_mp.data.row import RowKey
from dflash_mp.drafter.anchors import Blocks, make_blocks
from dflash_mp.drafter.rows import RowSource, TakenRow
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.errors import StreamError
from dflash_mp.stream.client_patience import StoppedWaiting
from dflash_mp.stream.fp8_rows import dequantise
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


@dataclass
class _Loaded:
    """A micro-batch and the rows whose memory it needs; `copied` on CUDA: from then on it doesn't."""

    batch: MicroBatch
    rows: list[TakenRow]
    copied: torch.cuda.Event | None

    def give_back(self) -> None:
        """The memory of the rows. On a CPU the batch's tensors must not be used any more."""
        if self.copied is not None:
            self.copied.synchronize()
        while self.rows:
            self.rows.pop().release()


class BatchLoader:
    """Takes rows from `source` and makes micro-batches of them.

    `ahead`: whether its user should call `load_ahead`. On a CPU nothing would be gained: rows are used where they lie, and copying nothing takes no time.
    """

    def __init__(
        self,
        source: RowSource,
        layout: RowLayout,
        shape: DrafterShape,
        *,
        seed: int,
        anchors_per_row: int,
        device: torch.device,
        ahead: bool = False,
    ) -> None:
        self._source, self._layout, self._shape = source, layout, shape
        self._seed, self._anchors, self._device = seed, anchors_per_row, device
        self._empty = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.goes_ahead = ahead
        self._current: _Loaded | None = None
        self._ahead: tuple[Sequence[RowKey | None], _Loaded | StoppedWaiting] | None = None

    def load(self, keys: Sequence[RowKey | None]) -> MicroBatch:
        """Wait for the rows of `keys` (all of one split) and put them on the device. Ends the use of the batch before.

        Raises `StreamError` when a row does not come in time, `StoppedWaiting` when a stop was asked for meanwhile.
        """
        self.release()
        loaded = self._loaded(keys)
        self._current = loaded
        if loaded.copied is not None:
            self._hand_over(loaded.batch, loaded.copied)
        return loaded.batch

    def load_ahead(self, keys: Sequence[RowKey | None]) -> None:
        """Do now, while the device computes, what the next `load`, which must be of the same `keys`, would have to wait for.

        Raises `StreamError`; a `StoppedWaiting` is left for that `load`.
        """
        try:
            self._ahead = keys, self._start(keys)
        except StoppedWaiting as stopped:
            self._ahead = keys, stopped

    def release(self) -> None:
        """Give back the memory of the batch before; on a CPU its tensors must not be used any more."""
        if self._current is not None:
            self._current.give_back()
            self._current = None

    def drop_ahead(self) -> None:
        """Forget what was loaded ahead: there will be no such `load`."""
        if self._ahead is not None and isinstance(self._ahead[1], _Loaded):
            self._ahead[1].give_back()
        self._ahead = None

    def _loaded(self, keys: Sequence[RowKey | None]) -> _Loaded:
        if self._ahead is None:
            return self._start(keys)
        (of, loaded), self._ahead = self._ahead, None
        if isinstance(loaded, StoppedWaiting):
            raise loaded
        if list(of) != list(keys):
            raise RuntimeError(f"{of} were loaded ahead, {keys} are wanted")
        return loaded

    def _start(self, keys: Sequence[RowKey | None]) -> _Loaded:
        """Take the rows, and on CUDA begin to copy them."""
        taken = self._take(keys)
        held = [row for row in taken if row is not None]
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
        copied = None
        if self._copies is None:
            stacked = _stack(rows, self._layout.dtype)
        else:
            stacked, blocks, copied = self._copy(buffers, blocks, self._copies)
        features, positions, documents, last = stacked
        tokens = len(held) * self._layout.row_tokens
        return _Loaded(MicroBatch(features, positions, documents, blocks, tokens, last), held, copied)

    def _take(self, keys: Sequence[RowKey | None]) -> list[TakenRow | None]:
        taken: list[TakenRow | None] = []
        try:
            for key in keys:
                taken.append(None if key is None else self._source.take(key))
        except StreamError:
            for row in taken:
                if row is not None:
                    row.release()
            raise
        return taken

    def _copy(
        self, buffers: Sequence[torch.Tensor], blocks: Blocks, stream: torch.cuda.Stream
    ) -> tuple[_Stacked, Blocks, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            on_device = torch.empty((len(buffers), self._layout.nbytes), dtype=torch.uint8, device=self._device)
            for row, buffer in zip(on_device, buffers, strict=True):
                row.copy_(buffer, non_blocking=True)
            blocks = blocks.to(self._device)
            stacked = _stack([self._layout.views(row) for row in on_device], self._layout.dtype)
            copied = torch.cuda.Event()
            copied.record(stream)
        return stacked, blocks, copied

    def _hand_over(self, batch: MicroBatch, copied: torch.cuda.Event) -> None:
        """From the stream of the copies to the one that computes."""
        main = torch.cuda.current_stream(self._device)
        main.wait_event(copied)
        for tensor in (batch.features, batch.positions, batch.documents, batch.last_hidden, batch.blocks.packed):
            if tensor is not None:
                tensor.record_stream(main)


_Stacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"]


def _stack(rows: Sequence[RowTensors], dtype: torch.dtype) -> _Stacked:
    """Features, positions, documents and last hidden states with a batch dimension; a single row that isn't in fp8 is not copied.

    `dtype` is that of the target, in which hidden states come out.
    """
    features = _states([row.features for row in rows], [row.feature_scales for row in rows], dtype)
    positions, documents = _batched([row.position_ids for row in rows]), _batched([row.document_ids for row in rows])
    last = [row.last_hidden for row in rows if row.last_hidden is not None]
    return features, positions, documents, _states(last, [row.last_scales for row in rows], dtype) if last else None


def _states(values: Sequence[torch.Tensor], scales: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
    known = [scale for scale in scales if scale is not None]
    return dequantise(list(zip(values, known, strict=True)), dtype) if known else _batched(values)


def _batched(column: Sequence[torch.Tensor]) -> torch.Tensor:
    return column[0][None] if len(column) == 1 else torch.stack(list(column))
