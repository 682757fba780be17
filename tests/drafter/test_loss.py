"""The fused, chunked loss equals the slow one: values, gradients, hits; however it is cut."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import loss_slow, random_batch, small_shape
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_mp.drafter.attention import blockwise_mask
from dflash_mp.drafter.frozen_head import FrozenHead, chunk_size, position_terms
from dflash_mp.drafter.loss import block_loss, default_gamma, slot_weights
from dflash_mp.drafter.model import DraftModel


def material(
    seed: int, rows: int = 2, blocks: int = 5, size: int = 4, vocabulary: int = 37, share: float = 0.6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, head, labels and weights of random blocks."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, blocks * size, 16, generator=draw).requires_grad_()
    head = torch.randn(vocabulary, 16, generator=draw)
    labels = torch.randint(0, vocabulary, (rows, blocks, size), generator=draw, dtype=torch.int32)
    scored = torch.rand(rows, blocks, size, generator=draw) < share
    with torch.no_grad():  # a third of the labels are what the head predicts, so that hits occur
        likely = (hidden @ head.t()).argmax(-1).view(labels.shape).int()
        labels = torch.where(torch.rand(labels.shape, generator=draw) < 0.33, likely, labels)
    return hidden, head, labels, scored * slot_weights(size)


@given(
    seed=st.integers(0, 10_000),
    blocks=st.integers(1, 6),
    size=st.integers(2, 7),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    scale=st.sampled_from([1.0, 0.3]),
    softcap=st.sampled_from([None, 2.0]),
    chunk=st.sampled_from([1, 3, 1000]),
    compiled=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_loss_gradients_and_hits_equal_the_slow_twin(
    seed, blocks, size, share, scale, softcap, chunk, compiled
) -> None:
    hidden, head, labels, weights = material(seed, blocks=blocks, size=size, share=share)
    expected, hits = loss_slow(hidden, head, labels, weights, scale, softcap)
    frozen = FrozenHead(head, scale, softcap, compiled, chunk)
    with mock.patch(
        "dflash_mp.drafter.frozen_head._compiled_terms", return_value=position_terms
    ):  # what would be compiled
        loss = block_loss(hidden, frozen, labels, weights)
    torch.testing.assert_close(loss.total, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(loss.weight, weights.sum())
    assert torch.equal(loss.correct, hits)
    (mine,) = torch.autograd.grad(loss.total * 3, hidden)
    (theirs,) = torch.autograd.grad(expected * 3, hidden)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    assert (mine.view(2, blocks, size, -1)[:, :, 0] == 0).all(), "the anchor's slot is never scored"


def test_static_shapes_give_the_same_as_leaving_out_unscored_slots(monkeypatch) -> None:
    hidden, head, labels, weights = material(1)
    compact = block_loss(hidden, FrozenHead(head), labels, weights)
    (gradient,) = torch.autograd.grad(compact.total, hidden)
    monkeypatch.setattr("dflash_mp.drafter.frozen_head.skips_unscored", lambda hidden, compiled: False)
    static = block_loss(hidden, FrozenHead(head), labels, weights)
    torch.testing.assert_close(static.total, compact.total)
    torch.testing.assert_close(torch.autograd.grad(static.total, hidden)[0], gradient)
    assert torch.equal(static.correct, compact.correct)


def test_what_is_compiled_sees_one_shape_however_many_slots_are_scored() -> None:
    shapes = []

    def watched(logits: torch.Tensor, *more: object) -> object:
        shapes.append(logits.shape)
        return position_terms(logits, *more)

    with mock.patch("dflash_mp.drafter.frozen_head._compiled_terms", return_value=watched):
        for share in (0.0, 0.3, 1.0):
            hidden, head, labels, weights = material(3, share=share)
            block_loss(hidden, FrozenHead(head, compiled=True), labels, weights)
    assert len(shapes) == 3
    assert len(set(shapes)) == 1


def test_compiled_chunks_have_one_length_and_are_no_longer_than_allowed() -> None:
    assert chunk_size(7680, True, True) == 3840
    assert chunk_size(7680, True, False) == 4096, "nothing is gained where nothing is compiled"
    for positions in (1, 100, 4096, 4097, 7680, 28_672, 100_001):
        size = chunk_size(positions, True, True)
        assert size <= 4096
        assert -(-positions // size) == -(-positions // 4096), "not one chunk more"
        assert size % 128 == 0
    assert chunk_size(100, False, True, most=20) == 20


def test_sums_do_not_depend_on_how_rows_are_split() -> None:
    hidden, head, labels, weights = material(2, rows=4)
    whole = block_loss(hidden, FrozenHead(head), labels, weights)
    parts = [
        block_loss(hidden[rows], FrozenHead(head), labels[rows], weights[rows]) for rows in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    torch.testing.assert_close(sum(part.weight for part in parts), whole.weight)
    mine = torch.autograd.grad(sum(part.total for part in parts), hidden)
    torch.testing.assert_close(mine, torch.autograd.grad(whole.total, hidden))


def test_a_row_without_anchors_gives_zero_loss_and_zero_gradients_for_every_parameter() -> None:
    shape = small_shape()
    batch = random_batch(0, shape, rows=1, supervised=0.0)
    model = DraftModel(shape)
    model.init_weights(0)
    assert not batch.blocks.keep.any()
    mask = blockwise_mask(batch.blocks.layout(batch.documents))
    hidden = model(batch.features, batch.noise, batch.positions, batch.blocks.positions.flatten(1), mask)
    loss = block_loss(hidden, FrozenHead(batch.embedding), batch.blocks.labels, batch.blocks.scored * slot_weights(4))
    loss.total.backward()
    assert loss.total.item() == loss.weight.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_block_without_anchor_among_others_changes_nothing() -> None:
    hidden, head, labels, weights = material(3)
    weights[:, 2] = 0
    (gradient,) = torch.autograd.grad(block_loss(hidden, FrozenHead(head), labels, weights).total, hidden)
    assert not gradient.view(2, 5, 4, -1)[:, 2].any()
    kept = [0, 1, 3, 4]
    fewer = hidden.view(2, 5, 4, -1)[:, kept].flatten(1, 2)
    less = block_loss(fewer, FrozenHead(head), labels[:, kept], weights[:, kept])
    torch.testing.assert_close(less.total, block_loss(hidden, FrozenHead(head), labels, weights).total)


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> object:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_more_logits_exist_than_a_chunk_of_them() -> None:
    hidden, head, labels, weights = material(4, rows=4, blocks=8, size=8, vocabulary=500, share=1.0)
    with LargestTensor() as largest:
        block_loss(hidden, FrozenHead(head, chunk=20), labels, weights).total.backward()
    assert largest.elements == 20 * 500


def test_without_gradients_the_loss_is_the_same() -> None:
    hidden, head, labels, weights = material(5)
    with torch.no_grad():
        measured = block_loss(hidden, FrozenHead(head), labels, weights)
    assert not measured.total.requires_grad
    assert torch.equal(measured.total, block_loss(hidden, FrozenHead(head), labels, weights).total)


def test_a_bf16_head_keeps_its_dtype_and_softmax_is_fp32() -> None:
    hidden, head, labels, weights = material(6, vocabulary=400)
    expected, _ = loss_slow(hidden, head.bfloat16().float(), labels, weights)
    loss = block_loss(hidden.bfloat16(), FrozenHead(head.bfloat16()), labels, weights)
    assert loss.total.dtype == torch.float32
    assert loss.total.item() == pytest.approx(expected.item(), rel=5e-3)
    (gradient,) = torch.autograd.grad(loss.total, hidden)
    (exact,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(gradient, exact, atol=0.05, rtol=0.05)


def test_slot_weights_decay_as_published() -> None:
    assert slot_weights(16).tolist()[:4] == pytest.approx([0, 1, 0.867, 0.751], abs=1e-3)
    assert slot_weights(8).tolist() == pytest.approx([0, 1, 0.779, 0.607, 0.472, 0.368, 0.287, 0.223], abs=1e-3)
    assert [default_gamma(size) for size in (8, 10, 16)] == [4, 5, 7]
    gammas = [default_gamma(size) for size in range(2, 40)]
    assert gammas == sorted(gammas)
    assert gammas[0] >= 1
    assert slot_weights(4, gamma=1.0)[2] == pytest.approx(0.36788, abs=1e-5)
