"""Hidden states in one byte per value: float8_e4m3fn with a float32 scale for each token and tap.

A scale is the largest magnitude of a token's tap over 448, the largest number of the format, so values are off by at most 1/16 of themselves
or, where they are very small beside that largest one, by 2⁻¹⁰ scales. Taps have scales of their own because their magnitudes differ from
each other, and tokens because a few tokens of a text have values a thousand times those of the others.

Zeros stay zeros. A token with a value that isn't finite gets a scale that isn't, and `not_finite` finds it. Same input, same bytes, on any device.
Both directions work on the device where the states are; besides their result they need memory for one tap in float32
(dequantising on a CPU: for a whole row).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

LARGEST = 448.0  # of float8_e4m3fn
# Of a scale: smaller numbers are subnormal, and a device may take them for 0.
_SMALLEST = torch.finfo(torch.float32).tiny


def quantise(states: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Write `states` [T, K·H], of any floating type, as `values` [T, K·H] float8_e4m3fn and `scales` [T, K] float32.

    All lie on one device. On CUDA the work is queued on the current stream.
    """
    taps = scales.shape[1]
    for tap, (part, place) in enumerate(zip(states.chunk(taps, 1), values.chunk(taps, 1), strict=True)):
        # A division by a number is one on a CPU, and on CUDA a product with its reciprocal: that rounds otherwise.
        scale = (part.abs().amax(1).float() * (1 / LARGEST)).clamp_min_(_SMALLEST)
        place.copy_(part / scale[:, None])
        scales[:, tap] = scale


def dequantise(rows: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """[b, T, K·H] in `dtype`, new memory, of b rows' `values` and `scales` as `quantise` writes them, on their device."""
    values, scales = rows[0]
    states = torch.empty((len(rows), *values.shape), dtype=dtype, device=values.device)
    for out, (values, scales) in zip(states, rows, strict=True):
        out.copy_(values)  # exact: each of the formats has these 256 numbers
        out.view(*scales.shape, -1).mul_(scales[..., None])  # in float32, rounded once
    return states


def not_finite(scales: torch.Tensor) -> tuple[int, int] | None:
    """The first token, and its tap, of `scales` [T, K] whose states hold an infinity or not-a-number. Waits for the device."""
    if bool(scales.isfinite().all()):
        return None
    token, tap = (~scales.isfinite()).nonzero()[0].tolist()
    return token, tap
