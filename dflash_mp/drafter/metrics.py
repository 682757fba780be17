"""What a step measured: sums that are added over micro-batches and ranks in one collective, and the figures made of them.

Accuracy of slot `k` is the share of valid slots whose argmax is the label. The acceptance length of a block is 1 (the bonus token) plus
the run of leading correct slots; `tau` is its mean over blocks (never a product of mean accuracies, which is biased).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

_BOOKKEEPING = ("weight", "waits", "stop", "abandoned", "tokens")
_SCALARS = (
    "loss",  # Σ weight · cross-entropy
    "weight",  # Σ weight
    "blocks",  # blocks with at least one valid slot
    "accepted",  # Σ acceptance length over those
    "supervised",  # supervised tokens of the rows
    "covered",  # of those, tokens that are a label of some block
    "tokens",  # tokens of the rows, padding included
    "stop",  # ranks that were asked to stop
    "abandoned",  # ranks that lacked a row when they were asked to stop
)


class StepSums:
    """Additive sums of a step, float64 on `device`: one vector, so that one all-reduce adds everything.

    What must not be added over ranks, the seconds that each of `ranks` waited for rows, has a place for each.
    """

    def __init__(self, block_size: int, device: torch.device, ranks: int = 1) -> None:
        self.block_size, self.ranks = block_size, ranks
        self.values = torch.zeros(len(_SCALARS) + 2 * block_size + ranks, dtype=torch.float64, device=device)

    def add(self, name: str, value: torch.Tensor | float) -> None:
        """Add to a scalar sum; a tensor stays on the device (no synchronisation)."""
        self.values[_SCALARS.index(name)] += value

    def add_wait(self, rank: int, seconds: float) -> None:
        """Add to the seconds that `rank` waited for rows."""
        self.values[len(_SCALARS) + 2 * self.block_size + rank] += seconds

    def add_blocks(self, correct: torch.Tensor, valid: torch.Tensor) -> None:
        """Add the outcome of blocks: `correct` and `valid`, bool [blocks, B]; slot 0 is never valid."""
        right = correct & valid
        used = valid.any(-1)
        run = right[:, 1:].int().cumprod(-1).sum(-1)
        self.add("blocks", used.sum())
        self.add("accepted", (used * (1 + run)).sum())
        base = len(_SCALARS)
        self.values[base : base + self.block_size] += right.sum(0)
        self.values[base + self.block_size : base + 2 * self.block_size] += valid.sum(0)

    def figures(self) -> Figures:
        """The figures of these sums; synchronises with the device."""
        sums = self.values.tolist()
        named = dict(zip(_SCALARS, sums, strict=False))
        base = len(_SCALARS)
        end = base + 2 * self.block_size
        right, valid, waits = sums[base : base + self.block_size], sums[base + self.block_size : end], sums[end:]
        return Figures(
            loss=_ratio(named["loss"], named["weight"]),
            weight=named["weight"],
            tau=_ratio(named["accepted"], named["blocks"]),
            accuracy=_ratio(sum(right), sum(valid)),
            accuracy_per_slot=tuple(_ratio(r, v) for r, v in zip(right[1:], valid[1:], strict=True)),
            coverage=_ratio(named["covered"], named["supervised"]),
            tokens=int(named["tokens"]),
            waits=tuple(waits),
            stop=named["stop"] > 0,
            abandoned=named["abandoned"] > 0,
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
    waits: tuple[float, ...]  # seconds that each rank waited for rows
    stop: bool  # some rank was asked to stop
    abandoned: bool  # some rank lacked rows: these are the figures of nothing

    @property
    def longest_wait(self) -> float:
        """Seconds of the rank that waited longest."""
        return max(self.waits)

    def public(self) -> dict[str, Any]:
        """What goes to logs: everything but the bookkeeping."""
        return {key: value for key, value in asdict(self).items() if key not in _BOOKKEEPING}


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
