"""Choosing tokens: greedy, or sampling that speculation leaves unchanged.

`verify` accepts a drafted token x with probability min(1, p(x) / q(x)) and otherwise draws from norm(max(p − q, 0)): the committed tokens are
distributed as if the target, p, had drawn each of them alone, whatever the drafter's q. All randomness comes from the generator given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. `top_k` 0 and `top_p` 1 cut nothing; when both cut, top-k goes first."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"{self}: temperature and top_k must be at least 0, top_p above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 probabilities [..., V] of `logits` [..., V] after temperature, top-k and top-p. Not for greedy."""
        scores = logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            kept, places = scores.topk(self.top_k, dim=-1)
            scores = torch.full_like(scores, float("-inf")).scatter(-1, places, kept)
        probabilities = scores.softmax(-1)
        if self.top_p < 1:
            ordered, places = probabilities.sort(dim=-1, descending=True)
            ordered = ordered * (ordered.cumsum(-1) - ordered < self.top_p)  # the token that crosses top_p stays
            probabilities = torch.zeros_like(probabilities).scatter(-1, places, ordered)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities

    def choose(self, logits: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """A token for each row of `logits` [n, V]: int64 [n]. `generator` is of the logits' device; greedy needs none."""
        return logits.argmax(-1) if self.greedy else draw(self.probabilities(logits), generator)


GREEDY = Sampling()


def draw(probabilities: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """One token from each row of `probabilities` [n, V]: int64 [n]."""
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def match(drafted: torch.Tensor, target_logits: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Greedy verification of `drafted` [n] by `target_logits` [n+1, V]: (number accepted, the target's own next token, 0-d).

    `target_logits[i]` are those after the i-th drafted token, index 0 those before any.
    """
    own = target_logits.argmax(-1)
    accepted = int((drafted == own[:-1]).cumprod(0).sum())
    return accepted, own[accepted]


def verify(
    drafted: torch.Tensor, target: torch.Tensor, drafter: torch.Tensor, generator: torch.Generator | None
) -> tuple[int, torch.Tensor]:
    """Lossless rejection of `drafted` [n], drawn from `drafter` [n, V], by `target` [n+1, V]: as `match`. Both are probabilities."""
    count = drafted.shape[0]
    places = drafted.unsqueeze(-1)
    p, q = target[:count].gather(-1, places).squeeze(-1), drafter.gather(-1, places).squeeze(-1)
    uniform = torch.rand(count, generator=generator, device=target.device)
    accepted = int((uniform * q < p).to(torch.int64).cumprod(0).sum())
    if accepted == count:
        return accepted, draw(target[count:], generator)[0]
    residual = (target[accepted] - drafter[accepted]).clamp_min(0)
    if not bool(residual.sum() > 0):  # p and q are equal up to rounding
        residual = target[accepted]
    return accepted, draw(residual.unsqueeze(0), generator)[0]
