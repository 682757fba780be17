"""The head in fp8: losses, hits and gradients equal a slow twin on the rounded operands, and float64 within what rounding explains."""

from __future__ import annotations

import pytest
import torch
from reference import loss_slow

from dflash_mp.drafter.fp8_head import ScaledHead, _parts, quantise_rows, score
from dflash_mp.drafter.fp8_products import LARGEST, draws_of, round_to_fp8
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.loss import block_loss, dpace_loss, slot_weights

HIDDEN, COUNT = 32, 60


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


def material(seed: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, head, labels; a third of the labels is what the head says, some of them almost surely."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(COUNT, HIDDEN, generator=draw)
    head = torch.randn(vocabulary, HIDDEN, generator=draw) * (0.1 + 0.4 * torch.rand(vocabulary, 1, generator=draw))
    labels = torch.randint(0, vocabulary, (COUNT,), generator=draw)
    labels[::3] = (hidden @ head.t()).argmax(1)[::3]
    hidden[::6] += 12 * head[labels[::6]] / head[labels[::6]].norm(dim=1, keepdim=True)
    return hidden, head, labels


def bounded(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def test_the_head_is_rounded_in_both_directions_and_filled_up_with_zeros() -> None:
    _, head, _ = material(0, 37)
    head[5] = 0
    head[6] *= 1e4  # neither the other rows nor the other columns lose by it
    scaled = ScaledHead.of(head)
    assert scaled.rows.shape == (48, HIDDEN)
    assert scaled.columns.shape == (HIDDEN, 48)
    assert not scaled.rows[37:].float().any()
    assert not scaled.columns[:, 37:].float().any()
    by_rows = scaled.rows[:37].float() * scaled.row_scale[:, None]
    rest = torch.arange(37)[torch.arange(37) != 5]
    assert ((by_rows - head).norm(dim=1)[rest] / head.norm(dim=1)[rest]).max() < 0.05
    assert not by_rows[5].any()
    by_columns = scaled.columns[:, :37].float() * scaled.column_scale[:, None]
    assert ((by_columns.t() - head).norm(dim=0) / head.norm(dim=0)).max() < 0.05
    assert scaled.nbytes == 2 * 48 * HIDDEN + 4 * (37 + HIDDEN)


def test_each_step_rounds_the_head_its_own_way_and_in_the_mean_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    _, head, _ = material(1, 37)
    scaled, whole = ScaledHead.of(head), ScaledHead.of(head)
    nearest = scaled.rows.clone()
    means, draws = [torch.zeros(head.shape), torch.zeros(head.shape)], draws_of(0, 0, 300)
    for draw in draws:
        scaled.round_anew(draw, compiled=False)
        means[0] += scaled.rows[:37].float() * scaled.row_scale[:, None] / len(draws)
        means[1] += (scaled.columns[:, :37].float() * scaled.column_scale[:, None]).t() / len(draws)
    for mean in means:
        assert relative(mean, head) < 0.005, "to the nearest it would be 0.026"
    assert not torch.equal(scaled.rows.float(), nearest.float())
    assert not scaled.rows[37:].float().any()
    monkeypatch.setattr("dflash_mp.drafter.fp8_head._ROWS_AT_ONCE", 16)
    whole.round_anew(draws[-1], compiled=False)
    assert torch.equal(whole.rows.float(), scaled.rows.float()), "however the head is cut"
    assert torch.equal(whole.columns.float(), scaled.columns.float())


@pytest.mark.parametrize("size", [1, 15, 16, 16_384, 16_389, 20_005, 32_773, 50_257, 151_936])
def test_parts_of_the_head_cover_it_are_of_one_length_and_begin_where_memory_is_aligned(size: int) -> None:
    parts = _parts(size)
    assert len({part.stop - part.start for part in parts}) == 1
    assert all(part.start % 16 == 0 for part in parts)
    assert sorted({row for part in parts for row in range(size)[part]}) == list(range(size))
    assert sum(part.stop - part.start for part in parts) < size + 16_384 + 16 * len(parts)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("vocabulary", [2, 37, 64, 500])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.7, 3.0)])
