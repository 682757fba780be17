"""Linear layers whose three products run in fp8: output, gradient of the input, gradient of the weight.

Weights, gradients and optimizer stay as in bf16; what enters a product is rounded to e4m3 (3 bits of mantissa) under one scale per tensor, found anew
each time from its largest magnitude. A random matrix is off by 2.6% (norm over norm) after rounding, a product of two by 3.7%. Magnitudes under
1/28,672 of a tensor's largest lose further bits, under 1/458,752 all: gradients take e4m3, too, because what is lost
there has no part in their norm. Weights, which stay nearly the same from step to step, are rounded at random, another way in each optimizer step
(`ScaledLinear.draw`): their mean is the weight itself. Rounded to the nearest, their errors would stay, and training would be that of other weights than
those that are exported. Scales are tensors made in the graph, so that layers share a compilation, and the passes over memory (largest
magnitude, rounding, transposing one-byte values) are left to the compiler to fuse with what is around them.

The products are PyTorch's own (`torch._scaled_mm`), on CUDA from compute capability 8.9 on. A CPU computes the same numbers, slowly. Widths must
be multiples of 16; a layer of another width is an ordinary one, which `unscaled_layers` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dflash_mp.errors import ConfigError

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of FP8
MULTIPLE = 16  # of the second operand's sizes
CAPABILITY = (8, 9)  # least, of a CUDA device
SMALLEST = 1e-30  # the largest magnitude of a tensor of zeros counts as this, so that nothing is divided by zero
_BY_ROW, _BY_COLUMN, _SLANT = (odd - (1 << 32) for odd in (0xC13FA9A9, 0x91E10DA5, 0x9E3779B1))  # of `dither`, as int32
_DROPPED = (1 << 20) - 1  # the bits of a float32's mantissa that e4m3 has no room for


class ScaledLinear(nn.Linear):
    """`nn.Linear` without bias, multiplied in fp8. Same parameter, same name; results in the input's dtype.

    Without gradients, as in held-out passes, it is an ordinary layer: an exported drafter's products are not in fp8.

    `normed`: its output goes through a norm, so its gradient is written to memory before it is rounded: the compiler would otherwise have
    one kernel reduce over the norm's width and write transposed bytes, at a tenth of the memory's speed.
    """

    draw: torch.Tensor  # int32 scalar: which way the weight is rounded

    def __init__(self, inputs: int, outputs: int, normed: bool = False) -> None:
        super().__init__(inputs, outputs, bias=False)
        self._normed = normed
        self.register_buffer("draw", torch.zeros((), dtype=torch.int32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        flat = x.flatten(0, -2)
        rows = len(flat)
        if rows % MULTIPLE:  # the gradient of the weight sums over rows
            padded: torch.Tensor = _ScaledProduct.apply(
                F.pad(flat, (0, 0, 0, -rows % MULTIPLE)), self.weight, self.draw, self._normed
            )
            return padded[:rows].unflatten(0, x.shape[:-1])
        out: torch.Tensor = _ScaledProduct.apply(flat, self.weight, self.draw, self._normed)
        return out.unflatten(0, x.shape[:-1])


def linear(inputs: int, outputs: int, fp8: bool, *, normed: bool = False) -> nn.Linear:
    """A linear layer without bias: scaled if `fp8` and its widths allow it. `normed`: its output goes through a norm."""
    if fp8 and inputs % MULTIPLE == 0 and outputs % MULTIPLE == 0:
        return ScaledLinear(inputs, outputs, normed=normed)
    return nn.Linear(inputs, outputs, bias=False)


def unscaled_layers(layers: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Names and modules of the linear layers in `layers` that multiply in their own dtype."""
    for name, module in layers.named_modules():
        if isinstance(module, nn.Linear) and not isinstance(module, ScaledLinear):
            yield name, module


