"""The target's frozen head in fp8: logits, and the loss's gradient with respect to the hidden states.

Both products have scales finer than a tensor's, applied in float32 where the values are read anyway. Logits: a scale per position and one per token of
the vocabulary. Gradient: Σ over the vocabulary of (probability − label) · head row. The label's term, the largest, leaves the sum and is added
from the head's own rows, unrounded; the others go into the product as multiples of the most probable one (e4m3 keeps those above
1/458,752 of it), and the head's columns have a scale each.

The head is rounded once per optimizer step, each time another way (`fp8_products.dither`), for an error that stayed would move what is trained. It lies
in memory in both directions: 2·V·H bytes beside the head itself. A vocabulary that isn't a multiple of 16 is
filled up with rows of zeros, which no softmax sees; the hidden size must be one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dflash_mp.drafter.fp8_products import FP8, LARGEST, MULTIPLE, SMALLEST, dither, multiply, round_to_fp8

_ROWS_AT_ONCE = 16_384  # of the head, while it is rounded, and up to 15 more; a multiple of 16


@dataclass(frozen=True)
class ScaledHead:
    """`rows` [V', H] and `columns` [H, V'] are the head in fp8, V' the vocabulary size V rounded up to a multiple of 16."""

    weight: torch.Tensor  # [V, H], the head itself
    rows: torch.Tensor
    row_scale: torch.Tensor  # float32 [V]
    columns: torch.Tensor
    column_scale: torch.Tensor  # float32 [H]
    one: torch.Tensor  # float32 scalar

    @staticmethod
    @torch.no_grad()
    def of(weight: torch.Tensor) -> ScaledHead:
        """Round `weight` [V, H] to the nearest; H is a multiple of 16."""
        size, hidden = weight.shape
        padded = size + -size % MULTIPLE
        rows = torch.zeros((padded, hidden), dtype=FP8, device=weight.device)
        columns = torch.zeros((hidden, padded), dtype=FP8, device=weight.device)
        of_rows, of_columns = (
            torch.linalg.vector_norm(weight, float("inf"), dim).float().clamp_min(SMALLEST) for dim in (1, 0)
        )
        head = ScaledHead(
            weight, rows, of_rows / LARGEST, columns, of_columns / LARGEST, torch.ones_like(of_columns[0])
        )
        for part in _parts(size):
            head._fill(_round_into, part)
        return head

    @torch.no_grad()
    def round_anew(self, draw: int, *, compiled: bool) -> None:
        """Round the head in the way of `draw`. On a device nothing waits for it."""
        fill = _compiled(_round_into) if compiled else _round_into
        for part in _parts(len(self.weight)):
            numbers = (torch.full((), n, dtype=torch.int32, device=self.weight.device) for n in (draw, part.start))
            self._fill(fill, part, *numbers)

    def _fill(self, fill: Any, part: slice, *draw_and_first: torch.Tensor) -> None:
        target = self.rows[part], self.columns[:, part]
        fill(*target, self.weight[part], self.row_scale[part], self.column_scale, *draw_and_first)

    @property
    def nbytes(self) -> int:
        """Of what exists beside the head."""
        return self.rows.nbytes + self.columns.nbytes + self.row_scale.nbytes + self.column_scale.nbytes


def _parts(size: int) -> list[slice]:
    """Parts of the head of one length, for one compilation; the last may begin before the one before it ends. What is compiled holds a part twice.

    All begin at a multiple of 16: the compiler copies what doesn't, and between the columns of a part lie those of all others.
    """
    over = size % MULTIPLE
    length = min(size, _ROWS_AT_ONCE + over)
    starts = (min(start, size - length) for start in range(0, max(size - over, 1), _ROWS_AT_ONCE))
    return [slice(start, start + length) for start in starts]