def test_loss_hits_and_gradient_equal_the_slow_twin(vocabulary: int, scale: float, softcap: float | None) -> None:
    hidden, head, labels = material(vocabulary, vocabulary)
    scaled = ScaledHead.of(head)
    found = score(hidden, scaled, labels, scale=scale, softcap=softcap, compiled=False, differentiate=True)
    values, of_position = quantise_rows(hidden)
    near = (values.double() * of_position[:, None]) @ (
        scaled.rows[:vocabulary].double() * scaled.row_scale[:, None]
    ).t()
    raw = (near * scale).requires_grad_()
    logits = bounded(raw, softcap)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(found.loss.double(), loss.detach(), rtol=1e-4, atol=1e-6)
    assert torch.equal(found.right, logits.argmax(1) == labels)
    (slope,) = torch.autograd.grad(loss.sum(), raw)
    of_label = slope.gather(1, labels[:, None])
    others = slope.scatter(1, labels[:, None], 0.0)
    bend = torch.autograd.grad(bounded(raw, softcap).sum(), raw)[0] if softcap else torch.ones_like(slope)
    probability = logits.softmax(1).scatter(1, labels[:, None], 0.0)
    unit = probability.amax(1, keepdim=True) / LARGEST
    torch.testing.assert_close(others, probability * bend)
    rounded = round_to_fp8((others / unit).float()).double() * unit
    columns = scaled.columns[:, :vocabulary].double() * scaled.column_scale[:, None]
    exact = scale * (rounded @ columns.t() + of_label * head[labels].double())
    assert found.gradient is not None
    errors = (found.gradient.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors.max() < 0.02  # where float32 rounds a value the other way
    assert relative(found.gradient, exact) < 2e-3


@pytest.mark.parametrize("teach", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradients_are_off_by_what_rounding_explains(teach: bool, softcap: float | None) -> None:
    hidden, head, labels = material(7, 500)
    exact = hidden.double().requires_grad_()
    logits = bounded(exact @ head.double().t(), softcap)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    told = None
    if teach:
        told = torch.randn(COUNT, 500, generator=torch.Generator().manual_seed(1)) * 2
        other = bounded(told.double(), softcap)
        loss = (other.softmax(1) * (other.log_softmax(1) - logits.log_softmax(1))).sum(1)
    loss.sum().backward()
    scaled = ScaledHead.of(head)
    found = score(hidden, scaled, labels, told, scale=1.0, softcap=softcap, compiled=False, differentiate=True)
    assert exact.grad is not None
    assert found.gradient is not None
    assert 1e-4 < relative(found.loss, loss.detach()) < 0.02
    assert 0.005 < relative(found.gradient, exact.grad) < 0.07


def test_a_label_that_is_almost_sure_keeps_its_gradient() -> None:
    """Its probability minus one has fewer digits than either; relative to the rest it is exact."""
    head = torch.eye(64)[:, :HIDDEN] + 0.01
    hidden = 14 * torch.eye(HIDDEN)[:4]
    labels = torch.arange(4)
    exact = hidden.double().requires_grad_()
    torch.nn.functional.cross_entropy(exact @ head.double().t(), labels, reduction="sum").backward()
    found = score(hidden, ScaledHead.of(head), labels, scale=1.0, softcap=None, compiled=False, differentiate=True)
    assert exact.grad is not None
    assert found.gradient is not None
    assert 0 < found.loss.max() < 1e-3
    assert relative(found.gradient, exact.grad) < 0.07


def blocks(seed: int, share: float = 0.6) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    scored = torch.rand(2, 9, 4, generator=draw) < share
    scored[:, :, 0] = False
    hidden = torch.randn(2, 36, HIDDEN, generator=draw)
    head = torch.randn(83, HIDDEN, generator=draw) * 0.3
    likely = (hidden @ head.t()).argmax(-1).view(2, 9, 4)
    labels = torch.where(
        torch.rand(2, 9, 4, generator=draw) < 0.3, likely, torch.randint(0, 83, (2, 9, 4), generator=draw)
    )
    return {
        "hidden": hidden.requires_grad_(),
        "head": head,
        "labels": labels,
        "scored": scored,
        "teacher": torch.randn(2, 9, 3, HIDDEN, generator=draw),
    }


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_blocks_loss_goes_through_it(chunk: int, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if static:
        monkeypatch.setattr("dflash_mp.drafter.frozen_head.skips_unscored", lambda hidden, compiled: False)
    m = blocks(chunk)
    weights = m["scored"] * slot_weights(4)
    exact, _ = loss_slow(m["hidden"], m["head"], m["labels"], weights)
    loss = block_loss(
        m["hidden"], FrozenHead(m["head"], chunk=chunk, scaled=ScaledHead.of(m["head"])), m["labels"], weights
    )
    assert 0 < abs(loss.total.item() / exact.item() - 1) < 0.02
    (mine,), (theirs,) = (torch.autograd.grad(total * 3, m["hidden"]) for total in (loss.total, exact))
    assert 0.003 < relative(mine, theirs.double()) < 0.07
    assert not mine.view(2, 9, 4, -1)[~m["scored"]].any()
    assert loss.correct.any()
    assert not loss.correct[~m["scored"]].any()
    with torch.no_grad():
        again = block_loss(
            m["hidden"], FrozenHead(m["head"], chunk=chunk, scaled=ScaledHead.of(m["head"])), m["labels"], weights
        )
    assert torch.equal(again.total, loss.total)
    assert torch.equal(again.correct, loss.correct)


def test_without_a_scored_slot_loss_and_gradient_are_zero() -> None:
    m = blocks(1, share=0.0)
    loss = block_loss(
        m["hidden"], FrozenHead(m["head"], scaled=ScaledHead.of(m["head"])), m["labels"], m["scored"].float()
    )
    (gradient,) = torch.autograd.grad(loss.total, m["hidden"])
    assert loss.total == loss.weight == 0
    assert not gradient.any()


@pytest.mark.parametrize("chunk", [5, None])
def test_d_pace_and_distillation_go_through_it(chunk: int | None) -> None:
    m = blocks(2)
    plain = FrozenHead(m["head"], 0.7, 3.0, chunk=chunk)
    scaled = plain._replace(scaled=ScaledHead.of(m["head"]))
    for losses in (
        [dpace_loss(m["hidden"], head, m["labels"], m["scored"], 0.5) for head in (scaled, plain)],
        [
            block_loss(m["hidden"], head, m["labels"], m["scored"] * slot_weights(4), m["teacher"])
            for head in (scaled, plain)
        ],
    ):
        (mine,), (theirs,) = (torch.autograd.grad(loss.total, m["hidden"]) for loss in losses)
        assert 0 < abs(losses[0].total.item() / losses[1].total.item() - 1) < 0.02
        assert 0.003 < relative(mine, theirs.double()) < 0.07
        assert losses[0].weight == losses[1].weight
