"""Speculative decoding: the drafter proposes a block, the target reads it in one pass and keeps what it agrees with.

`decode` yields the committed tokens block by block. Greedy, they are exactly the target's own tokens, as far as the target's argmax doesn't
depend on how many tokens it reads at once (in float32 it doesn't; in bfloat16 near-ties can fall the other way); sampling, they have the target's
distribution. Blocks end where z-lab's client ends them: at the first stop token, and at `max_new_tokens`, before which the last block is
shortened; so acceptance lengths compare number by number. Without a drafter the same loop is the plain baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from dflash_mp.decode.sampling import GREEDY, Sampling, draw, match, verify
from dflash_mp.decode.verifier import Verifier
from dflash_mp.drafter.model import DraftCache, DraftModel, embed

Propose = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


class Drafter(Protocol):
    """What `decode` needs of a drafter."""

    @property
    def block_size(self) -> int:
        """Tokens of a block, the anchor included."""

    def begin(self) -> Propose:
        """A function for one text: (features [1, n, K·H] of the n tokens since the last call, the anchor [1], size s) → logits [s−1, V].

        The features are of the tokens up to the one before the anchor; the logits are for the s−1 tokens after it.
        """


class ModelDrafter:
    """A trained drafter with the target's `embedding` and `head` [V, H]."""

    def __init__(self, model: DraftModel, embedding: torch.Tensor, head: torch.Tensor) -> None:
        self._model, self._embedding, self._head = model, embedding, head

    @property
    def block_size(self) -> int:
        return self._model.shape.block_size

    def begin(self) -> Propose:
        shape, device = self._model.shape, self._embedding.device
        cache = DraftCache(shape.layers)

        @torch.no_grad()
        def propose(features: torch.Tensor, anchor: torch.Tensor, size: int) -> torch.Tensor:
            ids = torch.full((1, size), shape.mask_token_id, device=device)
            ids[0, 0] = anchor
            positions = torch.arange(cache.length, cache.length + features.shape[1] + size, device=device)
            noise = embed(ids, self._embedding, shape.embedding_scale)
            hidden = self._model.draft_block(features, noise, positions[None], cache)
            return self._model.compute_logits(hidden[0, 1:], self._head)

        return propose


@dataclass(frozen=True)
class Block:
    """Tokens that one pass of the target committed: `accepted` of the drafter's, then at most one of the target's own.

    `drafted` counts the drafter's tokens that were decided on. The first block of a text comes from reading the prompt: one token, nothing drafted.
    """

    tokens: tuple[int, ...]
    accepted: int
    drafted: int


def decode(
    verifier: Verifier,
    prompt: torch.Tensor,
    drafter: Drafter | None,
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
) -> Iterator[Block]:
    """Continue `prompt` (int64 [n], n ≥ 1, on the target's device) until a stop token, which is included, or `max_new_tokens` ≥ 1.

    `generator`, on the target's device, is needed when sampling.
    """
    verifier.start()
    logits, features = verifier.read(prompt, last_only=True, taps=drafter is not None)
    start = prompt.shape[0]
    verifier.keep(start)
    limit = start + max_new_tokens
    anchor = sampling.choose(logits, generator)
    token = int(anchor)
    yield Block((token,), 0, 0)
    propose = drafter.begin() if drafter else None
    block_size = drafter.block_size if drafter else 1
    while token not in stop_tokens and start + 1 < limit:
        size = min(block_size, limit - start)
        proposal = _draft(propose, features, anchor, size, sampling, generator) if propose else None
        tokens = torch.cat((anchor, proposal.tokens)) if proposal else anchor
        logits, features = verifier.read(tokens, taps=drafter is not None)
        accepted, own = _verify(proposal, logits, sampling, generator)
        new = torch.cat((tokens[1 : accepted + 1], own[None])).tolist()[: limit - start - 1]
        stops = [place for place, value in enumerate(new) if value in stop_tokens]
        drafted = size - 1
        if stops:
            new = new[: stops[0] + 1]
            drafted = min(drafted, len(new))
        yield Block(tuple(new), min(accepted, len(new)), drafted)
        token = new[-1]
        anchor = tokens.new_tensor([token])
        start += len(new)
        features = features[:, : len(new)]
        verifier.keep(start)


@dataclass(frozen=True)
class _Proposal:
    tokens: torch.Tensor  # [n]
    probabilities: torch.Tensor | None  # [n, V] when sampling


def _draft(
    propose: Propose,
    features: torch.Tensor,
    anchor: torch.Tensor,
    size: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> _Proposal:
    logits = propose(features, anchor, size)
    if sampling.greedy:
        return _Proposal(logits.argmax(-1), None)
    probabilities = sampling.probabilities(logits)
    return _Proposal(draw(probabilities, generator), probabilities)


def _verify(
    proposal: _Proposal | None, logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None
) -> tuple[int, torch.Tensor]:
    """(drafted tokens accepted, the target's own token after them) for a block whose tokens gave `logits` [s, V]."""
    if proposal is None:
        return 0, sampling.choose(logits, generator)[0]
    if proposal.probabilities is None:
        return match(proposal.tokens, logits)
    return verify(proposal.tokens, sampling.probabilities(logits), proposal.probabilities, generator)