def _round_into(
    rows: torch.Tensor,
    columns: torch.Tensor,
    weight: torch.Tensor,
    row_scale: torch.Tensor,
    column_scale: torch.Tensor,
    draw: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> None:
    """Write `weight` [n, H] to fp8 `rows` [n, H] and `columns` [H, n], which have scales of their own."""
    wide = weight.float()
    by_row, by_column = wide / row_scale[:, None], wide / column_scale
    if draw is not None:
        by_row, by_column = dither(by_row, draw, first), dither(by_column, draw, first)
    rows.copy_(round_to_fp8(by_row))
    columns.copy_(round_to_fp8(by_column.t()))


class Scored(NamedTuple):
    """Positions that went through the head: `loss` float32 [n], `right` bool [n], `gradient` [n, H] of each position's loss, or None."""

    loss: torch.Tensor
    right: torch.Tensor
    gradient: torch.Tensor | None


# Loss and hits [n]; fp8 [n, V'] and its factor [n], whose product is the logits' gradient but for the label's term; that term [n].
_Terms = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def score(
    hidden: torch.Tensor,
    head: ScaledHead,
    labels: torch.Tensor,
    teacher: torch.Tensor | None = None,
    *,
    scale: float,
    softcap: float | None,
    compiled: bool,
    differentiate: bool,
) -> Scored:
    """Cross-entropy of `labels` [n] at `hidden` [n, H], or KL from the distribution of the target's logits `teacher` [n, V], by position.

    `scale` and `softcap` are those of the logits; `compiled`: fuse what lies between the two products.
    """

    def run(function: Any) -> Any:
        return _compiled(function) if compiled else function

    values, position_scale = run(quantise_rows)(hidden)
    raw = multiply(values, head.one, head.rows, head.one, hidden.dtype)
    loss, right, slope, factor, of_label = run(_position_terms)(
        raw, position_scale, head.row_scale, teacher, labels, scale, softcap
    )
    del raw  # as large as all the rest of a chunk
    if not differentiate:
        return Scored(loss, right, None)
    product = multiply(slope, head.one, head.columns, head.one, hidden.dtype)
    gradient = run(_combine)(product, head.column_scale, factor, of_label, head.weight, labels)
    return Scored(loss, right, gradient)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [n, k] as contiguous fp8 values, and the float32 scale of each row [n]."""
    largest = x.abs().amax(1, keepdim=True).float().clamp_min(SMALLEST)
    return round_to_fp8(x.float() * (LARGEST / largest)), (largest / LARGEST).squeeze(1)


def _position_terms(
    raw: torch.Tensor,
    position_scale: torch.Tensor,
    token_scale: torch.Tensor,
    teacher: torch.Tensor | None,
    labels: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> _Terms:
    """Of `raw` [n, V'], the product of fp8 values alone. To be compiled: it then reads it three times and writes the slope, a byte a value."""
    size = len(token_scale)
    wide = raw[:, :size].float() * position_scale[:, None] * (token_scale * scale)
    bend = None  # derivative of the cap
    if softcap is not None:
        bounded = torch.tanh(wide / softcap)
        wide, bend = bounded * softcap, 1 - bounded.square()
    right = wide.argmax(1) == labels
    if teacher is None:
        loss, slope, largest, of_label = _label_terms(wide, labels, bend)
    else:
        told = teacher.float() * scale
        told = told if softcap is None else torch.tanh(told / softcap) * softcap
        loss, slope, largest, of_label = _teacher_terms(wide, told, bend)
    values = round_to_fp8(F.pad(slope * LARGEST, (0, raw.shape[1] - size)))
    return loss, right, values, largest * (scale / LARGEST), of_label * scale


def _label_terms(
    wide: torch.Tensor, labels: torch.Tensor, bend: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss [n]; probabilities [n, V] but the label's, over their largest; that [n]; the label's probability minus one [n]."""
    told = labels[:, None]
    elsewhere = torch.arange(wide.shape[1], device=wide.device) != told
    at_label = wide.gather(1, told)
    largest = torch.where(elsewhere, wide, -torch.inf).amax(1, keepdim=True)
    slope = torch.where(elsewhere, (wide - largest).exp(), 0.0)
    rest = slope.sum(1, keepdim=True).log() + largest  # log of the sum over all but the label
    loss = F.softplus(rest - at_label)
    of_label = -torch.sigmoid(rest - at_label)
    if bend is not None:
        slope, of_label = slope * bend, of_label * bend.gather(1, told)
    factor = (largest - at_label - loss).exp()
    return loss.squeeze(1), slope, factor.squeeze(1), of_label.squeeze(1)


def _teacher_terms(
    wide: torch.Tensor, told: torch.Tensor, bend: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss [n]; differences of the two distributions [n, V] over the largest of them; that [n]; zeros [n]."""
    own, other = wide.log_softmax(1), told.log_softmax(1)
    probability = other.exp()
    loss = (probability * (other - own)).sum(1)
    slope = own.exp() - probability
    if bend is not None:
        slope = slope * bend
    largest = slope.abs().amax(1, keepdim=True).clamp_min(SMALLEST)
    return loss, slope / largest, largest.squeeze(1), torch.zeros_like(loss)


def _combine(
    product: torch.Tensor,
    column_scale: torch.Tensor,
    factor: torch.Tensor,
    of_label: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """The gradient [n, H]: the scaled product and the label's term."""
    others = product.float() * column_scale * factor[:, None]
    return (others + of_label[:, None] * weight[labels].float()).to(product.dtype)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False, fullgraph=True)
