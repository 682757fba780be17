"""The losses of drafted blocks: cross-entropy with weights that decay over the slots, D-PACE's weights, or the target's distribution as labels.

Losses come as sums, so that the caller can normalise by the weight of a whole optimizer step over all ranks; they are additive over rows and ranks. With
no weight at all the loss is 0 and so is every gradient, which still exists: a rank without a valid anchor takes part like the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from dflash_mp.drafter.frozen_head import FrozenHead, slot_losses


class BlockLoss(NamedTuple):
    """The loss of a micro-batch."""

    total: torch.Tensor  # float32 scalar: Σ weight · loss of a slot; differentiable with respect to `hidden`
    weight: torch.Tensor  # float32 scalar: what the gradients are to be divided by
    correct: torch.Tensor  # bool [b, N, B]: the slot is scored and its largest logit is the label's


def slot_weights(block_size: int, gamma: float | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
    """Weight of each slot, float32 [B]: 0 for the anchor, then exp(−(k−1)/gamma) for k = 1 … B−1."""
    decay = default_gamma(block_size) if gamma is None else gamma
    slots = torch.arange(block_size, dtype=torch.float32)
    weights = torch.exp(-(slots - 1) / decay)
    weights[0] = 0.0
    return weights.to(device)


def default_gamma(block_size: int) -> float:
    """The paper's decay: 16 → 7, 10 → 5, 8 → 4; straight lines between and beyond those, at least 1."""
    if block_size <= 10:
        return max(1.0, 4 + (block_size - 8) / 2)
    return 5 + (block_size - 10) / 3


def block_loss(
    hidden: torch.Tensor,
    head: FrozenHead,
    labels: torch.Tensor,
    weights: torch.Tensor,
    teacher: torch.Tensor | None = None,
) -> BlockLoss:
    """Σ weight · cross-entropy over the slots; with `teacher`, Σ weight · KL(target ‖ drafter). `weight` of the result is Σ weight.

    `hidden` [b, N·B, H] are the drafter's outputs; `labels` [b, N, B] are integers; `weights` [b, N, B] are float32, 0 where a slot isn't
    scored, for example `blocks.scored * slot_weights(B)`. `teacher` [b, N, B − 1, H]: the target's last hidden state (after its final norm) before each
    slot's token, slots 1 … B − 1; see `teacher_states`. The labels then decide only what counts as correct.
    """
    losses, right = slot_losses(hidden, head, labels, weights > 0, teacher)
    used = weights[:, :, 1:].float()
    return BlockLoss((losses * used).sum(), used.sum(), F.pad(right, (1, 0)))


def dpace_loss(
    hidden: torch.Tensor, head: FrozenHead, labels: torch.Tensor, scored: torch.Tensor, alpha: float
) -> BlockLoss:
    """D-PACE: slot j weighs as much as the chance to get at least so far promises, Σ over later slots m of Π s up to m.

    s = (1 − alpha) · (probability of the label) + alpha, without gradient; 1 in slots that aren't scored. `hidden` [b, N·B, H], `labels` and
    bool `scored` [b, N, B]; slot 0 is never scored. `weight` of the result is the number of blocks with a scored slot.
    """
    losses, right = slot_losses(hidden, head, labels, scored)
    with torch.no_grad():
        counted = scored[:, :, 1:]
        passed = torch.where(counted, (1 - alpha) * (-losses).exp() + alpha, 1.0).cumprod(-1) * counted
        # A cumulative sum would do, but CUDA's is refused where kernels must be deterministic.
        slots = torch.arange(counted.shape[-1], device=losses.device)
        later = slots >= slots[:, None]
        weights = torch.where(later, passed[..., None, :], 0.0).sum(-1) * counted
    return BlockLoss((losses * weights).sum(), counted.any(-1).sum().float(), F.pad(right, (1, 0)))


def teacher_states(last_hidden: torch.Tensor, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """[b, N, B − 1, H] of `last_hidden` [b, T, H] for blocks at `anchors` [b, N]: slot k's token is told by the state at anchor + k − 1."""
    places = anchors[:, :, None].long() + torch.arange(block_size - 1, device=anchors.device)
    places = places.clamp_max(last_hidden.shape[1] - 1)  # beyond the row's end no slot is scored
    rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    return last_hidden[rows, places]
