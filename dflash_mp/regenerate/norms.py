"""RMS norms in one pass: PyTorch's own operation in the place of a model's eight or so.

A step of single tokens is made of many small kernels, a third of them of norms. `fusable` finds the modules whose results PyTorch's operation
gives on random numbers, to the rounding of their dtype; `fused` puts it in their place for a while. What differs is one rounding: the
weight is multiplied before the result is rounded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_ROUNDINGS = 4  # of the largest value: what a fused norm may differ by


@torch.inference_mode()
def fusable(decoder: nn.Module) -> list[nn.Module]:
    """The RMS norms of `decoder` that PyTorch's operation computes, too."""
    return [module for module in decoder.modules() if _epsilon(module) is not None and _agrees(module)]


@contextmanager
def fused(norms: Sequence[Any]) -> Iterator[None]:
    """Let PyTorch's operation stand in for the forward of each of `norms`."""
    for norm in norms:
        norm.forward = partial(_forward, norm)
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def _forward(norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    weight = norm.weight
    if hidden_states.dtype != weight.dtype:
        unchanged: torch.Tensor = type(norm).forward(norm, hidden_states)
        return unchanged
    return functional.rms_norm(hidden_states, weight.shape, weight, _epsilon(norm))


def _agrees(norm: Any) -> bool:
    weight = norm.weight
    draw = torch.Generator().manual_seed(0)
    values = (3 * torch.randn(4, *weight.shape, generator=draw)).to(weight.device, weight.dtype)
    own, mine = norm(values).float(), _forward(norm, values).float()
    return bool(((own - mine).abs().max() <= _ROUNDINGS * torch.finfo(weight.dtype).eps * own.abs().max()).item())


def _epsilon(norm: Any) -> float | None:
    """None for a module that is no RMS norm with one weight per value and nothing else to take."""
    weight = getattr(norm, "weight", None)
    if not type(norm).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1:
        return None
    if len(inspect.signature(type(norm).forward).parameters) != 2:
        return None
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return None if found is None else float(found)
