"""The three products of a linear layer in fp8 equal slow ones on the rounded operands, and are as far from exact ones as rounding explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from dflash_mp.drafter.fp8_products import (
    FP8,
    LARGEST,
    ScaledLinear,
    dither,
    draws_of,
    linear,
    quantise,
    round_to_fp8,
    unscaled_layers,
)

# What e4m3 makes of normal numbers is off by 2.6%, so a product of two such matrices by 3.7%. Weights are rounded at random: by 3.7%, alone.
LEAST, MOST = 0.03, 0.045
LEAST_OF_ONE = 0.02

VALUES = torch.arange(256).to(torch.uint8).view(FP8).double()
VALUES = VALUES[VALUES.isfinite()].unique()


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def slowly_rounded(x: torch.Tensor) -> torch.Tensor:
    """In float64: each value over the scale, to the nearest of the 253 finite ones that a byte can say, and back."""
    scale = x.double().abs().max().clamp_min(1e-30) / VALUES.max()
    at = (x.double() / scale).clamp(VALUES.min(), VALUES.max())
    nearest = (at.flatten()[:, None] - VALUES).abs().argmin(1)
    return (VALUES[nearest] * scale).view(x.shape)


def slowly_dithered(weight: torch.Tensor, draw: int) -> torch.Tensor:
    """In float64: each value over the scale at one of the two beside it, as the fraction of a lattice decides, in Python's own numbers."""
    scale = weight.double().abs().max() / LARGEST
    chosen = (weight.double() / scale).clamp(-LARGEST, LARGEST).tolist()
    for row, values in enumerate(chosen):
        for column, value in enumerate(values):
            by_row, by_column = draw * 0x9E3779B1 + 0xC13FA9A9, draw * 0x91E10DA5 + 0x9E3779B1
            fraction = ((row * by_row + column * by_column + draw) % 2**32 >> 12) / 2**20
            magnitudes = VALUES[VALUES >= 0]
            at = int(torch.searchsorted(magnitudes, abs(value), right=True)) - 1
            lower, upper = magnitudes[at].item(), magnitudes[min(at + 1, len(magnitudes) - 1)].item()
            above = (abs(value) - lower) / (upper - lower) if lower < upper else 0.0
            goes_up = above + (0.5 if abs(value) < 2**-6 else fraction) >= 1
            values[column] = math.copysign(upper if goes_up else lower, value)
    return torch.tensor(chosen, dtype=torch.float64) * scale


