"""Seconds of one piece of work on a device, alone or in a row, and what the device can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

# Seconds of a series, about, and how often the longest work is in it at least.
_SERIES = {"cuda": (0.5, 3), "cpu": (0.1, 1)}


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, the device idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def by_turns(works: Sequence[Callable[[], object]], device: torch.device, turns: int) -> list[tuple[float, ...]]:
    """Seconds of one run of each of `works`, per turn: a series of runs in a row of the first, then of the second, and so on.

    The device is idle before and after a series only, so that the host's latency counts where the host is slower than the device, and nowhere else.
    All series of a turn last about equally long: what a device does at a clock that depends on its load is compared at a like one.
    """
    alone = [timed(work, device) for work in works]
    least, count = _SERIES[device.type]
    length = max(least, count * max(alone))
    counts = [max(1, round(length / seconds)) for seconds in alone]
    return [
        tuple(_in_a_row(work, count, device) for work, count in zip(works, counts, strict=True)) for _ in range(turns)
    ]


def _in_a_row(work: Callable[[], object], count: int, device: torch.device) -> float:
    def series() -> None:
        for _ in range(count):
            work()

    return timed(series, device) / count


def queued(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the host needs to queue `work` on an idle CUDA device."""
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of one large matrix product."""
    product, operations = plain_product(device, dtype)
    seconds = statistics.median(timed(product, device) for _ in range(10))
    return operations / seconds


def plain_product(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], object], float]:
    """A large matrix product, run a few times, and its floating-point operations."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)

    def product() -> None:
        torch.mm(a, b, out=out)

    for _ in range(3):
        product()
    return product, 2.0 * size**3


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a plain copy."""
    source = torch.ones(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = statistics.median(timed(lambda: target.copy_(source), device) for _ in range(10))
    return 2.0 * source.numel() / seconds
