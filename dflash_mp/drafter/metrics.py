"""What a step measured: sums that are added over micro-batches and ranks in one collective, and the figures made of them.

Accuracy of slot `k` is the share of valid slots whose argmax is the label. The acceptance length of a block is 1 (the bonus token) plus
the run of leading correct slots; `tau` is its mean over blocks (never a product of mean accuracies, which is biased).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

_SCALARS = (
    "loss",  # Σ weight · cross-entropy
    "weight",  # Σ weight
    "blocks",  # blocks with at least one valid slot
    "accepted",  # Σ acceptance length over those
    "supervised",  # supervised tokens of the rows
    "covered",  # of those, tokens that are a label of some block
    "tokens",  # tokens of the rows, padding included
    "waited",  # seconds this rank waited for rows, summed over ranks
    "stop",  # ranks that were asked to stop
)


class StepSums:
    """Additive sums of a step, float64 on `device`: one vector, so that one all-reduce adds everything."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.values = torch.zeros(len(_SCALARS) + 2 * block_size, dtype=torch.float64, device=device)

    def add(self, name: str, value: torch.Tensor | float) -> None:
        """Add to a scalar sum; a tensor stays on the device (no synchronisation)."""
        self.values[_SCALARS.index(name)] += value

    def add_blocks(self, correct: torch.Tensor, valid: torch.Tensor) -> None:
        """Add the outcome of blocks: `correct` and `valid`, bool [blocks, B]; slot 0 is never valid."""
        right = correct & valid
        used = valid.any(-1)
        run = right[:, 1:].int().cumprod(-1).sum(-1)
        self.add("blocks", used.sum())
        self.add("accepted", (used * (1 + run)).sum())
        base = len(_SCALARS)
        self.values[base : base + self.block_size] += right.sum(0)
        self.values[base + self.block_size :] += valid.sum(0)

    def figures(self) -> Figures:
        """The figures of these sums; synchronises with the device."""
        sums = self.values.tolist()
        named = dict(zip(_SCALARS, sums, strict=False))
        base = len(_SCALARS)
        right, valid = sums[base : base + self.block_size], sums[base + self.block_size :]
        return Figures(
            loss=_ratio(named["loss"], named["weight"]),
            weight=named["weight"],
            tau=_ratio(named["accepted"], named["blocks"]),
            accuracy=_ratio(sum(right), sum(valid)),
            accuracy_per_slot=tuple(_ratio(r, v) for r, v in zip(right[1:], valid[1:], strict=True)),
            coverage=_ratio(named["covered"], named["supervised"]),
            tokens=int(named["tokens"]),
            waited=named["waited"],
            stop=named["stop"] > 0,
        )


@dataclass(frozen=True)
class Figures:
    """Means over the rows of one step (or of the held-out rows), all ranks together."""

    loss: float
    weight: float
    tau: float
    accuracy: float
    accuracy_per_slot: tuple[float, ...]  # slots 1 … B − 1
    coverage: float  # share of supervised tokens that some block predicted
    tokens: int
    waited: float  # seconds, summed over ranks
    stop: bool  # some rank was asked to stop

    def public(self) -> dict[str, Any]:
        """What goes to logs: everything but the bookkeeping."""
        return {key: value for key, value in asdict(self).items() if key not in ("weight", "waited", "stop", "tokens")}


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
