"""Cross-entropy of the blocks' labels under the target's frozen head, without ever holding all logits.

The head has no gradient, so the gradient with respect to the hidden states is computed in the forward pass, chunk by chunk, and the backward
pass only scales it. Memory: a few buffers of `chunk × V` float32, whatever the number of blocks. Slot 0 is the anchor and never reaches
the head; on a CPU nor does any slot without weight, unless compiled (static shapes; the results are equal).

Losses come as sums, so that the caller can normalise by the weight of a whole optimizer step over all ranks. With no weight at all the loss
is 0 and so is every gradient, which still exists: a rank without a valid anchor takes part like the others.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from dflash_mp.drafter import fp8_head

_CHUNK_CUDA = 4096
_CHUNK_CPU = 256
_TILE = 128  # rows of a matrix product's tile


class BlockLoss(NamedTuple):
    """The loss of a micro-batch."""

    total: torch.Tensor  # float32 scalar: Σ weight · cross-entropy; differentiable with respect to `hidden`
    weight: torch.Tensor  # float32 scalar: Σ weight
    correct: torch.Tensor  # bool [b, N, B]: the slot has weight and its largest logit is the label's


class _Head(NamedTuple):
    weight: torch.Tensor  # [V, H]
    scale: float
    softcap: float | None
    chunk: int
    compiled: bool
    scaled: fp8_head.ScaledHead | None


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
    head: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    *,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    chunk: int | None = None,
    compiled: bool = False,
    scaled: fp8_head.ScaledHead | None = None,
) -> BlockLoss:
    """Weighted cross-entropy of `labels` under `head`.

    `hidden` [b, N·B, H] are the drafter's outputs; `head` [V, H] is the target's, in its own dtype; `labels` [b, N, B] are integers;
    `weights` [b, N, B] are float32, 0 where a slot isn't scored, for example `blocks.scored * slot_weights(B)`. `chunk`: positions per pass
    through the head, at most; the result depends on it by rounding only. `compiled`: fuse what lies between the two products (worth it on
    CUDA). `scaled`: the head in fp8, to multiply with instead.
    """
    size = labels.shape[-1]
    slots = hidden.unflatten(1, labels.shape[1:])[:, :, 1:].flatten(0, 2)
    label, weight = labels[:, :, 1:].reshape(-1).long(), weights[:, :, 1:].reshape(-1).float()
    chosen = weight.nonzero().squeeze(1) if skips_unscored(hidden, compiled) else None
    if chosen is not None:
        slots, label, weight = slots[chosen], label[chosen], weight[chosen]
    width = chunk_size(len(label), hidden.is_cuda, compiled, chunk)
    how = _Head(head, logit_scale, logit_softcap, width, compiled, scaled)
    total, right = _HeadCrossEntropy.apply(slots, label, weight, how)
    if chosen is not None:
        right = right.new_zeros(labels.numel() // size * (size - 1)).index_put_((chosen,), right)
    correct = torch.zeros(labels.shape, dtype=torch.bool, device=labels.device)
    correct[:, :, 1:] = right.view(*labels.shape[:2], size - 1)
    return BlockLoss(total, weight.sum(), correct)


def skips_unscored(hidden: torch.Tensor, compiled: bool) -> bool:
    """Whether slots without weight are left out before the head, so that shapes differ from row to row."""
    return not hidden.is_cuda and not compiled


def chunk_size(positions: int, on_cuda: bool, compiled: bool, most: int | None = None) -> int:
    """How many positions go through the head at once: at most `most`. Compiled: in chunks as equal as tiles allow, so that one length is compiled."""
    width = most or (_CHUNK_CUDA if on_cuda else _CHUNK_CPU)
    if compiled and _TILE < width < positions:
        chunks = -(-positions // width)
        width = min(width, -(-positions // (chunks * _TILE)) * _TILE)
    return width


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, head: _Head
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        right = torch.zeros(labels.shape, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        through_head = _through_head if head.scaled is None else _through_scaled_head
        through_head(hidden, labels, weights, head, total, right, gradient)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, of_total: torch.Tensor, of_right: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_total.to(gradient.dtype), None, None, None


def _through_head(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    head: _Head,
    total: torch.Tensor,
    right: torch.Tensor,
    gradient: torch.Tensor | None,
) -> None:
    """Add the loss to `total` and fill `right` and `gradient`, where it is wanted."""
    buffer = head.weight.new_empty(min(head.chunk, len(labels)), head.weight.shape[0])
    cross_entropy = _compiled_cross_entropy() if head.compiled else _cross_entropy_in_place
    for start in range(0, len(labels), head.chunk):
        part = slice(start, start + head.chunk)
        # Fresh memory for each chunk would cost a CPU a third of the product's time in page faults.
        logits = torch.mm(hidden[part].to(buffer.dtype), head.weight.t(), out=buffer[: len(labels[part])])
        loss, right[part], slope, factor = cross_entropy(logits, labels[part], weights[part], head.scale, head.softcap)
        total += loss
        if gradient is not None:
            torch.mul(slope @ head.weight, factor[:, None], out=gradient[part])
        del slope  # before the next chunk's comes


def _through_scaled_head(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    head: _Head,
    total: torch.Tensor,
    right: torch.Tensor,
    gradient: torch.Tensor | None,
) -> None:
    """The same in fp8."""
    if head.scaled is None:
        raise RuntimeError("there is no head in fp8")
    for start in range(0, len(labels), head.chunk):
        part = slice(start, start + head.chunk)
        scored = fp8_head.score(
            hidden[part],
            head.scaled,
            labels[part],
            scale=head.scale,
            softcap=head.softcap,
            compiled=head.compiled,
            differentiate=gradient is not None,
        )
        total += (scored.loss * weights[part]).sum()
        right[part] = scored.right & (weights[part] > 0)
        if gradient is not None and scored.gradient is not None:
            torch.mul(scored.gradient, weights[part, None], out=gradient[part])


def position_terms(
    logits: torch.Tensor, teacher: torch.Tensor | None, labels: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of `logits` [n, V]: losses and hits [n], and their gradient as `slope` [n, V], in the logits' dtype, times `factor` [n].

    `teacher` [n, V]: the target's logits, whose distribution is the label then. The factor (over the softmax's denominator) is left for after
    the product with the head, where rows are short. To be compiled: without in-place operations it fuses into three reads of the logits and
    one write of the slope.
    """
    wide = logits.float() * scale
    bounded = None
    if softcap is not None:
        bounded = torch.tanh(wide / softcap)
        wide = bounded * softcap
    largest, guess = wide.max(1, keepdim=True)
    exponent = (wide - largest).exp()
    denominator = exponent.sum(1, keepdim=True)
    normaliser = denominator.log() + largest
    if teacher is None:
        loss = normaliser - wide.gather(1, labels[:, None])
        columns = torch.arange(logits.shape[1], device=logits.device)
        slope = torch.where(columns == labels[:, None], exponent - denominator, exponent)
    else:
        told = teacher.float() * scale
        if softcap is not None:
            told = torch.tanh(told / softcap) * softcap
        log_told = told.log_softmax(1)
        probability = log_told.exp()
        loss = (probability * (log_told - wide)).sum(1, keepdim=True) + normaliser
        slope = exponent - probability * denominator
    if bounded is not None:
        slope = slope * (1 - bounded.square())
    return loss.squeeze(1), guess.squeeze(1) == labels, slope.to(logits.dtype), scale / denominator.squeeze(1)


