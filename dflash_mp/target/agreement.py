"""When two computations of the same hidden states count as the same: what the self-check and the probe for isolation go by."""

from __future__ import annotations

import torch

# Largest `vector_error` that passes. Sound: SmolLM2 1e-6, 3e-4 and 2e-3, an untrained model of 36 layers 0.035 in bfloat16. Tapped one layer
# off, or with a document that sees the one before it: 0.1 to 1.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def vector_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """How far the vectors of `got` [S, …] are from those of `want`, relative to their length.

    In float32 the worst token's. In half precision, where a token near a tie may go to another expert, the mean over all tokens or,
    if larger, over the first 32, which would see most of a leak.
    """
    relative = (got.float() - want.float()).norm(dim=1) / want.float().norm(dim=1).clamp_min(1e-12)
    if want.dtype == torch.float32 and got.dtype == torch.float32:
        return float(relative.max())
    return max(float(relative.mean()), float(relative[:32].mean()))
