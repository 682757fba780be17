"""The bytes of a row: one contiguous buffer, the same in every lane.

    features [T, K·H] (dtype of the target) | input_ids int32 [T] | position_ids int32 [T] | document_ids int32 [T] | loss_mask uint8 [T]
    | last_hidden [T, H] (like the features; for distillation only)

With `wire_dtype: fp8` features and last hidden state are float8_e4m3fn, and after all else come their scales (`fp8_rows`), float32 [T, K] and
[T, 1]. Each part starts at a multiple of 64 bytes. The features come first so that the target writes its taps in place and a drafter can copy
the whole row to its device in one transfer; nothing is ever re-packed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dflash_mp.stream.plan import DTYPES, StreamPlan

_ALIGN = 64
FLOAT_TYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


@dataclass(frozen=True)
class RowTensors:
    """Views of one row. `features` [T, K·H]; the others [T]: int32 ids, positions, documents, and uint8 loss mask.

    `last_hidden` [T, H] is the target's, after its final norm; None in a stream without it. The scales [T, K] and [T, 1] are None
    unless features and last hidden state are in fp8.
    """

    features: torch.Tensor
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor
    loss_mask: torch.Tensor
    last_hidden: torch.Tensor | None = None
    feature_scales: torch.Tensor | None = None
    last_scales: torch.Tensor | None = None


@dataclass(frozen=True)
class _Part:
    """One tensor of a row: a field of `RowTensors`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RowLayout:
    """Where the parts of a row lie. `nbytes` is the size of a row's buffer."""

    row_tokens: int
    dtype: torch.dtype  # of the target's hidden states
    parts: tuple[_Part, ...]
    nbytes: int

    @property
    def unpacked_nbytes(self) -> int:
        """Bytes of the hidden states in the target's dtype where the row has them in fp8; else 0: they are used as they come."""
        packed = (part for part in self.parts if part.dtype == torch.float8_e4m3fn)
        return sum(math.prod(part.shape) for part in packed) * self.dtype.itemsize

    @staticmethod
    def of(plan: StreamPlan) -> RowLayout:
        tokens, target = plan.data.row_tokens, plan.target
        dtype = FLOAT_TYPES[target.dtype]
        fp8 = target.wire_dtype == "fp8"
        on_wire = torch.float8_e4m3fn if fp8 else dtype
        tensors: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            ("features", (tokens, target.feature_width), on_wire),
            ("input_ids", (tokens,), torch.int32),
            ("position_ids", (tokens,), torch.int32),
            ("document_ids", (tokens,), torch.int32),
            ("loss_mask", (tokens,), torch.uint8),
        ]
        if target.last_hidden:
            tensors.append(("last_hidden", (tokens, target.hidden_size), on_wire))
        if fp8:
            tensors.append(("feature_scales", (tokens, len(target.layer_ids)), torch.float32))
        if fp8 and target.last_hidden:
            tensors.append(("last_scales", (tokens, 1), torch.float32))
        parts, end = [], 0
        for name, shape, kind in tensors:
            parts.append(_Part(name, shape, kind, end))
            end += -(-parts[-1].nbytes // _ALIGN) * _ALIGN
        return RowLayout(tokens, dtype, tuple(parts), end)

    def views(self, buffer: torch.Tensor) -> RowTensors:
        """Typed views of `buffer`, a uint8 tensor of `nbytes` bytes on any device. Nothing is copied."""
        return RowTensors(
            **{
                part.name: buffer[part.offset : part.offset + part.nbytes].view(part.dtype).view(part.shape)
                for part in self.parts
            }
        )
