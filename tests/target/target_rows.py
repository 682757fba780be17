"""Rows for tapping: random tokens of the tiny tokenizer's byte range, packed documents, padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dflash_mp.data.row import TokenRow
from dflash_mp.target.capture import Capture
from dflash_mp.target.load import Target


def packed_row(lengths: Sequence[int], padding: int = 0, *, seed: int = 0) -> TokenRow:
    spans = [*lengths, padding] if padding else list(lengths)
    numbers = [*range(1, len(lengths) + 1), 0]
    total = sum(spans)
    return TokenRow(
        input_ids=np.random.default_rng(seed).integers(0, 256, total, dtype=np.int32),
        position_ids=np.concatenate([np.arange(n) for n in spans]).astype(np.int32),
        document_ids=np.concatenate([np.full(n, d) for d, n in zip(numbers, spans, strict=False)]).astype(np.int32),
        loss_mask=np.ones(total, np.uint8),
    )


def features(target: Target, row: TokenRow, capture: Capture | None = None) -> torch.Tensor:
    capture = capture or Capture(target, keep_target=True)
    out = torch.full((len(row.input_ids), target.info.feature_width), torch.nan, dtype=target.embedding.dtype)
    capture.capture(row, out)
    return out


@torch.inference_mode()
def hidden_states(target: Target, row: TokenRow, start: int, stop: int) -> list[torch.Tensor]:
    """The model's own hidden states of tokens `start … stop - 1` of `row` as a text of their own."""
    ids = torch.from_numpy(row.input_ids[start:stop].astype(np.int64))[None]
    return [state[0] for state in target.model(ids, output_hidden_states=True, use_cache=False).hidden_states]
