"""One AdamW update in one pass over memory, on CUDA: a Triton kernel per parameter.

It reads the gradient, master and both moments, and writes master, moments, the rounded parameter and a zeroed gradient: 32 bytes per bf16
parameter. The separate operations (cast, scale, update, round, zero) move 52. The arithmetic is that of `torch.optim.AdamW` in
float32, to rounding; the tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 2048


@dataclass(frozen=True)
class Update:
    """The numbers of one step. `step` counts from 1."""

    step: int
    learning_rate: float
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True)
class Slot:
    """What the update of one parameter touches; all contiguous, of one size. Master and moments are float32."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    weight_decay: float


def apply(update: Update, slots: list[Slot], scale: torch.Tensor) -> None:
    """Update every slot from its gradient times `scale` (float32 scalar on the device), and set its gradient to zero.

    When `scale` is NaN nothing is written, so that a non-finite gradient, found on the device, needs no wait before the launch.
    """
    from dflash_mp.drafter.adamw_kernel import adamw

    first, second = update.betas
    step_size = update.learning_rate / (1 - first**update.step)
    root = (1 - second**update.step) ** -0.5
    for slot in slots:
        size = slot.parameter.numel()
        decay = 1 - update.learning_rate * slot.weight_decay
        tensors = (slot.parameter, slot.gradient, slot.master, slot.exp_avg, slot.exp_avg_sq)
        if any(not tensor.is_contiguous() or tensor.numel() != size for tensor in tensors):
            raise RuntimeError("a parameter, its gradient, master and moments must be contiguous and of one size")
        grid = ((size + _BLOCK - 1) // _BLOCK,)
        adamw[grid](*tensors, scale, size, decay, first, second, step_size, root, update.eps, _BLOCK)
