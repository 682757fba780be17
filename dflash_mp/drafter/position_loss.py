"""Objectives that need more than a sum of cross-entropies: weights that depend on the losses (D-PACE), and labels that are distributions.

As in `loss.py` the frozen head's logits exist a chunk at a time and the gradient is made in the forward pass; here the losses come position by
position, so that weights can be made of them. Distillation has the head multiply the target's hidden states, too: half as much work again
in the head. Sums are additive over rows and ranks, and rows without anchors give zeros, as there.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from dflash_mp.drafter import fp8_head
from dflash_mp.drafter.loss import BlockLoss, chunk_size, position_terms, skips_unscored


class FrozenHead(NamedTuple):
    """The target's head, `weight` [V, H] in its own dtype, and how positions go through it."""

    weight: torch.Tensor
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    compiled: bool = False  # fuse what lies between the products (worth it on CUDA)
    chunk: int | None = None  # positions per pass, at most
    scaled: fp8_head.ScaledHead | None = None  # the head in fp8, to multiply the drafter's hidden states with instead


def dpace_loss(
    hidden: torch.Tensor, head: FrozenHead, labels: torch.Tensor, scored: torch.Tensor, alpha: float
) -> BlockLoss:
    """D-PACE: slot j weighs as much as the chance to get at least so far promises, Σ over later slots m of Π s up to m.

    s = (1 − alpha) · (probability of the label) + alpha, without gradient; 1 in slots that aren't scored. `hidden` [b, N·B, H], `labels` and
    bool `scored` [b, N, B]; slot 0 is never scored. `weight` of the result is the number of blocks with a scored slot.
    """
    losses, right = _slot_losses(hidden, head, labels, scored, None)
    with torch.no_grad():
        counted = scored[:, :, 1:]
        passed = torch.where(counted, (1 - alpha) * (-losses).exp() + alpha, 1.0).cumprod(-1) * counted
        weights = passed.flip(-1).cumsum(-1).flip(-1) * counted
    return BlockLoss((losses * weights).sum(), counted.any(-1).sum().float(), _with_anchor(right))


def distillation_loss(
    hidden: torch.Tensor, head: FrozenHead, labels: torch.Tensor, weights: torch.Tensor, teacher: torch.Tensor
) -> BlockLoss:
    """Σ weight · KL(target ‖ drafter) over the slots. `weights` float32 [b, N, B], 0 where a slot isn't scored.

    `teacher` [b, N, B − 1, H]: the target's last hidden state (after its final norm) before each slot's token, slots 1 … B − 1; see
    `teacher_states`. `labels` [b, N, B] decide what counts as correct only.
    """
    losses, right = _slot_losses(hidden, head, labels, weights > 0, teacher)
    return BlockLoss((losses * weights[:, :, 1:]).sum(), weights[:, :, 1:].sum(), _with_anchor(right))


def teacher_states(last_hidden: torch.Tensor, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """[b, N, B − 1, H] of `last_hidden` [b, T, H] for blocks at `anchors` [b, N]: slot k's token is told by the state at anchor + k − 1."""
    places = anchors[:, :, None].long() + torch.arange(block_size - 1, device=anchors.device)
    places = places.clamp_max(last_hidden.shape[1] - 1)  # beyond the row's end no slot is scored
    rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    return last_hidden[rows, places]


def _slot_losses(
    hidden: torch.Tensor, head: FrozenHead, labels: torch.Tensor, scored: torch.Tensor, teacher: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss, float32, and hit of slots 1 … B − 1, [b, N, B − 1] each; 0 and false where a slot isn't scored."""
    rows, blocks, size = labels.shape
    slots = hidden.unflatten(1, (blocks, size))[:, :, 1:].flatten(0, 2)
    label, used = labels[:, :, 1:].reshape(-1).long(), scored[:, :, 1:].reshape(-1)
    told = None if teacher is None else teacher.flatten(0, 2)
    chosen = used.nonzero().squeeze(1) if skips_unscored(hidden, head.compiled) else None
    if chosen is not None:
        slots, label, told = slots[chosen], label[chosen], None if told is None else told[chosen]
    loss, right = _PositionLoss.apply(slots, label, told, head)
    if chosen is None:
        loss, right = torch.where(used, loss, 0.0), right & used
    else:
        loss = loss.new_zeros(used.shape).index_put((chosen,), loss)
        right = right.new_zeros(used.shape).index_put((chosen,), right)
    return loss.view(rows, blocks, size - 1), right.view(rows, blocks, size - 1)


def _with_anchor(right: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(right, (1, 0))


class _PositionLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor | None, head: FrozenHead
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, width = len(labels), chunk_size(len(labels), hidden.is_cuda, head.compiled, head.chunk)
        loss = torch.empty(count, dtype=torch.float32, device=hidden.device)
        right = torch.empty(count, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        terms = _compiled_terms() if head.compiled else position_terms
        weight = head.weight
        for start in range(0, count, width):
            part = slice(start, start + width)
            told = None if teacher is None else teacher[part].to(weight.dtype) @ weight.t()
            if head.scaled is not None:
                scored = fp8_head.score(
                    hidden[part],
                    head.scaled,
                    labels[part],
                    told,
                    scale=head.logit_scale,
                    softcap=head.logit_softcap,
                    compiled=head.compiled,
                    differentiate=gradient is not None,
                )
                loss[part], right[part] = scored.loss, scored.right
                if gradient is not None and scored.gradient is not None:
                    gradient[part] = scored.gradient
                continue
            logits = hidden[part].to(weight.dtype) @ weight.t()
            loss[part], right[part], slope, factor = terms(
                logits, told, labels[part], head.logit_scale, head.logit_softcap
            )
            if gradient is not None:
                torch.mul(slope @ weight, factor[:, None], out=gradient[part])
            del logits, told, slope  # before the next chunk's come
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx: Any, of_loss: torch.Tensor, of_right: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * of_loss[:, None]).to(gradient.dtype), None, None, None


@cache
def _compiled_terms() -> Any:
    return torch.compile(position_terms, dynamic=False, fullgraph=True)
