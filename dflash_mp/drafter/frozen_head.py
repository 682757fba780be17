"""The target's frozen head: loss and hit of each drafted slot, without ever holding all logits.

The head has no gradient, so the gradient with respect to the hidden states is computed in the forward pass, chunk by chunk, and the backward
pass only scales it. Memory: a few buffers of `chunk × V`, whatever the number of blocks. Slot 0 is the anchor and never reaches the head; on a
CPU nor does any slot that isn't scored, unless compiled (static shapes; the results are equal).

With the target's own distribution in place of labels the head multiplies the target's hidden states, too: half as much work again.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from dflash_mp.drafter import fp8_head

_CHUNK_CUDA = 4096
_CHUNK_CPU = 256
_TILE = 128  # rows of a matrix product's tile


class FrozenHead(NamedTuple):
    """The target's head, `weight` [V, H] in its own dtype, and how positions go through it."""

    weight: torch.Tensor
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    compiled: bool = False  # fuse what lies between the products (worth it on CUDA)
    chunk: int | None = None  # positions per pass, at most; the result depends on it by rounding only
    scaled: fp8_head.ScaledHead | None = None  # the head in fp8, to multiply the drafter's hidden states with instead


def slot_losses(
    hidden: torch.Tensor,
    head: FrozenHead,
    labels: torch.Tensor,
    scored: torch.Tensor,
    teacher: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss, float32, and hit of slots 1 … B − 1, [b, N, B − 1] each; 0 and false where a slot isn't scored.

    `hidden` [b, N·B, H]; `labels` [b, N, B], integers; bool `scored` [b, N, B]. The loss is the label's cross-entropy, or, with the target's states
    `teacher` [b, N, B − 1, H], the KL divergence from the distribution that the head makes of these.
    """
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


def skips_unscored(hidden: torch.Tensor, compiled: bool) -> bool:
    """Whether slots that aren't scored are left out before the head, so that shapes differ from row to row."""
    return not hidden.is_cuda and not compiled


def chunk_size(positions: int, on_cuda: bool, compiled: bool, most: int | None = None) -> int:
    """How many positions go through the head at once: at most `most`. Compiled: in chunks as equal as tiles allow, so that one length is compiled."""
    width = most or (_CHUNK_CUDA if on_cuda else _CHUNK_CPU)
    if compiled and _TILE < width < positions:
        chunks = -(-positions // width)
        width = min(width, -(-positions // (chunks * _TILE)) * _TILE)
    return width


class _PositionLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor | None, head: FrozenHead
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        right = torch.empty(len(labels), dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        through_head = _through_head if head.scaled is None else _through_scaled_head
        through_head(hidden, labels, teacher, head, loss, right, gradient)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx: Any, of_loss: torch.Tensor, of_right: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * of_loss[:, None]).to(gradient.dtype), None, None, None


def _through_head(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | None,
    head: FrozenHead,
    loss: torch.Tensor,
    right: torch.Tensor,
    gradient: torch.Tensor | None,
) -> None:
    """Fill `loss`, `right` and, where it is wanted, `gradient`."""
    weight = head.weight
    width = chunk_size(len(labels), hidden.is_cuda, head.compiled, head.chunk)
    # Fresh memory for each chunk would cost a CPU a third of the product's time in page faults.
    buffers = [weight.new_empty(min(width, len(labels)), len(weight)) for _ in range(1 if teacher is None else 2)]
    terms: Any = _compiled_terms() if head.compiled else position_terms if teacher is not None else terms_in_place
    for start in range(0, len(labels), width):
        part = slice(start, start + width)
        logits = _product(hidden[part], weight, buffers[0])
        told = None if teacher is None else _product(teacher[part], weight, buffers[1])
        loss[part], right[part], slope, factor = terms(logits, told, labels[part], head.logit_scale, head.logit_softcap)
        if gradient is not None:
            torch.mul(slope @ weight, factor[:, None], out=gradient[part])
        del slope  # before the next chunk's comes


def _product(states: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    return torch.mm(states.to(weight.dtype), weight.t(), out=buffer[: len(states)])


def _through_scaled_head(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | None,
    head: FrozenHead,
    loss: torch.Tensor,
    right: torch.Tensor,
    gradient: torch.Tensor | None,
) -> None:
    """The same in fp8, but for the target's own logits."""
    if head.scaled is None:
        raise RuntimeError("there is no head in fp8")
    width = chunk_size(len(labels), hidden.is_cuda, head.compiled, head.chunk)
    for start in range(0, len(labels), width):
        part = slice(start, start + width)
        scored = fp8_head.score(
            hidden[part],
            head.scaled,
            labels[part],
            None if teacher is None else teacher[part].to(head.weight.dtype) @ head.weight.t(),
            scale=head.logit_scale,
            softcap=head.logit_softcap,
            compiled=head.compiled,
            differentiate=gradient is not None,
        )
        loss[part], right[part] = scored.loss, scored.right
        if gradient is not None and scored.gradient is not None:
            gradient[part] = scored.gradient


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


def terms_in_place(
    logits: torch.Tensor, teacher: None, labels: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`position_terms` of labels, uncompiled: it overwrites `logits` when they are float32, for fresh memory is dear on a CPU."""
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
    loss = denominator.log() + largest - of_label
    slope.scatter_add_(1, labels[:, None], -denominator)
    if bounded is not None:
        slope.mul_(1 - bounded.square())
    return loss.squeeze(1), guess.squeeze(1) == labels, slope.to(dtype), scale / denominator.squeeze(1)


@cache
def _compiled_terms() -> Any:
    return torch.compile(position_terms, dynamic=False, fullgraph=True)
