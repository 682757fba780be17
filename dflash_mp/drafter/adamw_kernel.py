"""The Triton kernel of `fused_adamw`. Imported where it is launched only: builds of PyTorch for a CPU come without Triton."""

import triton
import triton.language as tl


@triton.jit
def adamw(  # type: ignore[no-untyped-def]  # noqa: ANN201
    table,
    slot_of,
    weight_decays,
    scale,
    learning_rate,
    first,
    second,
    step_size,
    root,
    eps,
    block: tl.constexpr,
    part: tl.constexpr,
):
    """A block of `block` elements of one slot: see `fused_adamw.FusedAdamW`, which lays out the first three. The others are numbers of the step.

    A block that is whole and lies at multiples of 16 bytes is read and written 16 bytes at a time, any other by the element.
    """
    program = tl.program_id(0)
    slot = tl.load(slot_of + program)
    row = table + slot * 8
    start = (program - tl.load(row + 6)) * block
    factor = tl.load(scale)
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
