"""Sampling with a drafter has the target's distribution; seeds repeat it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mp.decode.sampling import Sampling, draw, match, verify

TARGET = torch.tensor([0.42, 0.25, 0.15, 0.1, 0.05, 0.03])
DRAFTER = torch.tensor([0.05, 0.3, 0.05, 0.3, 0.05, 0.25])
SAMPLES = 4000


def chi_square(counts: Counter[int], expected: torch.Tensor) -> float:
    wanted = (expected * SAMPLES).tolist()
    return sum((counts[i] - n) ** 2 / n for i, n in enumerate(wanted))


def test_the_first_committed_token_has_the_targets_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    counts: Counter[int] = Counter()
    proposals: Counter[int] = Counter()
    for _ in range(SAMPLES):
        drafted = draw(DRAFTER[None], generator)
        accepted, own = verify(drafted, TARGET.expand(2, -1), DRAFTER[None], generator)
        proposals[int(drafted)] += 1
        counts[int(drafted) if accepted else int(own)] += 1
    assert chi_square(counts, TARGET) < 20.5  # 0.1% of fair runs exceed it, with 5 degrees of freedom
    assert chi_square(proposals, TARGET) > 1000  # so the bound tells the two apart


def test_two_committed_tokens_have_the_targets_joint_distribution() -> None:
    size = 3
    first = torch.tensor([0.6, 0.3, 0.1])
    second = torch.tensor([[0.1, 0.1, 0.8], [0.7, 0.2, 0.1], [0.3, 0.4, 0.3]])  # given the first
    drafter = torch.tensor([[0.2, 0.2, 0.6], [0.5, 0.4, 0.1]])  # the block drafter's slots don't know each other
    generator = torch.Generator().manual_seed(1)
    counts: Counter[int] = Counter()
    for _ in range(SAMPLES):
        drafted = draw(drafter, generator)
        target = torch.stack((first, second[drafted[0]], TARGET[:size] / TARGET[:size].sum()))
        accepted, own = verify(drafted, target, drafter, generator)
        tokens = [*drafted[:accepted].tolist(), int(own)]
        if len(tokens) == 1:
            tokens.append(int(draw(second[tokens[0]][None], generator)))
        counts[tokens[0] * size + tokens[1]] += 1
    assert chi_square(counts, (first[:, None] * second).flatten()) < 26.1  # 0.1%, 8 degrees of freedom


def test_a_drafter_that_is_the_target_is_always_accepted() -> None:
    generator = torch.Generator().manual_seed(2)
    probabilities = TARGET.expand(5, -1)
    for _ in range(50):
        drafted = draw(probabilities[:4], generator)
        accepted, _ = verify(drafted, probabilities, probabilities[:4], generator)
        assert accepted == 4


def test_a_token_that_the_target_rules_out_is_never_committed() -> None:
    target = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    drafter = torch.tensor([[0.1, 0.1, 0.8]])
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        drafted = draw(drafter, generator)
        accepted, own = verify(drafted, target, drafter, generator)
        assert int(own) != 2
        assert int(drafted) != 2 or accepted == 0


def test_the_same_seed_draws_the_same_and_the_global_state_is_not_used() -> None:
    before = torch.get_rng_state()
    runs = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(4)
        drafted = draw(DRAFTER.expand(7, -1), generator)
        accepted, own = verify(drafted, TARGET.expand(8, -1), DRAFTER.expand(7, -1), generator)
        runs.append((drafted.tolist(), accepted, int(own)))
    assert runs[0] == runs[1]
    assert torch.equal(before, torch.get_rng_state())


def test_greedy_accepts_the_leading_matches_and_adds_the_targets_token() -> None:
    logits = torch.eye(5)[[3, 1, 4, 2]]
    assert match(torch.tensor([3, 1, 0]), logits) == (2, torch.tensor(4))
    assert match(torch.tensor([3, 1, 4]), logits) == (3, torch.tensor(2))
    assert match(torch.tensor([0, 1, 4]), logits) == (0, torch.tensor(3))


@settings(max_examples=40, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
def test_probabilities_are_those_of_a_plain_computation(
    logits: list[int], temperature: float, top_k: int, top_p: float
) -> None:
    values = torch.tensor(logits, dtype=torch.float64) / 10
    order = values.argsort(descending=True).tolist()
    kept = order[:top_k] if top_k else order
    weights = {i: float(torch.exp(values[i] / temperature)) for i in kept}
    total, before, nucleus = sum(weights.values()), 0.0, []
    for i in kept:
        if before / total < top_p:
            nucleus.append(i)
        before += weights[i]
    mass = sum(weights[i] for i in nucleus)
    expected = torch.tensor([weights[i] / mass if i in nucleus else 0.0 for i in range(len(logits))])
    got = Sampling(temperature, top_p, top_k).probabilities(values.float()[None])[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(-1.0, 1.0, 0), (1.0, 0.0, 0), (1.0, 1.1, 0), (1.0, 1.0, -1)]
)
def test_impossible_settings_are_refused(temperature: float, top_p: float, top_k: int) -> None:
    with pytest.raises(ValueError, match="temperature and top_k"):
        Sampling(temperature, top_p, top_k)