def _cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`position_terms` of weighted positions: the sum of their losses, hits of those with weight, slope, and factor."""
    losses, right, slope, factor = position_terms(logits, None, labels, scale, softcap)
    return (losses * weights).sum(), right & (weights > 0), slope, factor * weights


def _cross_entropy_in_place(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, uncompiled: it overwrites `logits` when they are float32, for fresh memory is dear on a CPU."""
    dtype, logits = logits.dtype, logits.float()
    if scale != 1.0:
        logits.mul_(scale)
    bounded = None
    if softcap is not None:
        bounded = logits.div_(softcap).tanh_()
        logits = bounded * softcap
    largest, guess = logits.max(1, keepdim=True)
    of_label = logits.gather(1, labels[:, None])
    slope = logits.sub_(largest).exp_()
    denominator = slope.sum(1, keepdim=True)
    loss = (denominator.log() + largest - of_label).squeeze(1) * weights
    slope.scatter_add_(1, labels[:, None], -denominator)
    if bounded is not None:
        slope.mul_(1 - bounded.square())
    right = (guess.squeeze(1) == labels) & (weights > 0)
    return loss.sum(), right, slope.to(dtype), weights * scale / denominator.squeeze(1)


@cache
def _compiled_cross_entropy() -> Any:
    return torch.compile(_cross_entropy, dynamic=False, fullgraph=True)
