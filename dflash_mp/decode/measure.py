"""Acceptance and speed of decoding: what one prompt's decoding gave, and the figures over many.

Counted as z-lab's client counts: a block's length includes the target's own token, and the token that reading the prompt gives belongs to
no block. Speed is tokens committed after that first one, per second after it; both ways of decoding are timed on the same prompts in turn,
so that a machine's moods hit both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_mp.decode.sampling import GREEDY, Sampling
from dflash_mp.decode.speculative import Block, Drafter, decode
from dflash_mp.decode.verifier import Verifier


@dataclass(frozen=True)
class DecodeOptions:
    """How texts are continued. `seed` and a prompt's number key its random choices."""

    max_new_tokens: int
    stop_tokens: frozenset[int]
    sampling: Sampling = GREEDY
    seed: int = 0

    def generator(self, number: int, device: torch.device) -> torch.Generator | None:
        """The random choices of prompt `number`; None when there are none to make."""
        if self.sampling.greedy:
            return None
        return torch.Generator(device).manual_seed((self.seed * 1_000_003 + number) % (1 << 63))


@dataclass(frozen=True)
class Answer:
    """One prompt's continuation: the first token, from reading the prompt, and the blocks after it."""

    first: int
    blocks: tuple[Block, ...]
    seconds: float  # after the first token

    @property
    def tokens(self) -> list[int]:
        return [self.first, *(token for block in self.blocks for token in block.tokens)]


def answer(
    verifier: Verifier, prompt: torch.Tensor, drafter: Drafter | None, options: DecodeOptions, number: int = 0
) -> Answer:
    """Decode `prompt` (int64 [n]), which is number `number` of its set."""
    blocks = decode(
        verifier,
        prompt,
        drafter,
        max_new_tokens=options.max_new_tokens,
        stop_tokens=options.stop_tokens,
        sampling=options.sampling,
        generator=options.generator(number, prompt.device),
    )
    first = next(blocks).tokens[0]
    started = time.perf_counter()
    rest = tuple(blocks)
    return Answer(first, rest, time.perf_counter() - started)


@dataclass(frozen=True)
class Figures:
    """Of one way of decoding on one set of prompts. Lists by slot or length start at 1; None where nothing was drafted."""

    prompts: int
    tokens: int  # first tokens included
    tokens_per_second: float
    blocks: int
    tau: float | None  # mean length of a block
    tau_by_prompt: float | None  # mean over prompts of the mean length: z-lab's "average acceptance length"
    slots: list[float]  # share of blocks in which slot k was accepted, of those in which it was decided on
    lengths: list[int]  # number of blocks of length 1, 2, … B


def figures(answers: Sequence[Answer], block_size: int) -> Figures:
    """The figures of `answers`; `block_size` 1 for plain decoding."""
    of_prompts = [[len(block.tokens) for block in a.blocks] for a in answers if a.blocks]
    lengths = [length for of_prompt in of_prompts for length in of_prompt]
    seconds = sum(a.seconds for a in answers)
    drafted = block_size > 1 and bool(lengths)
    return Figures(
        prompts=len(answers),
        tokens=len(answers) + sum(lengths),
        tokens_per_second=sum(lengths) / seconds if lengths else 0.0,
        blocks=len(lengths),
        tau=sum(lengths) / len(lengths) if drafted else None,
        tau_by_prompt=sum(sum(p) / len(p) for p in of_prompts) / len(of_prompts) if drafted else None,
        slots=_slot_shares(answers, block_size),
        lengths=[lengths.count(n) for n in range(1, block_size + 1)] if drafted else [],
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs; None when the two are equal."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _slot_shares(answers: Sequence[Answer], block_size: int) -> list[float]:
    shares = []
    for slot in range(1, block_size):
        decided = [block for a in answers for block in a.blocks if block.drafted >= slot]
        if not decided:
            break
        shares.append(sum(block.accepted >= slot for block in decided) / len(decided))
    return shares
