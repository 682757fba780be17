"""One AdamW update of all parameters in one pass over memory and one launch, on CUDA: a Triton kernel.

It reads the gradient, master and both moments, and writes master, moments, the rounded parameter and a zeroed gradient: 32 bytes per bf16
parameter. The separate operations (cast, scale, update, round, zero) move 52. The arithmetic is that of `torch.optim.AdamW` in
float32, to rounding; the tests compare the two.

The kernel finds its tensors in a table of addresses on the device, which is kept until one of them changes. What the host does in a step is to
compare addresses and to launch once, however many parameters there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK, PART = 2048, 256  # elements per program; of them at a time where they can't be read 16 bytes at a time
_ALIGNMENT = 16  # bytes that a thread reads or writes at a time


@dataclass(frozen=True)
class Update:
    """The numbers of one step. `step` counts from 1."""

    step: int
    learning_rate: float
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True)
class Slot:
    """What the update of one parameter touches besides its gradient; contiguous, of one size. The parameter is bfloat16, the others float32."""

    parameter: torch.Tensor
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    weight_decay: float


class FusedAdamW:
    """Updates `slots`, at least one, all on one device. Raises `RuntimeError` for a tensor that isn't as `Slot` says."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = tuple(slots)
        device = self._slots[0].parameter.device
        sizes = torch.tensor([slot.parameter.numel() for slot in self._slots])
        programs = (sizes + BLOCK - 1) // BLOCK
        self._first_programs = (programs.cumsum(0) - programs).tolist()
        self._slot_of = torch.repeat_interleave(torch.arange(len(slots), dtype=torch.int32), programs).to(device)
        self._weight_decays = torch.tensor([slot.weight_decay for slot in slots], dtype=torch.float32, device=device)
        self._kept = [t for slot in slots for t in (slot.parameter, slot.master, slot.exp_avg, slot.exp_avg_sq)]
        self._known: tuple[object, ...] = ()
        self._table = torch.empty(0)

    def apply(self, update: Update, gradients: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
        """Update every slot from its gradient (bfloat16, in the order of the slots) times `scale` (float32 scalar on the device), and zero the gradient.

        When `scale` is NaN nothing is written, so that a non-finite gradient, found on the device, needs no wait before the launch.
        """
        from dflash_mp.drafter.adamw_kernel import adamw

        self._find(gradients)
        first, second = update.betas
        step_size = update.learning_rate / (1 - first**update.step)
        root = (1 - second**update.step) ** -0.5
        tensors = (self._table, self._slot_of, self._weight_decays, scale)
        adamw[(len(self._slot_of),)](
            *tensors, update.learning_rate, first, second, step_size, root, update.eps, BLOCK, PART
        )

    def _find(self, gradients: Sequence[torch.Tensor]) -> None:
        """Make the table that of where the tensors are now."""
        known = (
            [tensor.data_ptr() for tensor in self._kept],
            [(gradient.data_ptr(), gradient.dtype, gradient.is_contiguous()) for gradient in gradients],
        )
        if known != self._known:
            self._table = self._make_table(gradients)
            self._known = known

    def _make_table(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Int64 [slots, 8]: five addresses, size, first program, whether all addresses are aligned."""
        rows, device = [], self._slot_of.device
        for slot, gradient, first in zip(self._slots, gradients, self._first_programs, strict=True):
            addresses = _addresses(slot, gradient, device)
            aligned = all(address % _ALIGNMENT == 0 for address in addresses)
            rows.append((*addresses, slot.parameter.numel(), first, aligned))
        return torch.tensor(rows, dtype=torch.int64).to(device)


def _addresses(slot: Slot, gradient: torch.Tensor, device: torch.device) -> tuple[int, ...]:
    size = slot.parameter.numel()
    tensors = (slot.parameter, gradient, slot.master, slot.exp_avg, slot.exp_avg_sq)
    for number, tensor in enumerate(tensors):
        dtype = torch.bfloat16 if number < 2 else torch.float32
        if tensor.dtype != dtype or tensor.numel() != size or not tensor.is_contiguous() or tensor.device != device:
            raise RuntimeError(
                "a parameter and its gradient must be bfloat16, its master and moments float32, and all of them contiguous, "
                "of one size and on one device"
            )
    return tuple(tensor.data_ptr() for tensor in tensors)
