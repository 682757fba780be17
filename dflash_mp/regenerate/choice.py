"""Choosing a token for every slot at once, each from a random number of its own.

The numbers of an answer are a function of (seed, conversation, turn) alone, on every machine; a token is where the cumulated probabilities, the
likeliest token first, pass the number. So what an answer draws does not depend on which other answers are written beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dflash_mp.data.chat_template import Thinking
from dflash_mp.decode.sampling import Sampling


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are written, here or there. `seed` keys the random choices."""

    max_new_tokens: int
    sampling: Sampling
    seed: int = 0
    thinking: Thinking = "default"


def uniforms(seed: int, conversation: int, turn: int, count: int) -> npt.NDArray[np.float64]:
    """`count` numbers in [0, 1), one for each token of the answer of this turn (Philox, keyed)."""
    key = np.array([seed, conversation], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, turn])).random(count)


def choose(logits: torch.Tensor, sampling: Sampling, numbers: torch.Tensor) -> torch.Tensor:
    """A token for each row of `logits` [n, V], with `numbers` float64 [n] in [0, 1): int64 [n]. Greedy ignores the numbers."""
    if sampling.greedy:
        return logits.argmax(-1)
    if 0 < sampling.top_k < logits.shape[-1]:
        scores, places = logits.topk(sampling.top_k, dim=-1)  # largest first
    else:
        scores, places = logits.sort(dim=-1, descending=True, stable=True)  # in their own dtype: half the bytes
    probabilities = (scores.float() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities * (before < sampling.top_p)  # the token that crosses top_p stays
    reached = probabilities.double().cumsum(-1)
    wanted = numbers[:, None] * reached[:, -1:]
    place = (reached <= wanted).sum(-1, keepdim=True).clamp_max(scores.shape[-1] - 1)
    return places.gather(-1, place).squeeze(-1)
