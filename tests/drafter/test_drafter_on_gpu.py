"""The CUDA path (flex attention, compiled layers, static shapes) against the CPU path, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference import Batch, random_batch, small_shape
from torch._dynamo.utils import counters

from dflash_mp.drafter.attention import blockwise_mask, dense_mask, flex_mask
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.loss import block_loss, dpace_loss, slot_weights
from dflash_mp.drafter.model import DraftModel, RMSNorm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = small_shape(hidden_size=128, intermediate_size=160, heads=4, kv_heads=2, head_dim=32, block_size=8, layers=3)


def on_gpu(batch: Batch) -> Batch:
    moved = {key: value.cuda() for key, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return replace(batch, blocks=batch.blocks.to("cuda"), **moved)


def gradients(
    model: DraftModel, batch: Batch, build, compiled: bool = False, objective: str = "decay"
) -> dict[str, torch.Tensor]:
    mask = build(batch.blocks.layout(batch.documents))
    hidden = model(batch.features, batch.noise, batch.positions, batch.blocks.positions.flatten(1), mask)
    weights = batch.blocks.scored * slot_weights(SHAPE.block_size, device=hidden.device)
    head = FrozenHead(batch.embedding.to(hidden.dtype), compiled=compiled, chunk=64)
    if objective == "dpace":
        loss = dpace_loss(hidden, head, batch.blocks.labels, batch.blocks.scored, 0.5)
    else:
        loss = block_loss(hidden, head, batch.blocks.labels, weights)
    loss.total.backward()
    found = {name: parameter.grad.float().cpu() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {**found, "loss": loss.total.detach().cpu(), "hits": loss.correct.sum().cpu()}


def material(seed: int, supervised: float = 0.7) -> Batch:
    return random_batch(seed, SHAPE, rows=2, tokens=200, anchors=20, supervised=supervised)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("build", [flex_mask, dense_mask])
def test_the_gpu_path_gives_the_cpu_numbers_and_compiles_once(build, recompute) -> None:
    torch.compiler.reset()
    plain, model = DraftModel(SHAPE), DraftModel(SHAPE, gradient_checkpointing=recompute).cuda()
    plain.init_weights(0)
    model.init_weights(0)
    model.compile_layers()
    counts = []
    for seed, supervised in enumerate((0.7, 0.05, 0.0, 1.0)):
        batch = material(seed, supervised)
        expected = gradients(plain, batch, blockwise_mask)
        for name, mine in gradients(model, on_gpu(batch), build, compiled=True).items():
            torch.testing.assert_close(mine, expected[name], atol=2e-4, rtol=2e-3, msg=lambda m, n=name: f"{n}: {m}")
        counts.append(counters["stats"]["unique_graphs"])
    assert counts[0] == counts[-1], counts


def test_the_norms_outside_the_layers_round_as_those_inside() -> None:
    norm = RMSNorm(96, 1e-6).bfloat16()
    norm.weight.data.normal_()
    x, slope = (torch.randn(5, 96).bfloat16() for _ in range(2))
    found = []
    for device in ("cpu", "cuda"):
        norm.to(device)
        leaf = x.to(device).requires_grad_()
        out = norm(leaf)
        found.append(
            [each.float().cpu() for each in (out, *torch.autograd.grad(out, (leaf, norm.weight), slope.to(device)))]
        )
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-2, rtol=2e-2)


def test_flex_attention_runs_fused_without_compiled_layers() -> None:
    model, batch = DraftModel(SHAPE).cuda(), material(1)
    model.init_weights(0)
    flex, dense = (gradients(model, on_gpu(batch), build) for build in (flex_mask, dense_mask))
    for name, mine in flex.items():
        torch.testing.assert_close(mine, dense[name], atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("objective", ["decay", "dpace"])
def test_bf16_with_deterministic_kernels_repeats_its_bits(objective: str) -> None:
    model, batch = DraftModel(SHAPE).cuda().bfloat16(), on_gpu(material(2))
    model.init_weights(0)
    model.compile_layers()
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (gradients(model, batch, flex_mask, True, objective) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(tensor.isfinite().all() for tensor in first.values())
