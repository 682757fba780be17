"""Compilation and recomputation: one compilation for all layers and all rows, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from reference import Batch, random_batch, small_shape
from torch._dynamo.utils import counters

from dflash_mp.drafter.attention import AttentionMask, BlockLayout, blockwise_mask, dense_mask
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.loss import block_loss, slot_weights
from dflash_mp.drafter.model import DraftModel
from dflash_mp.drafter.world import World, data_parallel


def gradients(model: DraftModel, batch: Batch, build: Callable[[BlockLayout], AttentionMask]) -> list[torch.Tensor]:
    mask = build(batch.blocks.layout(batch.documents))
    hidden = model(batch.features, batch.noise, batch.positions, batch.blocks.positions.flatten(1), mask)
    weights = batch.blocks.scored * slot_weights(model.shape.block_size)
    block_loss(hidden, FrozenHead(batch.embedding), batch.blocks.labels, weights).total.backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("build", [blockwise_mask, dense_mask])
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_compile_once_whatever_the_rows(build, recompute) -> None:
    torch.compiler.reset()
    shape = small_shape(layers=4)
    model, plain = DraftModel(shape, gradient_checkpointing=recompute), DraftModel(shape)
    model.init_weights(0)
    plain.init_weights(0)
    model.compile_layers(backend="aot_eager")
    before = graphs()
    for seed, supervised in enumerate((0.7, 0.1, 0.0, 1.0, 0.4)):  # from all blocks used to none
        batch = random_batch(seed, shape, supervised=supervised)
        for mine, theirs in zip(gradients(model, batch, build), gradients(plain, batch, build), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    assert graphs() - before == 1


def test_a_layer_larger_than_ddps_buckets_is_compiled_whole() -> None:
    torch.compiler.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shape = small_shape(hidden_size=256, intermediate_size=16_384)  # 50 MB; a bucket has 25 MiB
        model = DraftModel(shape)
        model.init_weights(0)
        compiled = []
        model.compile_layers(backend=lambda graph, inputs: compiled.append(graph) or graph)
        parallel = data_parallel(model, World(0, 2, 0, 2, torch.device("cpu")))
        assert not list(
            model.buffers()
        )  # DDP would send them in a forward pass that one rank makes alone, to compile first
        batch = random_batch(1, shape)
        mask = blockwise_mask(batch.blocks.layout(batch.documents))
        parallel(batch.features, batch.noise, batch.positions, batch.blocks.positions.flatten(1), mask).sum().backward()
        assert len(compiled) == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("build", [blockwise_mask, dense_mask])
def test_recomputing_layers_gives_the_same_bits(build) -> None:
    shape = small_shape(layers=3)
    batch = random_batch(3, shape)
    plain, recomputed = DraftModel(shape), DraftModel(shape, gradient_checkpointing=True)
    plain.init_weights(0)
    recomputed.init_weights(0)
    for mine, theirs in zip(gradients(recomputed, batch, build), gradients(plain, batch, build), strict=True):
        assert torch.equal(mine, theirs)


def test_recomputing_keeps_less_for_the_backward_pass() -> None:
    def saved(model: DraftModel) -> int:
        held = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel()) or t, lambda t: t):
            batch = random_batch(3, model.shape)
            mask = blockwise_mask(batch.blocks.layout(batch.documents))
            model(batch.features, batch.noise, batch.positions, batch.blocks.positions.flatten(1), mask)
        return sum(held)

    shape = small_shape(layers=6)
    assert saved(DraftModel(shape, gradient_checkpointing=True)) < 0.2 * saved(DraftModel(shape))