def three_products(
    x: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor, draw: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    layer = ScaledLinear(weight.shape[1], weight.shape[0])
    layer.to(weight.dtype).weight.data.copy_(weight)
    layer.draw.fill_(draw)
    x = x.detach().requires_grad_()
    out = layer(x)
    out.backward(slope)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert out.dtype == x.grad.dtype == layer.weight.grad.dtype == x.dtype
    return out.detach(), x.grad, layer.weight.grad


def material(seed: int, rows: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sizes = ((rows, 64), (48, 64), (rows, 48))
    return [
        torch.randn(size, generator=draw).to(dtype) * factor
        for size, factor in zip(sizes, (3.0, 0.02, 1e-4), strict=True)
    ]


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("rows", [1, 5, 16, 37, 160])
def test_products_equal_those_of_slowly_rounded_operands(rows: int) -> None:
    x, weight, slope = material(rows, rows)
    (draw,) = draws_of(rows, 3, 1)
    found = three_products(x, weight, slope, draw)
    x, weight, slope = slowly_rounded(x), slowly_dithered(weight, draw), slowly_rounded(slope)
    for mine, exact in zip(found, (x @ weight.t(), slope @ weight, slope.t() @ x), strict=True):
        assert relative(mine, exact) < 3e-3  # a value halfway between two may go either way in float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_off_by_what_rounding_explains(dtype: torch.dtype) -> None:
    x, weight, slope = material(0, 160, dtype)
    found = three_products(x, weight, slope)
    x, weight, slope = x.double(), weight.double(), slope.double()
    rounded = slowly_dithered(weight, 0)
    assert LEAST < relative(rounded, weight) < MOST
    for mine, exact in zip(found[:2], (x @ rounded.t(), slope @ rounded), strict=True):
        assert LEAST_OF_ONE < relative(mine, exact) < LEAST, "only the other operand's rounding is left"
    assert LEAST < relative(found[2], slope.t() @ x) < MOST, "less would not be fp8"


def test_weights_are_rounded_at_random_to_one_of_two_neighbours_and_in_the_mean_not_at_all() -> None:
    x = torch.randn(40, 33, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3.5, 2, 40)[:, None]
    x = torch.where(x.abs() < 2.0**-6, x + 1, x).clamp(-LARGEST, LARGEST)
    x[0, :7] = torch.tensor([2.0, 2.02, -2.02, 1.99, 2.0**-6, -(2.0**-6) * 1.01, 448.0])
    at = torch.searchsorted(VALUES, x.double())
    lower, upper = VALUES[(at - 1).clamp_min(0)], VALUES[at]
    step = torch.where(upper == x, 1.0, upper - lower)
    means, draws = torch.zeros(x.shape, dtype=torch.float64), draws_of(1, 0, 1500)
    assert len(set(draws)) == 1500
    for draw in draws:
        rounded = round_to_fp8(dither(x, torch.tensor(draw, dtype=torch.int32))).double()
        assert torch.where(upper == x, rounded == x, (rounded == lower) | (rounded == upper)).all()
        means += rounded / len(draws)
    off = (means - x) / step * x.sign()
    assert off.abs().mean() < 0.015, "to the nearest it would be 0.25"
    assert off.mean().abs() < 0.002, "neither towards zero nor away from it"
    assert off.abs().max() < 0.07


def test_small_values_are_rounded_to_the_nearest_and_zero_stays() -> None:
    x = torch.linspace(-(2.0**-6), 2.0**-6, 101).view(1, -1)
    for draw in draws_of(2, 0, 50):
        rounded = round_to_fp8(dither(x, torch.tensor(draw, dtype=torch.int32))).float()
        assert (rounded - x).abs().max() <= 2.0**-10 + 2.0**-10, (
            "of the nearest, and of the bits that are cut off first"
        )
        assert rounded[0, 50] == 0


def test_errors_of_two_steps_and_of_two_matrices_have_nothing_in_common() -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * 50
    errors = [
        (round_to_fp8(dither(x, torch.tensor(draw, dtype=torch.int32))).double() - x).flatten()
        for draw in [*draws_of(0, 0, 6), *draws_of(0, 1, 6)]
    ]
    for number, one in enumerate(errors):
        for other in errors[:number]:
            assert abs(torch.cosine_similarity(one, other, 0)) < 0.1


def test_a_step_rounds_weights_in_its_own_way_in_both_directions() -> None:
    x, weight, slope = material(7, 32)
    once, again, other = (three_products(x, weight, slope, draw) for draw in (5, 5, -77))
    assert all(torch.equal(mine, same) for mine, same in zip(once, again, strict=True))
    assert [torch.equal(mine, another) for mine, another in zip(once, other, strict=True)] == [False, False, True]


def test_a_thousandfold_row_leaves_the_others_as_exact_as_before() -> None:
    x, weight, slope = material(1, 64)
    x[3] *= 1000
    slope[5] *= 1000
    out, of_x, of_weight = three_products(x, weight, slope)
    x, weight, slope = x.double(), slowly_dithered(weight, 0), slope.double()
    for mine, exact in ((out, x @ weight.t()), (of_x, slope @ weight)):
        errors = (mine.double() - exact).norm(dim=1) / exact.norm(dim=1)
        assert errors.max() < 0.06
    assert relative(of_weight, slope.t() @ x) < 0.06


def test_zeros_give_zeros_and_a_row_of_them_too() -> None:
    x, weight, slope = material(2, 32)
    x[4], slope[7] = 0, 0
    out, of_x, _ = three_products(x, weight, slope)
    assert not out[4].any()
    assert not of_x[7].any()
    for nothing in ((x * 0, weight, slope), (x, weight * 0, slope), (x, weight, slope * 0)):
        products = three_products(*nothing)
        assert all(each.isfinite().all() for each in products)
        assert sum(not each.any() for each in products) == 2, "each operand is in two of the three products"


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_out_so(poison: float) -> None:
    x, weight, slope = material(3, 16)
    slope[2, 3] = poison
    out, of_x, of_weight = three_products(x, weight, slope)
    assert out.isfinite().all()
    assert not of_x.isfinite().all()
    assert not of_weight.isfinite().all()


@pytest.mark.usefixtures("as_on_cuda")
def test_operands_may_lie_in_memory_in_any_order() -> None:
    x, weight, slope = material(4, 48)
    expected = three_products(x, weight, slope)
    turned = three_products(x.t().contiguous().t(), weight.t().contiguous().t(), slope.t().contiguous().t())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(turned, expected, strict=True))
    spread = three_products(x, weight, slope[:1].expand(48, -1))
    assert torch.equal(spread[1], three_products(x, weight, slope[:1].repeat(48, 1))[1])
    cube = three_products(x.view(2, 24, 64), weight, slope.view(2, 24, 48))
    assert torch.equal(cube[0].view(48, 48), expected[0])


def test_rounding_saturates_and_keeps_the_scale_beside_it() -> None:
    assert round_to_fp8(torch.tensor([449.0, 1e9, -1e9])).float().tolist() == [LARGEST, LARGEST, -LARGEST]
    values, scale = quantise(torch.tensor([[0.5, -7.0], [3.5, 0.0]]))
    assert values.float().abs().max() == LARGEST
    torch.testing.assert_close(values.float() * scale, torch.tensor([[0.5, -7.0], [3.5, 0.0]]))


def test_widths_that_fp8_cannot_take_stay_as_they_are_and_are_named() -> None:
    layers = torch.nn.ModuleDict(
        {"wide": linear(32, 48, True), "odd": linear(32, 40, True), "off": linear(32, 48, False)}
    )
    assert [name for name, _ in unscaled_layers(layers)] == ["odd", "off"]
    assert list(layers["wide"].state_dict()) == ["weight"]


def test_a_gradient_that_comes_through_a_norm_is_written_before_it_is_rounded() -> None:
    """Compiled, of the layer that asks for it only; results stay those of the layer that is not compiled."""
    backward_graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        backward_graphs.append(graph.print_readable(print_output=False))
        return make_boxed_func(graph.forward)

    for normed in (False, True):
        torch.manual_seed(3)
        layer = linear(32, 64, True, normed=normed)
        x, slopes = torch.randn(48, 32, requires_grad=True), torch.randn(48, 64)
        layer(x).backward(slopes)
        wanted = [x.grad.clone(), layer.weight.grad.clone()]  # type: ignore[union-attr]
        x.grad = layer.weight.grad = None
        backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=keep)
        torch.compile(layer, backend=backend, fullgraph=True)(x).backward(slopes)
        for found, right in zip((x.grad, layer.weight.grad), wanted, strict=True):
            torch.testing.assert_close(found, right)
    assert ["dflash_mp.written" in graph for graph in backward_graphs] == [False, True]