def check_device(device: torch.device, precision: str) -> None:
    """Raise `ConfigError` when `precision` is fp8 and `device` has no such products. To be called before any work."""
    if precision != "fp8" or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        raise ConfigError(
            f"train.precision is fp8, but {torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}: "
            f"products in fp8 need {CAPABILITY[0]}.{CAPABILITY[1]}",
            "set train.precision to bf16 or auto, or use a GPU of the Ada or Hopper generation or a newer one",
        )


def draws_of(seed: int, step: int, count: int) -> list[int]:
    """What decides how an optimizer step rounds `count` matrices: int32 numbers, all of them equally likely."""
    random = np.random.Philox(key=np.array([seed, step], dtype=np.uint64)).random_raw(count)
    return [int(bits >> np.uint64(32)) - (1 << 31) for bits in random]


def quantise(x: torch.Tensor, draw: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` as contiguous fp8 values and the float32 scalar that they are to be multiplied with. NaN and infinities come out as NaN.

    To the nearest value, or, with `draw`, of a matrix, at random to one of the two beside it.
    """
    largest = x.abs().amax().float().clamp_min(SMALLEST)
    scaled = x.float() * (LARGEST / largest)
    return round_to_fp8(scaled if draw is None else dither(scaled, draw)), largest / LARGEST


def dither(x: torch.Tensor, draw: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
    """Float32 `x` [m, n], rows `first` and on of a matrix, each value at random at one of the two fp8 values beside it, and in the mean over `draw` at itself.

    `draw` and `first` are int32 scalars. Random bits are added below those that fp8 keeps, and cut off with them. They come from a lattice
    over rows and columns, which `draw` shifts and slants. Magnitudes under 2⁻⁶, where fp8 has fewer bits, are left to be rounded to the nearest.
    """
    rows, columns = (torch.arange(size, dtype=torch.int32, device=x.device) for size in x.shape)
    rows = rows if first is None else rows + first
    place = rows[:, None] * (draw * _SLANT + _BY_ROW) + columns * (draw * _BY_COLUMN + _SLANT) + draw
    return ((x.view(torch.int32) + ((place >> 12) & _DROPPED)) & ~_DROPPED).view(torch.float32)


def round_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """To the nearest fp8 value, contiguous; beyond the largest, that."""
    return x.clamp(-LARGEST, LARGEST).to(FP8).contiguous()


def multiply(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> torch.Tensor:
    """left · rightᵀ [m, n] in `dtype`, of contiguous fp8 `left` [m, k] and `right` [n, k], n and k multiples of 16; scales are float32 scalars.

    `fast`: tensor cores add up in some 14 bits throughout, and not for 128 columns at a time. Training doesn't: sums over thousands of tokens or
    over a vocabulary are then off by several times as much, and on an H200 the products are no faster (`bench step --precision fp8` measures both).
    """
    return torch._scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=fast
    )


class _ScaledProduct(torch.autograd.Function):
    """x [m, k] · weightᵀ [n, k]; m, n and k are multiples of 16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, draw: torch.Tensor, normed: bool) -> torch.Tensor:
        values, scale = quantise(x)
        ctx.save_for_backward(values, scale, weight, draw)
        ctx.normed = normed
        return multiply(values, scale, *quantise(weight, draw), x.dtype)

    @staticmethod
    def backward(ctx: Any, of_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        values, scale, weight, draw = ctx.saved_tensors
        slopes, slope_scale = quantise(_written(of_out) if ctx.normed and torch.compiler.is_compiling() else of_out)
        weights, weight_scale = quantise(weight, draw)
        of_x = multiply(slopes, slope_scale, _turned(weights), weight_scale, of_out.dtype)
        of_weight = multiply(_turned(slopes), slope_scale, _turned(values), scale, weight.dtype)
        return of_x, of_weight, None, None


@torch.library.custom_op("dflash_mp::written", mutates_args=())
def _written(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that the compiler can't look into: what makes `x` and what reads the copy stay different kernels."""
    return x.clone(memory_format=torch.contiguous_format)


@_written.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _turned(values: torch.Tensor) -> torch.Tensor:
    """The transpose, in memory, too: tensor cores read both operands of an fp8 product along the columns that are summed over."""
    return values.t().contiguous()
