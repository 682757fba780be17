"""The Triton kernels of `fused_adamw`, in the order of a step. Imported where they are launched only: builds of PyTorch for a CPU come without Triton."""

import triton
import triton.language as tl


@triton.jit
def sum_squares(table, slot_of, squares, stretch: tl.constexpr, part: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Into `squares`, by program: the sum of squares of a stretch of `stretch` elements of one slot's gradient."""
    program = tl.program_id(0)
    row = table + tl.load(slot_of + program) * 8
    start = (program - tl.load(row + 6)) * stretch
    left = tl.load(row + 5) - start
    gradient = tl.load(row + 1).to(tl.pointer_type(tl.bfloat16)) + start
    if (left >= stretch) & (tl.load(row + 7) != 0):
        values = tl.load(tl.multiple_of(gradient, 16) + tl.arange(0, stretch)).to(tl.float32)
        tl.store(squares + program, tl.sum(values * values))
    else:
        sums = tl.zeros([part], dtype=tl.float32)
        for begin in range(0, stretch, part):
            at = begin + tl.arange(0, part)
            values = tl.load(gradient + at, mask=at < left, other=0.0).to(tl.float32)
            sums += values * values
        tl.store(squares + program, tl.sum(sums))


@triton.jit
def norm_and_scale(squares, mean, clip, result, count: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """One program: the norm of the mean gradient from `count` partial sums, a multiple of `width`, and the factor that makes
    a summed gradient a mean and clipped one, NaN where the norm is not finite.
    """
    sums = tl.zeros([width], dtype=tl.float32)
    for begin in range(0, count, width):
        sums += tl.load(squares + begin + tl.arange(0, width))
    norm = tl.sqrt_rn(tl.sum(sums)) * mean
    scale = tl.minimum(clip / (norm + 1e-6), 1.0) * mean
    tl.store(result, norm)
    tl.store(result + 1, tl.where(tl.abs(norm) < float("inf"), scale, float("nan")))


@triton.jit
def adamw(  # type: ignore[no-untyped-def]  # noqa: ANN201
    table,
    slot_of,
    weight_decays,
    norm_and_scale,
    learning_rate,
    first,
    second,
    step_size,
    root,
    eps,
    stretch: tl.constexpr,
    block: tl.constexpr,
    part: tl.constexpr,
):
    """A block of `block` elements of one slot, of which a stretch has several: see `fused_adamw.FusedAdamW`, which lays out the first four. The others
    are numbers of the step.

    A block that is whole and lies at multiples of 16 bytes is read and written 16 bytes at a time, any other by the element.
    """
    program = tl.program_id(0)
    slot = tl.load(slot_of + program // (stretch // block))
    row = table + slot * 8
    start = (program - tl.load(row + 6) * (stretch // block)) * block
    factor = tl.load(norm_and_scale + 1)
    left = tl.where(factor == factor, tl.load(row + 5) - start, 0)
    decay = 1 - learning_rate * tl.load(weight_decays + slot)
    parameter = tl.load(row).to(tl.pointer_type(tl.bfloat16)) + start
    gradient = tl.load(row + 1).to(tl.pointer_type(tl.bfloat16)) + start
    master = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + start
    exp_avg = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + start
    exp_avg_sq = tl.load(row + 4).to(tl.pointer_type(tl.float32)) + start
    if (left >= block) & (tl.load(row + 7) != 0):
        at = tl.arange(0, block)
        _update(
            tl.multiple_of(parameter, 8) + at,  # 4 elements per thread, as of those in float32
            tl.multiple_of(gradient, 8) + at,
            tl.multiple_of(master, 16) + at,
            tl.multiple_of(exp_avg, 16) + at,
            tl.multiple_of(exp_avg_sq, 16) + at,
            None,
            factor,
            decay,
            first,
            second,
            step_size,
            root,
            eps,
        )
    elif left > 0:
        for begin in range(0, block, part):  # parts, because a pointer per element takes many registers
            at = begin + tl.arange(0, part)
            _update(
                parameter + at,
                gradient + at,
                master + at,
                exp_avg + at,
                exp_avg_sq + at,
                at < left,
                factor,
                decay,
                first,
                second,
                step_size,
                root,
                eps,
            )


@triton.jit
def _update(  # type: ignore[no-untyped-def]  # noqa: ANN202
    parameter, gradient, master, exp_avg, exp_avg_sq, here, factor, decay, first, second, step_size, root, eps
):
    slope = tl.load(gradient, mask=here).to(tl.float32) * factor
    mean = tl.load(exp_avg, mask=here)
    square = tl.load(exp_avg_sq, mask=here)
    value = tl.load(master, mask=here)
    mean = first * mean + (1 - first) * slope
    square = second * square + (1 - second) * slope * slope
    value = value * decay - step_size * mean / (tl.sqrt(square) * root + eps)
    tl.store(exp_avg, mean, mask=here)
    tl.store(exp_avg_sq, square, mask=here)
    tl.store(master, value, mask=here)
    tl.store(parameter, value.to(tl.bfloat16), mask=here)
    tl.store(gradient, tl.zeros_like(slope).to(tl.bfloat16), mask=here)
