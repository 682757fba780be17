"""The figures are those that z-lab's benchmark would print for the same blocks."""

from __future__ import annotations

import statistics

import pytest
import torch

from dflash_mp.decode.measure import Answer, DecodeOptions, figures, first_difference
from dflash_mp.decode.sampling import Sampling
from dflash_mp.decode.speculative import Block

ANSWERS = [
    Answer(1, (Block((2, 3, 4), 2, 3), Block((5,), 0, 3), Block((6, 7, 8, 9), 3, 3)), seconds=2.0),
    Answer(1, (Block((2, 3), 2, 2),), seconds=0.5),  # ended by a stop token that the drafter proposed
    Answer(1, (), seconds=0.0),  # ended by the first token
]


def test_tau_counts_the_targets_own_token_over_blocks_and_over_prompts() -> None:
    found = figures(ANSWERS, 4)
    lengths = [[3, 1, 4], [2]]
    assert found.tau == statistics.mean([3, 1, 4, 2])
    assert found.tau_by_prompt == statistics.mean(statistics.mean(of_prompt) for of_prompt in lengths)
    assert found.lengths == [1, 1, 1, 1]
    assert (found.prompts, found.blocks, found.tokens) == (3, 4, 13)
    assert found.tokens_per_second == 10 / 2.5


def test_a_slot_counts_only_where_it_was_decided_on() -> None:
    assert figures(ANSWERS, 4).slots == [3 / 4, 3 / 4, 1 / 3]


def test_plain_decoding_has_a_speed_and_no_acceptance() -> None:
    found = figures([Answer(1, (Block((2,), 0, 0), Block((3,), 0, 0)), seconds=4.0)], 1)
    assert (found.tau, found.tau_by_prompt, found.slots, found.lengths) == (None, None, [], [])
    assert found.tokens_per_second == 0.5


def test_nothing_decoded_has_no_figures_and_no_error() -> None:
    found = figures([Answer(1, (), seconds=0.0)], 4)
    assert (found.tau, found.tokens_per_second, found.tokens) == (None, 0.0, 1)


@pytest.mark.parametrize(
    ("one", "other", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0)]
)
def test_the_first_differing_token_is_found(one: list[int], other: list[int], place: int | None) -> None:
    assert first_difference(one, other) == place


def test_each_prompt_has_random_choices_of_its_own() -> None:
    options = DecodeOptions(10, frozenset(), Sampling(1.0), seed=3)
    draws = []
    for number in (0, 1, 0):
        generator = options.generator(number, torch.device("cpu"))
        assert generator is not None
        draws.append(torch.rand(3, generator=generator).tolist())
    assert draws[0] == draws[2] != draws[1]
    assert DecodeOptions(10, frozenset()).generator(0, torch.device("cpu")) is None
