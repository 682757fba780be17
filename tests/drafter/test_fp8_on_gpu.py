"""Products, head and layers in fp8 on a GPU, fused, against slow ones in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference import Batch, random_batch, small_shape
from torch._dynamo.utils import counters

from dflash_mp.drafter.attention import blockwise_mask, flex_mask
from dflash_mp.drafter.fp8_head import ScaledHead, score
from dflash_mp.drafter.fp8_products import CAPABILITY, ScaledLinear, draws_of, multiply, quantise
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.loss import block_loss, slot_weights
from dflash_mp.drafter.model import DraftModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < CAPABILITY,
        reason="needs a CUDA device of compute capability 8.9",
    ),
]
SHAPE = small_shape(
    hidden_size=128, intermediate_size=160, heads=4, kv_heads=2, head_dim=32, block_size=8, layers=3, vocab_size=333
)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    exact = exact.detach().double()
    return float((found.detach().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(16, 16, 16), (7, 48, 64), (512, 320, 4096), (1, 160, 128)])
def test_a_product_is_that_of_its_rounded_operands(sizes: tuple[int, int, int], dtype: torch.dtype, fast: bool) -> None:
    m, n, k = sizes
    (a, of_a), (b, of_b) = (quantise(torch.randn(rows, k, device="cuda")) for rows in (m, n))
    exact = (a.double() * of_a) @ (b.double() * of_b).t()
    found = multiply(a, of_a, b, of_b, dtype, fast=fast)
    assert found.dtype == dtype
    assert relative(found, exact) < (0.02 if fast else 0.005)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", [5, 160])
def test_the_three_products_of_a_layer_are_off_by_what_rounding_explains(rows: int, compiled: bool) -> None:
    layer = ScaledLinear(256, 192).cuda().bfloat16()
    if compiled:
        layer.compile(dynamic=False, fullgraph=True)
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    slope = torch.randn(rows, 192, device="cuda", dtype=torch.bfloat16)
    slope[rows // 2] = 0
    out = layer(x)
    out.backward(slope)
    weight, inputs = layer.weight.detach().double(), x.detach().double()
    exact = (inputs @ weight.t(), slope.double() @ weight, slope.double().t() @ inputs)
    for mine, theirs in zip((out, x.grad, layer.weight.grad), exact, strict=True):
        assert 0.02 < relative(mine, theirs) < 0.06
    assert not x.grad[rows // 2].any()


@pytest.mark.parametrize("teach", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_head_gives_the_numbers_of_float64(compiled: bool, softcap: float | None, teach: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    hidden, head = torch.randn(100, 128, generator=draw), torch.randn(501, 128, generator=draw) * 0.15
    labels, told = torch.randint(0, 501, (100,), generator=draw), torch.randn(100, 501, generator=draw) * 2
    hidden, head, told = hidden.bfloat16(), head.bfloat16(), told.bfloat16()
    exact = hidden.double().requires_grad_()
    logits, other = exact @ head.double().t(), told.double()
    if softcap is not None:
        logits, other = (torch.tanh(each / softcap) * softcap for each in (logits, other))
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    if teach:
        loss = (other.softmax(1) * (other.log_softmax(1) - logits.log_softmax(1))).sum(1)
    loss.sum().backward()
    found = score(
        hidden.cuda(),
        ScaledHead.of(head.cuda()),
        labels.cuda(),
        told.cuda() if teach else None,
        scale=1.0,
        softcap=softcap,
        compiled=compiled,
        differentiate=True,
    )
    assert relative(found.loss.cpu(), loss) < 0.02
    assert 0.003 < relative(found.gradient.cpu(), exact.grad) < 0.07
    assert (found.right.cpu() == (logits.argmax(1) == labels)).float().mean() > 0.9


def gradients(model: DraftModel, batch: Batch, build, scaled: bool, compiled: bool) -> dict[str, torch.Tensor]:
    mask = build(batch.blocks.layout(batch.documents))
    hidden = model(batch.features, batch.noise, batch.positions, batch.blocks.positions.flatten(1), mask)
    weights = batch.blocks.scored * slot_weights(SHAPE.block_size, device=hidden.device)
    head = batch.embedding.to(hidden.dtype) * 0.2
    in_fp8 = ScaledHead.of(head) if scaled else None
    loss = block_loss(hidden, FrozenHead(head, compiled=compiled, scaled=in_fp8), batch.blocks.labels, weights)
    loss.total.backward()
    found = {name: parameter.grad.double().cpu() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {**found, "loss": loss.total.detach().double().cpu()}


@pytest.mark.parametrize("recompute", [False, True])
def test_fused_layers_under_flex_attention_point_where_float64_does_and_compile_once(recompute: bool) -> None:
    torch.compiler.reset()
    exact, model = DraftModel(SHAPE), DraftModel(SHAPE, gradient_checkpointing=recompute, fp8=True)
    exact.init_weights(0)
    model.init_weights(0)
    exact.double()
    model.to("cuda", torch.bfloat16).compile_layers()
    counts = []
    for seed, supervised in enumerate((0.7, 0.0, 1.0)):
        batch = random_batch(seed, SHAPE, rows=2, tokens=200, anchors=20, supervised=supervised)
        moved = {key: value.cuda() for key, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        on_gpu = replace(batch, blocks=batch.blocks.to("cuda"), **moved)
        found = gradients(model, on_gpu, flex_mask, True, True)
        for name, theirs in gradients(exact, batch, blockwise_mask, False, False).items():
            bound = 0.02 if name == "loss" else 0.3
            assert (found[name] - theirs).norm() <= bound * theirs.norm(), name
        counts.append(counters["stats"]["unique_graphs"])
    assert counts[0] == counts[-1], counts


def test_the_head_is_rounded_at_random_with_the_same_bits_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_mp.drafter.fp8_head._ROWS_AT_ONCE", 96)
    torch.compiler.reset()
    weight = torch.randn(373, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    near, far = ScaledHead.of(weight), ScaledHead.of(weight.cuda())
    before = counters["stats"]["unique_graphs"]
    for draw in draws_of(0, 0, 3):
        near.round_anew(draw, compiled=False)
        far.rows.view(torch.uint8).fill_(0x7F)
        far.columns.view(torch.uint8)[:, :373].fill_(0x7F)
        far.rows.view(torch.uint8)[373:].fill_(0)
        far.round_anew(draw, compiled=True)
        for mine, other in ((far.rows, near.rows), (far.columns, near.columns)):
            # A quotient that a GPU rounds otherwise may tip a value that lies between two.
            assert (mine.cpu().view(torch.uint8) != other.view(torch.uint8)).float().mean() < 1e-3
    assert counters["stats"]["unique_graphs"] - before == 1
