"""Prompts of many lengths, and what a target's slots answer to them."""

from __future__ import annotations

import random
from collections.abc import Callable

from dflash_mp.decode.sampling import GREEDY, Sampling
from dflash_mp.regenerate.choice import uniforms
from dflash_mp.regenerate.slots import SlotOptions, Slots
from dflash_mp.target.load import Target

NEW = 24
LENGTHS = (1, 2, 33, 70, 5, 40, 129, 12)


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(200) for _ in range(length)] for length in LENGTHS]


def write(
    target: Target,
    slots: int,
    sampling: Sampling = GREEDY,
    stops: tuple[int, ...] = (),
    graphs: bool = True,
    say: Callable[[str], None] = print,
    own_forward: bool = False,
) -> list[tuple[list[int], bool]]:
    """The answers to `prompts()`, with `slots` of them at a time, which are filled again as they become free."""
    engine = Slots(target, SlotOptions(slots, NEW, stops, sampling, graphs, own_forward), say)
    waiting = list(enumerate(prompts()))
    running: dict[int, int] = {}
    answers: dict[int, tuple[list[int], bool]] = {}
    while waiting or running:
        free = engine.free()[: len(waiting)]
        if free:
            taken = [waiting.pop(0) for _ in free]
            numbers = [uniforms(3, number, 0, NEW) for number, _ in taken]
            engine.fill(free, [prompt for _, prompt in taken], numbers)
            running.update(zip(free, (number for number, _ in taken), strict=True))
        engine.advance(5)
        for text in engine.take():
            answers[running.pop(text.slot)] = text.tokens, text.stopped
    return [answers[number] for number in sorted(answers)]
