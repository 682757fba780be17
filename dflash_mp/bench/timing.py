"""Seconds of one piece of work on a device, and what the device can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, the device idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of one large matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    for _ in range(3):
        torch.mm(a, b, out=out)
    seconds = statistics.median(timed(lambda: torch.mm(a, b, out=out), device) for _ in range(10))
    return 2.0 * size**3 / seconds


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a plain copy."""
    source = torch.ones(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = statistics.median(timed(lambda: target.copy_(source), device) for _ in range(10))
    return 2.0 * source.numel() / seconds
