"""D-PACE and distillation equal slow twins that are written as the method says, in float64, loop by loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.loss import block_loss, dpace_loss, slot_weights, teacher_states

HIDDEN, VOCABULARY = 12, 23


def material(seed: int, blocks: int, size: int, share: float) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    scored = torch.rand(2, blocks, size, generator=draw) < share
    scored[:, :, 0] = False
    return {
        "hidden": torch.randn(2, blocks * size, HIDDEN, generator=draw, dtype=torch.float64).requires_grad_(),
        "head": torch.randn(VOCABULARY, HIDDEN, generator=draw, dtype=torch.float64),
        "labels": torch.randint(0, VOCABULARY, (2, blocks, size), generator=draw, dtype=torch.int32),
        "scored": scored,
        "teacher": torch.randn(2, blocks, size - 1, HIDDEN, generator=draw, dtype=torch.float64),
    }


def log_probabilities(states: torch.Tensor, head: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    logits = states @ head.t() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.log_softmax(-1)


def slow_dpace(m: dict[str, torch.Tensor], alpha: float, scale: float, softcap: float | None) -> torch.Tensor:
    """L = Σ_j w_j · CE_j with w_j = Σ_{m ≥ j} Π_{i ≤ m} s_i, s_i = (1 − α) q_i + α, over the scored slots."""
    rows, blocks, size = m["labels"].shape
    logs = log_probabilities(m["hidden"], m["head"], scale, softcap).view(rows, blocks, size, -1)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(rows):
        for block in range(blocks):
            used = [k for k in range(1, size) if m["scored"][row, block, k]]
            losses = {k: -logs[row, block, k, int(m["labels"][row, block, k])] for k in used}
            for j in used:
                weight = 0.0
                for last in used:
                    if last >= j:
                        weight += math.prod(
                            (1 - alpha) * math.exp(-losses[i].item()) + alpha for i in used if i <= last
                        )
                total = total + weight * losses[j]
    return total


def slow_distillation(
    m: dict[str, torch.Tensor], weights: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    rows, blocks, size = m["labels"].shape
    logs = log_probabilities(m["hidden"], m["head"], scale, softcap).view(rows, blocks, size, -1)
    told = log_probabilities(m["teacher"], m["head"], scale, softcap)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(rows):
        for block in range(blocks):
            for k in range(1, size):
                p, q = told[row, block, k - 1], logs[row, block, k]
                total = total + weights[row, block, k] * (p.exp() * (p - q)).sum()
    return total


CASES = given(
    seed=st.integers(0, 10_000),
    blocks=st.integers(1, 4),
    size=st.integers(2, 6),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    scale=st.sampled_from([1.0, 0.3]),
    softcap=st.sampled_from([None, 2.0]),
    chunk=st.sampled_from([1, 3, 1000]),
)


@CASES
@settings(max_examples=25, deadline=None)
def test_dpace_equals_its_definition(seed, blocks, size, share, scale, softcap, chunk) -> None:
    m = material(seed, blocks, size, share)
    for alpha in (0.5, 1.0):
        want = slow_dpace(m, alpha, scale, softcap)
        head = FrozenHead(m["head"], scale, softcap, chunk=chunk)
        loss = dpace_loss(m["hidden"], head, m["labels"], m["scored"], alpha)
        torch.testing.assert_close(loss.total.double(), want, atol=1e-4, rtol=1e-5)
        assert loss.weight.item() == m["scored"].any(-1).sum().item()
        _compare_gradients(loss.total, want, m["hidden"])


@CASES
@settings(max_examples=25, deadline=None)
def test_distillation_equals_its_definition(seed, blocks, size, share, scale, softcap, chunk) -> None:
    m = material(seed, blocks, size, share)
    weights = m["scored"] * slot_weights(size)
    want = slow_distillation(m, weights, scale, softcap)
    head = FrozenHead(m["head"], scale, softcap, chunk=chunk)
    loss = block_loss(m["hidden"], head, m["labels"], weights, m["teacher"])
    torch.testing.assert_close(loss.total.double(), want, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(loss.weight, weights.sum())
    _compare_gradients(loss.total, want, m["hidden"])


def _compare_gradients(mine: torch.Tensor, slow: torch.Tensor, hidden: torch.Tensor) -> None:
    (got,) = torch.autograd.grad(mine * 3, hidden)
    want = torch.autograd.grad(slow * 3, hidden)[0] if slow.requires_grad else torch.zeros_like(hidden)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_hits_are_those_of_the_cross_entropy() -> None:
    m = material(1, 5, 4, 0.7)
    likely = (m["hidden"] @ m["head"].t()).argmax(-1).view(m["labels"].shape).int()
    labels = torch.where(torch.arange(4) % 2 == 0, likely, m["labels"])
    weights = m["scored"] * slot_weights(4)
    usual = block_loss(m["hidden"].float(), FrozenHead(m["head"].float()), labels, weights)
    head = FrozenHead(m["head"])
    assert usual.correct.any()
    assert torch.equal(dpace_loss(m["hidden"], head, labels, m["scored"], 0.5).correct, usual.correct)
    assert torch.equal(block_loss(m["hidden"], head, labels, weights, m["teacher"]).correct, usual.correct)


def test_a_drafter_that_says_what_the_target_says_has_nothing_to_learn() -> None:
    m = material(2, 3, 4, 1.0)
    hidden = torch.zeros(2, 3, 4, HIDDEN, dtype=torch.float64)
    hidden[:, :, 1:] = m["teacher"]
    same = hidden.flatten(1, 2).requires_grad_()
    loss = block_loss(same, FrozenHead(m["head"]), m["labels"], m["scored"] * slot_weights(4), m["teacher"])
    assert loss.total.item() == pytest.approx(0, abs=1e-5)
    assert torch.autograd.grad(loss.total, same)[0].abs().max() < 1e-6


def test_the_teacher_of_a_slot_is_the_state_before_its_token() -> None:
    last = torch.arange(10.0).view(1, 10, 1).expand(2, 10, HIDDEN)
    anchors = torch.tensor([[0, 4], [2, 8]], dtype=torch.int32)
    states = teacher_states(last, anchors, 4)
    assert states[..., 0].tolist() == [[[0, 1, 2], [4, 5, 6]], [[2, 3, 4], [8, 9, 9]]]


def test_static_shapes_give_the_same_as_leaving_out_unscored_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    m = material(3, 4, 5, 0.5)
    weights = m["scored"] * slot_weights(5)
    head = FrozenHead(m["head"])

    def both() -> list[torch.Tensor]:
        found = []
        for loss in (
            dpace_loss(m["hidden"], head, m["labels"], m["scored"], 0.5),
            block_loss(m["hidden"], head, m["labels"], weights, m["teacher"]),
        ):
            found += [loss.total, torch.autograd.grad(loss.total, m["hidden"])[0], loss.correct]
        return found

    compact = both()
    monkeypatch.setattr("dflash_mp.drafter.frozen_head.skips_unscored", lambda hidden, compiled: False)
    for one, other in zip(compact, both(), strict=True):
        torch.testing.assert_close(one, other)
