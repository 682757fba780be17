"""`dflash-mp bench regenerate`: the target writing many texts side by side, against the bytes that each step must read.

The same `Slots` as in `regenerate`, on random prompts, without stop tokens: all slots are filled, write `new_tokens` each, and are taken. The
floor of a step is its bytes, the weights of layers and head once and the keys and values of each text's own places, over the rate of a plain
copy (bytes read and written) in the same run; that of a round is the sum over its steps. Reading prompts is timed apart. The first round,
which compiles and records, doesn't count. With `compare` as many rounds by the model's own attention and norms follow, in slots of their
own: those before are freed, and their figures are out.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dflash_mp.bench.step import timed
from dflash_mp.decode.sampling import Sampling
from dflash_mp.errors import ConfigError
from dflash_mp.regenerate.slot_attention import attend, head_sizes
from dflash_mp.regenerate.slots import SlotOptions, Slots
from dflash_mp.target.load import Target

_STEPS = 8  # between two looks, as in `regenerate`


@dataclass(frozen=True)
class Work:
    """`batch` prompts around `prompt_tokens` long (half to one and a half), each answered with `new_tokens`."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    sampling: Sampling

    def prompts(self, vocabulary: int) -> list[list[int]]:
        draw = random.Random(0)
        shortest, longest = max(1, self.prompt_tokens // 2), max(1, self.prompt_tokens * 3 // 2)
        lengths = [draw.randint(shortest, longest) for _ in range(self.batch)]
        return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Round:
    """Seconds of reading the prompts and of writing the answers."""

    reading: float
    writing: float


def bench_regenerate(target: Target, work: Work, rounds: int, compare: bool) -> Iterator[str]:
    """Lines for people, as they are measured. Raises `TargetError`, and `ConfigError` for texts that the target has no positions for."""
    if work.prompt_tokens * 3 // 2 + work.new_tokens > target.info.max_positions:
        raise ConfigError(f"the target has {target.info.max_positions} positions", "ask for shorter texts")
    prompts = work.prompts(target.info.vocab_size)
    rate = _copy_rate(target.device)
    floor = sum(step_bytes(target, prompts, written) for written in range(work.new_tokens)) / rate
    wrote = work.batch * work.new_tokens
    yield f"plain copy {rate / 1e9:,.0f} GB/s; bytes of {work.new_tokens} steps {floor * rate / 1e9:,.1f} GB: floor {floor:.3f} s = {wrote / floor:,.0f} tokens/s"
    by_kernel = yield from _way(target, work, rounds, floor, own=False)
    _free(target.device)
    if by_kernel:
        yield from _kernel_alone(target, work, rate)
        _free(target.device)
    if compare:
        yield from _way(target, work, rounds, floor, own=True)


def _way(target: Target, work: Work, rounds: int, floor: float, own: bool) -> Generator[str, None, bool]:
    """Measure one way, whose slots end with it; returns whether it attends by the kernel."""
    notices: list[str] = []
    options = SlotOptions(work.batch, work.new_tokens, (), work.sampling, own_forward=own)
    engine = Slots(target, options, notices.append)
    prompts = work.prompts(target.info.vocab_size)
    first = _round(engine, target, work, prompts)
    yield f"{engine.attention}: first round {first.reading + first.writing:.1f} s"
    yield from notices
    results = [_round(engine, target, work, prompts) for _ in range(rounds)]
    reading, writing = (statistics.median(getattr(r, name) for r in results) for name in ("reading", "writing"))
    read, wrote = sum(map(len, prompts)), work.batch * work.new_tokens
    yield (
        f"{engine.attention}: {read:,} prompt tokens in {reading:.3f} s ({read / reading:,.0f} tokens/s); "
        f"{wrote:,} new tokens in {writing:.3f} s, {writing / work.new_tokens * 1e3:.2f} ms a step, {wrote / writing:,.0f} tokens/s "
        f"= {floor / writing:.0%} of the floor's; both together {wrote / (reading + writing):,.0f} tokens/s"
    )
    return engine.attention.startswith("a kernel")


def _round(engine: Slots, target: Target, work: Work, prompts: list[list[int]]) -> Round:
    numbers = [np.full(work.new_tokens, 0.5)] * work.batch
    reading = timed(lambda: engine.fill(list(range(work.batch)), prompts, numbers), target.device)
    started = time.perf_counter()
    for written in range(0, work.new_tokens, _STEPS):
        engine.advance(min(_STEPS, work.new_tokens - written))
        engine.take()
    return Round(reading, time.perf_counter() - started)


def _free(device: torch.device) -> None:
    """What is referred to no more goes back to the device: the next way's cache may need all of it."""
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def step_bytes(target: Target, prompts: list[list[int]], written: int) -> int:
    """What the step after `written` new tokens must read."""
    anatomy, info = target.anatomy, target.info
    if anatomy is None:
        raise RuntimeError("the target's model was freed")
    item = target.embedding.element_size()
    weights = sum(parameter.numel() for parameter in anatomy.layers.parameters()) + target.head.numel()
    places = sum(len(prompt) + written for prompt in prompts)
    return item * (weights + places * info.num_layers * info.kv_heads * sum(_head_sizes(target)))


def _head_sizes(target: Target) -> tuple[int, int]:
    if target.anatomy is None:
        raise RuntimeError("the target's model was freed")
    return head_sizes(target.anatomy.config, target.info.head_dim)


def _copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a plain copy."""
    source = torch.ones(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    return 2.0 * source.numel() / statistics.median(timed(lambda: into.copy_(source), device) for _ in range(10))


def _kernel_alone(target: Target, work: Work, rate: float) -> Iterator[str]:
    """One layer's attention by the kernel, for several sizes of its tile."""
    info, device, dtype = target.info, target.device, target.embedding.dtype
    last = torch.tensor([len(p) + work.new_tokens // 2 for p in work.prompts(info.vocab_size)], device=device)
    spans = torch.stack((torch.zeros_like(last), last), -1)[:, None, None].contiguous()
    sizes = _head_sizes(target)
    query = torch.randn(work.batch, info.heads, 1, sizes[0], device=device, dtype=dtype)
    keys, values = (
        torch.randn(work.batch, info.kv_heads, int(last.max()) + 1, size, device=device, dtype=dtype) for size in sizes
    )
    read = int((last + 1).sum()) * info.kv_heads * sum(sizes) * keys.element_size()
    for tile in (32, 64, 128):
        attend(query, keys, values, spans, tile=tile)

        def layers(tile: int = tile) -> None:
            for _ in range(20):
                attend(query, keys, values, spans, tile=tile)

        seconds = statistics.median(timed(layers, device) for _ in range(5)) / 20
        yield f"the kernel alone, {tile} places at a time: {seconds * 1e6:.0f} µs, {read / seconds / 1e9:,.0f} GB/s = {read / seconds / rate:.0%} of a plain copy"
