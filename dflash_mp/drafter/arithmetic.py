"""In which numbers, and with which kernels, a drafter is trained: what `train.precision` means on a device, and how the log says it.

Nothing here changes silently: `fp8_products.check_device` refuses what a device can't do before any work, `describe` names what was chosen, `fallbacks` what was asked
for and isn't done, with its cost.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dflash_mp.config import TrainConfig
from dflash_mp.drafter import attention, fp8_products
from dflash_mp.drafter.model import DraftModel
from dflash_mp.drafter.objective import MaskBuilder, Objective

_ATTENTION: dict[MaskBuilder, str] = {
    attention.flex_mask: "flex attention",
    attention.blockwise_mask: "blockwise attention",
    attention.dense_mask: "scaled dot-product attention under a dense mask",
}


def compute_dtype(options: TrainConfig, device: torch.device) -> torch.dtype:
    """The dtype that the drafter computes in; with fp8 that of everything but the products."""
    if options.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.float32 if options.precision == "fp32" else torch.bfloat16


def round_anew(model: DraftModel, objective: Objective, seed: int, step: int) -> None:
    """Have weights and head that are multiplied in fp8 rounded at random, as optimizer step `step` does: to be called before it."""
    scaled = [module for module in model.layers.modules() if isinstance(module, fp8_products.ScaledLinear)]
    of_head, *of_layers = fp8_products.draws_of(seed, step, 1 + len(scaled))
    for module, draw in zip(scaled, of_layers, strict=True):
        module.draw.fill_(draw)
    if objective.scaled_head is not None:
        objective.scaled_head.round_anew(of_head, compiled=objective.compiled)


def describe(model: DraftModel, objective: Objective) -> str:
    """Dtype, products, attention and loss, in words."""
    numbers = str(model.fc.weight.dtype).removeprefix("torch.")
    scaled = any(isinstance(module, fp8_products.ScaledLinear) for module in model.modules())
    in_fp8 = [name for name, used in (("layers", scaled), ("head", objective.scaled_head is not None)) if used]
    if in_fp8:
        numbers += f" with the products of {' and '.join(in_fp8)} in fp8"
    layers = "compiled layers" if model.compiled else "layers not compiled"
    loss = "loss fused with the head" + ("" if objective.compiled else ", not compiled")
    return f"{numbers}, {_ATTENTION[objective.build_mask]}, {layers}, {loss}"


def fallbacks(model: DraftModel, objective: Objective, options: TrainConfig, device: torch.device) -> Iterator[str]:
    """Where `train.precision: fp8` is not what it sounds like, and what that costs."""
    if options.precision != "fp8":
        return
    if device.type != "cuda":
        yield (
            "train.precision is fp8 on a CPU, which has no such products: the numbers are those of a GPU to rounding, "
            "and take longer than in fp32; set it to auto to train here"
        )
    multiple = f"fp8 needs multiples of {fp8_products.MULTIPLE}"
    matrices = sum(p.numel() for p in model.layers.parameters() if p.dim() > 1)
    left: dict[tuple[str, int, int], int] = {}
    for name, layer in fp8_products.unscaled_layers(model.layers):
        kind = (name.rpartition(".")[2], layer.in_features, layer.out_features)
        left[kind] = left.get(kind, 0) + layer.weight.numel()
    for (name, inputs, outputs), numbers in left.items():
        yield (
            f"{name} ({inputs} → {outputs}) multiplies in bfloat16, since {multiple}: "
            f"{numbers / matrices:.0%} of the layers' products go at bf16's rate"
        )
    if objective.scaled_head is None:
        yield (
            f"the head multiplies in bfloat16, since {multiple} and the hidden size is {objective.head.shape[1]}: "
            "its products go at bf16's rate"
        )
