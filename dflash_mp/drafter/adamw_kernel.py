"""The Triton kernel of `fused_adamw`. Imported where it is launched only: builds of PyTorch for a CPU come without Triton."""

import triton
import triton.language as tl


@triton.jit
def adamw(  # type: ignore[no-untyped-def]  # noqa: ANN201
    parameter,
    gradient,
    master,
    exp_avg,
    exp_avg_sq,
    scale,
    size,
    decay,
    first,
    second,
    step_size,
    root,
    eps,
    block: tl.constexpr,
):
    """A block of `block` elements: see `fused_adamw.apply`. Pointers first, then numbers of the step."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    factor = tl.load(scale)
    here = at < tl.where(factor == factor, size, 0)
    slope = tl.load(gradient + at, mask=here, other=0.0).to(tl.float32) * factor
    mean = tl.load(exp_avg + at, mask=here, other=0.0)
    square = tl.load(exp_avg_sq + at, mask=here, other=0.0)
    value = tl.load(master + at, mask=here, other=0.0)
    mean = first * mean + (1 - first) * slope
    square = second * square + (1 - second) * slope * slope
    value = value * decay - step_size * mean / (tl.sqrt(square) * root + eps)
    tl.store(exp_avg + at, mean, mask=here)
    tl.store(exp_avg_sq + at, square, mask=here)
    tl.store(master + at, value, mask=here)
    tl.store(parameter + at, value.to(parameter.dtype.element_ty), mask=here)
    tl.store(gradient + at, tl.zeros_like(slope).to(gradient.dtype.element_ty), mask=here)
