"""The bytes of a row: one contiguous buffer, the same in every lane.

    features [T, K·H] (dtype of the target) | input_ids int32 [T] | position_ids int32 [T] | document_ids int32 [T] | loss_mask uint8 [T]
    | last_hidden [T, H] (like the features; for distillation only)

Each part starts at a multiple of 64 bytes. The features come first so that the target writes its taps in place and a drafter can copy
the whole row to its device in one transfer; nothing is ever re-packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_mp.stream.plan import DTYPES, StreamPlan

_ALIGN = 64
FLOAT_TYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


@dataclass(frozen=True)
class RowTensors:
    """Views of one row. `features` [T, K·H]; the others [T]: int32 ids, positions, documents, and uint8 loss mask.

    `last_hidden` [T, H] is the target's, after its final norm; None in a stream without it.
    """

    features: torch.Tensor
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor
    loss_mask: torch.Tensor
    last_hidden: torch.Tensor | None = None


@dataclass(frozen=True)
class RowLayout:
    """Where the parts of a row lie. `nbytes` is the size of a row's buffer."""

    row_tokens: int
    feature_width: int
    dtype: torch.dtype
    offsets: tuple[int, ...]  # in the order of the parts
    nbytes: int
    last_width: int = 0  # H, or 0 without the last hidden state

    @staticmethod
    def of(plan: StreamPlan) -> RowLayout:
        tokens, width = plan.data.row_tokens, plan.target.feature_width
        dtype = FLOAT_TYPES[plan.target.dtype]
        last = plan.target.hidden_size if plan.target.last_hidden else 0
        sizes = [tokens * width * dtype.itemsize, 4 * tokens, 4 * tokens, 4 * tokens, tokens]
        sizes += [tokens * last * dtype.itemsize] if last else []
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // _ALIGN) * _ALIGN
        return RowLayout(tokens, width, dtype, tuple(offsets), end, last)

    def views(self, buffer: torch.Tensor) -> RowTensors:
        """Typed views of `buffer`, a uint8 tensor of `nbytes` bytes on any device. Nothing is copied."""
        t = self.row_tokens
        features, ids, positions, documents, mask = self.offsets[:5]

        def part(offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
            return buffer[offset : offset + nbytes].view(dtype)

        def states(offset: int, width: int) -> torch.Tensor:
            return part(offset, t * width * self.dtype.itemsize, self.dtype).view(t, width)

        return RowTensors(
            states(features, self.feature_width),
            part(ids, 4 * t, torch.int32),
            part(positions, 4 * t, torch.int32),
            part(documents, 4 * t, torch.int32),
            part(mask, t, torch.uint8),
            states(self.offsets[5], self.last_width) if self.last_width else None,
        )
