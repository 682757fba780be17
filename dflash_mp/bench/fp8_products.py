"""What fp8 products reach on a device, for `bench step --precision fp8`: their rate, and how far off their sums are.

Tensor cores may add up in fewer bits ("fast sums"). How far that is off does not show at a small shape, so it is measured on sums as long as those of a
step, against float64 on the same rounded operands: over the tokens of a micro-batch, and over a vocabulary, where one operand is a
distribution with many tiny terms.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial

import torch

from dflash_mp.bench.timing import timed
from dflash_mp.drafter.fp8_products import multiply, quantise

_ROWS = 256


@dataclass(frozen=True)
class Fp8Products:
    """Rates in operations per second, of fast and of full sums; errors norm over norm."""

    fast_rate: float
    full_rate: float
    sums: tuple[tuple[str, float, float], ...]  # what is summed over, error of fast and of full sums

    def text(self) -> str:
        errors = ", ".join(f"over {what} by {fast:.1e} and {full:.1e}" for what, fast, full in self.sums)
        return (
            f"an fp8 product makes {self.fast_rate / 1e12:.2f} TFLOP/s with fast sums, {self.full_rate / 1e12:.2f} with full ones, "
            f"which are off {errors}"
        )


def measure_products(device: torch.device) -> Fp8Products:
    """At sizes of a real step; on a CPU at small ones."""
    on_cuda = device.type == "cuda"
    size, tokens, vocabulary = (8192, 8192, 131_072) if on_cuda else (256, 512, 4096)
    operands = [quantise(torch.randn(size, size, device=device)) for _ in range(2)]
    seconds = []
    for fast in (True, False):
        product = partial(multiply, *operands[0], *operands[1], torch.bfloat16, fast=fast)
        times = [timed(product, device) for _ in range(13)]
        seconds.append(statistics.median(times[3:]))
    fast_rate, full_rate = (2.0 * size**3 / each for each in seconds)
    right = torch.randn(_ROWS, vocabulary, device=device)
    spread = torch.randn(_ROWS, tokens, device=device)
    likely = (3 * torch.randn(_ROWS, vocabulary, device=device)).softmax(1)
    sums = tuple(
        (f"{left.shape[1]:,} {what}", *_sum_errors(left, right[:, : left.shape[1]]))
        for left, what in ((spread, "tokens"), (likely, "of a vocabulary"))
    )
    return Fp8Products(fast_rate, full_rate, sums)


def _sum_errors(left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Of fast and of full sums: left · rightᵀ."""
    (a, of_a), (b, of_b) = quantise(left), quantise(right)
    exact = (a.double() * of_a) @ (b.double() * of_b).t()
    found = (multiply(a, of_a, b, of_b, torch.float32, fast=fast) for fast in (True, False))
    fast, full = (float((out.double() - exact).norm() / exact.norm()) for out in found)
    return fast, full
