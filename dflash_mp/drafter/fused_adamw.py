"""One AdamW update of all parameters in one pass over memory, on CUDA: Triton kernels, launched three times however many parameters there are.

The first two find the norm of the gradients and from it the scale, the third updates: it reads the gradient, master and both moments, and writes
master, moments, the rounded parameter and a zeroed gradient. That is 32 bytes per bf16 parameter, the norm's 2 included. The separate operations
(cast, scale, update, round, zero) move 52. The arithmetic is that of `torch.optim.AdamW` in float32, to rounding; the tests compare the two.
A gradient that is not finite makes the scale NaN on the device, and then nothing is written.

The kernels find their tensors in a table of addresses on the device, which is kept until one of them changes. What the host does in a step is to
compare the addresses of parameters and gradients, to launch, and to wait for the norm, not for the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Elements per program of the norm and of the update. Where they can't be read 16 bytes at a time: BLOCK and PART at a time.
STRETCH, BLOCK, PART = 8192, 2048, 256
WIDTH, WARPS = 16384, 32  # partial sums at a time, and warps, of the one program that adds them up
_ALIGNMENT = 16  # bytes that a thread reads or writes at a time


@dataclass(frozen=True)
class Update:
    """The numbers of one step. `step` counts from 1. Gradients times `mean` are the mean gradient, whose norm is clipped to `clip`."""

    step: int
    learning_rate: float
    betas: tuple[float, float]
    eps: float
    mean: float
    clip: float


@dataclass(frozen=True)
class Slot:
    """What the update of one parameter touches besides its gradient; contiguous, of one size. The parameter is bfloat16, the others float32."""

    parameter: torch.Tensor
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    weight_decay: float


class FusedAdamW:
    """Updates `slots`, at least one, all on one device. Raises `RuntimeError` for a tensor that isn't as `Slot` says.

    Masters and moments must stay where they are; parameters and gradients may move between steps.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = tuple(slots)
        self._parameters = [slot.parameter for slot in self._slots]
        device = self._parameters[0].device
        sizes = torch.tensor([parameter.numel() for parameter in self._parameters])
        stretches = (sizes + STRETCH - 1) // STRETCH
        self._first_stretches = (stretches.cumsum(0) - stretches).tolist()
        self._slot_of = torch.repeat_interleave(torch.arange(len(slots), dtype=torch.int32), stretches).to(device)
        self._weight_decays = torch.tensor([slot.weight_decay for slot in slots], dtype=torch.float32, device=device)
        padded = -(-len(self._slot_of) // WIDTH) * WIDTH
        self._squares = torch.zeros(padded, dtype=torch.float32, device=device)
        self._norm_and_scale = torch.zeros(2, dtype=torch.float32, device=device)
        self._read = _Reader(self._norm_and_scale[0])
        self._known: list[int] = []
        self._table = torch.empty(0)

    def step(self, update: Update, gradients: Sequence[torch.Tensor]) -> float:
        """Update every slot from its summed gradient (bfloat16, in the order of the slots), and zero the gradient. Returns the mean gradient's norm.

        When the norm is not finite nothing is written.
        """
        from dflash_mp.drafter import adamw_kernel

        self._find(gradients)
        first, second = update.betas
        step_size = update.learning_rate / (1 - first**update.step)
        root = (1 - second**update.step) ** -0.5
        stretches, places = len(self._slot_of), (self._table, self._slot_of)
        adamw_kernel.sum_squares[(stretches,)](*places, self._squares, STRETCH, BLOCK)
        adamw_kernel.norm_and_scale[(1,)](
            self._squares, update.mean, update.clip, self._norm_and_scale, len(self._squares), WIDTH, num_warps=WARPS
        )
        self._read.begin()
        numbers = (update.learning_rate, first, second, step_size, root, update.eps)
        adamw_kernel.adamw[(stretches * (STRETCH // BLOCK),)](
            *places, self._weight_decays, self._norm_and_scale, *numbers, STRETCH, BLOCK, PART
        )
        return self._read.end()

    def _find(self, gradients: Sequence[torch.Tensor]) -> None:
        """Make the table that of where the tensors are now. PyTorch allows no other type or size to a gradient, so addresses say enough."""
        known = [*map(torch.Tensor.data_ptr, self._parameters), *map(torch.Tensor.data_ptr, gradients)]
        if known != self._known:
            self._table = self._make_table(gradients)
            self._known = known

    def _make_table(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Int64 [slots, 8]: five addresses, size, first stretch, whether all addresses are aligned."""
        rows, device = [], self._slot_of.device
        for slot, gradient, first in zip(self._slots, gradients, self._first_stretches, strict=True):
            addresses = _addresses(slot, gradient, device)
            aligned = all(address % _ALIGNMENT == 0 for address in addresses)
            rows.append((*addresses, slot.parameter.numel(), first, aligned))
        return torch.tensor(rows, dtype=torch.int64).to(device)


class _Reader:
    """Gives the value that a scalar on a device has at `begin`, without waiting for what is queued after it."""

    def __init__(self, scalar: torch.Tensor) -> None:
        self._scalar = scalar
        self._on_host = torch.empty_like(scalar, device="cpu", pin_memory=scalar.is_cuda)
        self._copied = torch.cuda.Event() if scalar.is_cuda else None

    def begin(self) -> None:
        self._on_host.copy_(self._scalar, non_blocking=True)
        if self._copied:
            self._copied.record()

    def end(self) -> float:
        if self._copied:
            self._copied.synchronize()
        return float(self._on_host)


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
