"""AdamW on fp32 master weights.

The model may compute in bf16; the optimizer keeps an fp32 master of every parameter, updates that, and rounds it back. When the model
itself is fp32 its parameters are the masters and nothing is copied. Gradients arrive as the *sum* over all rows of the
step; `step` divides them by the global sum of loss weights, clips, and updates. A bf16 model on CUDA is updated by `fused_adamw`, every other
by `torch.optim.AdamW`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from dflash_mp.config import TrainConfig
from dflash_mp.drafter import fused_adamw
from dflash_mp.errors import DflashError


class MasterAdamW:
    """Masters and moments by parameter name. Weight decay applies to matrices only, not to norms."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], train: TrainConfig) -> None:
        self.parameters = dict(named_parameters)
        self.masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self.parameters.items()
        }
        decayed = [p for p in self.masters.values() if p.dim() > 1]
        plain = [p for p in self.masters.values() if p.dim() <= 1]
        on_cuda = any(p.is_cuda for p in self.masters.values())
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": train.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=train.learning_rate,
            betas=train.betas,
            eps=train.eps,
            fused=on_cuda,
            foreach=not on_cuda,
        )
        self._clip = train.clip
        self._numbers = (train.betas, train.eps)
        self._steps_done = 0
        self._fused: fused_adamw.FusedAdamW | None = None
        if on_cuda and all(p.dtype == torch.bfloat16 for p in self.parameters.values()):
            self._fused = self._fuse(train.weight_decay)

    @torch.no_grad()
    def step(self, learning_rate: float, weight_sum: float) -> float:
        """One update from the summed gradients, which are zero afterwards. Returns the norm of the mean gradient before clipping.

        Raises `DflashError` naming the first non-finite gradient; nothing is updated then.
        """
        gradients = self._gradients()
        mean = 1.0 / weight_sum if weight_sum > 0 else 0.0
        if self._fused:
            update = fused_adamw.Update(self._steps_done + 1, learning_rate, *self._numbers, mean, self._clip)
            norm = self._fused.step(update, gradients)
        else:
            norm, scale = _norm_and_scale(gradients, mean, self._clip)
        if not math.isfinite(norm):
            bad = next(
                (name for name, g in zip(self.parameters, gradients, strict=True) if not bool(g.isfinite().all())),
                "the norm's sum",
            )
            raise DflashError(
                f"the gradient of {bad} is not finite", "lower train.learning_rate, or look at the rows of this step"
            )
        if self._fused:
            self._steps_done += 1
        else:
            self._update(gradients, learning_rate, scale)
        return norm

    def _gradients(self) -> list[torch.Tensor]:
        gradients = []
        for name, parameter in self.parameters.items():
            if (gradient := parameter.grad) is None:
                raise RuntimeError(
                    f"parameter {name} took no part in the step: every parameter must have a gradient, if only zero"
                )
            gradients.append(gradient)
        return gradients

    def _fuse(self, weight_decay: float) -> fused_adamw.FusedAdamW:
        self._materialise()
        slots = []
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            state, decay = self._adamw.state[master], weight_decay if parameter.dim() > 1 else 0.0
            slots.append(fused_adamw.Slot(parameter, master, state["exp_avg"], state["exp_avg_sq"], decay))
        return fused_adamw.FusedAdamW(slots)

    def _update(self, gradients: list[torch.Tensor], learning_rate: float, scale: float) -> None:
        for master, gradient in zip(self.masters.values(), gradients, strict=True):
            master.grad = gradient.mul_(scale) if gradient.dtype == torch.float32 else gradient.float().mul_(scale)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        for name, parameter in self.parameters.items():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])
                self.masters[name].grad = None
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Set gradients to zero in place: data-parallel buckets keep pointing at the same memory."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Masters ("master.NAME") and moments ("exp_avg.NAME", "exp_avg_sq.NAME"), fp32, on the device; the live tensors."""
        self._materialise()
        named: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            state = self._adamw.state[master]
            named[f"master.{name}"] = master.data
            named[f"exp_avg.{name}"] = state["exp_avg"]
            named[f"exp_avg_sq.{name}"] = state["exp_avg_sq"]
        return named

    @torch.no_grad()
    def restore(self, steps_done: int) -> None:
        """After the tensors of `tensors()` were overwritten in place: set the step count and round the masters into the model."""
        self._steps_done = steps_done
        for master in self.masters.values():
            self._adamw.state[master]["step"].fill_(float(steps_done))
        for name, parameter in self.parameters.items():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])

    def _materialise(self) -> None:
        """Create the moments that PyTorch would create in the first step, so that they can be saved and restored at any time."""
        for master in self.masters.values():
            if not self._adamw.state[master]:
                on_device = master.device if master.is_cuda else torch.device("cpu")
                self._adamw.state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=on_device),
                    "exp_avg": torch.zeros_like(master, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(master, memory_format=torch.preserve_format),
                }


def _norm_and_scale(gradients: list[torch.Tensor], mean: float, clip: float) -> tuple[float, float]:
    """The norm of the mean gradient, summed in float32, and what a summed gradient is multiplied with, clipping included."""
    parts = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
    norm = float(torch.linalg.vector_norm(torch.stack(list(parts)))) * mean
    return norm, min(clip / (norm + 1e-6), 1.0) * mean
