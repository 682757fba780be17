"""One optimizer step: clipping, non-finite gradients, and the fused kernel against `torch.optim.AdamW`."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from dflash_mp.config import TrainConfig
from dflash_mp.drafter import fused_adamw
from dflash_mp.drafter.optimizer import MasterAdamW
from dflash_mp.errors import DflashError

# Whole stretches of the kernels and the rest of one, less than one, a single element.
SIZES = {"matrix": (127, 67), "wide": (64, 128), "norm": (48,), "single": (1,)}


def parameters(device: str, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(3)
    return {
        name: nn.Parameter(torch.randn(size, generator=random).to(dtype).to(device)) for name, size in SIZES.items()
    }


def set_gradients(named: dict[str, nn.Parameter], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for parameter in named.values():
        gradient = torch.randn(parameter.shape, generator=random).to(parameter)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)


def move_gradients(named: dict[str, nn.Parameter], offset: int) -> None:
    """To views into one buffer, as those of DDP are, the first `offset` elements behind its beginning and each right behind the one before."""
    sizes = [p.numel() for p in named.values()]
    first = next(iter(named.values()))
    parts = torch.empty(offset + sum(sizes), dtype=first.dtype, device=first.device)[offset:].split(sizes)
    for parameter, part in zip(named.values(), parts, strict=True):
        view = part.view_as(parameter)
        parameter.grad = view.copy_(parameter.grad) if parameter.grad is not None else view


def options(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate({"steps": 10, "learning_rate": 1e-2, "weight_decay": 0.1, **changes})


def test_the_norm_is_that_of_the_mean_gradient_and_clipping_bounds_the_update() -> None:
    named = parameters("cpu", torch.float32)
    set_gradients(named, 1)
    expected = float(torch.cat([p.grad.flatten() for p in named.values()]).norm()) / 8.0
    before = {name: p.detach().clone() for name, p in named.items()}
    clipped = MasterAdamW(named.items(), options(clip=1e-3))
    assert clipped.step(1e-2, 8.0) == pytest.approx(expected, rel=1e-5)
    moment = clipped.tensors()["exp_avg.matrix"]
    free = parameters("cpu", torch.float32)
    set_gradients(free, 1)
    unclipped = MasterAdamW(free.items(), options(clip=1e9))
    unclipped.step(1e-2, 8.0)
    ratio = moment.norm() / unclipped.tensors()["exp_avg.matrix"].norm()
    assert float(ratio) == pytest.approx(1e-3 / expected, rel=1e-3)
    assert not torch.equal(before["matrix"], named["matrix"])
    assert all(float(p.grad.abs().max()) == 0 for p in named.values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(bad: float) -> None:
    named = parameters("cpu", torch.float32)
    set_gradients(named, 1)
    optimizer = MasterAdamW(named.items(), options())
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    named["wide"].grad[3, 5] = bad
    with pytest.raises(DflashError, match="wide"):
        optimizer.step(1e-2, 1.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in optimizer.tensors().items())


def compare_fused(device: str) -> None:
    """Eight updates by the kernels and by `torch.optim.AdamW`, gradients moving between them; then some that are not finite and must write nothing."""
    fused, plain = parameters(device, torch.bfloat16), parameters(device, torch.bfloat16)
    masters = {name: p.detach().float() for name, p in fused.items()}
    moments = {name: (torch.zeros_like(m), torch.zeros_like(m)) for name, m in masters.items()}
    reference = MasterAdamW(plain.items(), options(clip=10.0))
    reference._fused = None
    kernels = fused_adamw.FusedAdamW(
        [fused_adamw.Slot(p, masters[name], *moments[name], 0.1 if p.dim() > 1 else 0.0) for name, p in fused.items()]
    )

    def update(step: int, weight_sum: float) -> float:
        gradients = [p.grad for p in fused.values()]
        return kernels.step(fused_adamw.Update(step, 1e-2, (0.9, 0.95), 1e-8, 1 / weight_sum, 10.0), gradients)

    for step in range(1, 9):
        set_gradients(fused, step)
        set_gradients(plain, step)
        if step in (3, 6):  # "wide" is then at a multiple of 16 bytes, or of 2 only
            move_gradients(fused, 3 if step == 3 else 4)
        weight_sum = 4.0 if step % 2 else 100.0  # clipped, and not
        table = kernels._table
        norm = update(step, weight_sum)
        assert (kernels._table is table) == (step not in (1, 3, 6)), (
            "made anew when a gradient has moved, and then only"
        )
        assert (norm > 10) == (step % 2 == 1)
        assert norm == pytest.approx(reference.step(1e-2, weight_sum), rel=1e-6)
        for name, tensor in reference.tensors().items():
            kind, _, parameter = name.partition(".")
            mine = {"master": masters[parameter], "exp_avg": moments[parameter][0], "exp_avg_sq": moments[parameter][1]}
            torch.testing.assert_close(mine[kind], tensor, rtol=1e-5, atol=1e-7, msg=f"{name}, step {step}")
        for name, parameter in fused.items():
            rounded, slack = (
                masters[name].to(torch.bfloat16),
                0.0 if device == "cuda" else 2.0**-7,
            )  # the interpreter truncates
            torch.testing.assert_close(parameter.detach(), rounded, rtol=slack, atol=0.0, msg=f"{name}, step {step}")
            assert not parameter.grad.any()
    before = {name: m.clone() for name, m in masters.items()}
    for name, bad in (("wide", float("inf")), ("matrix", float("nan")), ("single", float("nan"))):
        set_gradients(fused, 9)
        fused[name].grad.view(-1)[-1] = bad
        assert not math.isfinite(update(9, 4.0))
        assert all(torch.equal(before[name], m) for name, m in masters.items())
        assert all(parameter.grad.any() for parameter in fused.values())
    with pytest.raises(RuntimeError, match="contiguous"):
        kernels.step(fused_adamw.Update(9, 1e-2, (0.9, 0.95), 1e-8, 1.0, 1.0), [p.grad.float() for p in fused.values()])


def compare_norm(device: str) -> None:
    """The kernel that adds up partial sums, several times as many as it takes at a time, against float64."""
    from dflash_mp.drafter.adamw_kernel import norm_and_scale

    squares = torch.rand(3 * fused_adamw.WIDTH, generator=torch.Generator().manual_seed(2)).to(device)
    result, exact = torch.empty(2, device=device), 0.5 * float(squares.double().sum().sqrt())

    def measured(clip: float) -> list[float]:
        norm_and_scale[(1,)](squares, 0.5, clip, result, len(squares), fused_adamw.WIDTH, num_warps=fused_adamw.WARPS)
        return result.tolist()

    assert measured(3.0) == pytest.approx([exact, 0.5 * 3.0 / exact], rel=1e-6)
    assert measured(2 * exact) == pytest.approx([exact, 0.5], rel=1e-6)
    for bad in (float("inf"), float("nan")):
        squares[-1] = bad
        norm, scale = measured(3.0)
        assert not math.isfinite(norm)
        assert math.isnan(scale)


def test_the_fused_kernels_update_as_adamw_does() -> None:
    if torch.cuda.is_available():
        compare_norm("cuda")
        compare_fused("cuda")
        return
    pytest.importorskip("triton")  # then its interpreter runs the kernels here, in a process of its own
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def ptx(kernel: object, signature: dict[str, str], constants: dict[str, int], warps: int = 4) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]


def test_the_fused_kernels_are_built_for_hopper_with_accesses_of_16_bytes() -> None:
    pytest.importorskip("triton")
    from dflash_mp.drafter.adamw_kernel import adamw, norm_and_scale, sum_squares

    places = {"table": "*i64", "slot_of": "*i32"}
    sizes = {"stretch": fused_adamw.STRETCH, "block": fused_adamw.BLOCK, "part": fused_adamw.PART}
    numbers = dict.fromkeys(("learning_rate", "first", "second", "step_size", "root", "eps"), "fp32")
    built = ptx(adamw, places | {"weight_decays": "*fp32", "norm_and_scale": "*fp32"} | numbers, sizes)
    per_thread = fused_adamw.BLOCK // (4 * 32)
    assert built.count("ld.global.v4.b32") == built.count("st.global.v4.b32") == 3 * per_thread // 4
    assert built.count("ld.global.v2.b32") == built.count("st.global.v2.b32") // 2 == per_thread // 4

    sizes = {"stretch": fused_adamw.STRETCH, "part": fused_adamw.BLOCK}
    built = ptx(sum_squares, places | {"squares": "*fp32"}, sizes)
    assert built.count("ld.global.v4.b32") == fused_adamw.STRETCH // (4 * 32) // 8

    signature = {"squares": "*fp32", "mean": "fp32", "clip": "fp32", "result": "*fp32"}
    assert (
        ptx(
            norm_and_scale, signature, {"count": 4 * fused_adamw.WIDTH, "width": fused_adamw.WIDTH}, fused_adamw.WARPS
        ).count("ld.global")
        > 0
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bad", [None, float("nan")])
def test_on_cuda_a_bf16_model_takes_the_fused_path_to_the_same_weights(bad: float | None) -> None:
    fused, plain = parameters("cuda", torch.bfloat16), parameters("cuda", torch.bfloat16)
    mine, reference = MasterAdamW(fused.items(), options()), MasterAdamW(plain.items(), options())
    assert mine._fused is not None
    reference._fused = None
    for step in range(3):
        set_gradients(fused, step)
        set_gradients(plain, step)
        assert mine.step(1e-2, 4.0) == pytest.approx(reference.step(1e-2, 4.0), rel=1e-5)
    for name, tensor in reference.tensors().items():
        torch.testing.assert_close(mine.tensors()[name], tensor, rtol=1e-5, atol=1e-7)
    if bad is not None:
        before = {name: tensor.clone() for name, tensor in mine.tensors().items()}
        set_gradients(fused, 7)
        fused["wide"].grad[3, 5] = bad
        with pytest.raises(DflashError, match="wide"):
            mine.step(1e-2, 4.0)
        assert all(torch.equal(before[name], tensor) for name, tensor in mine.tensors().items())


if __name__ == "__main__":
    compare_norm("cpu")
    compare_fused("cpu")
