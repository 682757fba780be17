"""`dflash-mp bench capture`: a feeder's truncated forward against the model's own with `output_hidden_states=True`.

Both compute the same row (the same tokens, packed in the same documents) in turn, in one process, so that a busy machine hurts both; the
medians of their times are compared. What the capture leaves out is known beforehand: the share of the multiplications by weights
that lies in the layers behind the last tap and in the head. The capture should save at least that share of the time, less 10%.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dflash_mp.config import TargetConfig
from dflash_mp.data.row import TokenRow
from dflash_mp.target.capture import Capture
from dflash_mp.target.families import Anatomy
from dflash_mp.target.load import Target, load_target

_DOCUMENTS = 4


@dataclass(frozen=True)
class CaptureBench:
    """Median seconds per row of `tokens` tokens, and shares of the plain forward's work or time."""

    tokens: int
    layers_run: int
    layers: int
    plain_seconds: float
    capture_seconds: float
    skipped_share: float

    @property
    def saved_share(self) -> float:
        """Share of the plain forward's time that the capture saves."""
        return 1 - self.capture_seconds / self.plain_seconds

    @property
    def ok(self) -> bool:
        return self.saved_share >= self.skipped_share - 0.10

    def lines(self) -> list[str]:
        plain, capture = self.plain_seconds, self.capture_seconds
        return [
            f"plain forward, all hidden states  {plain * 1e3:9.1f} ms/row {self.tokens / plain:10,.0f} tokens/s",
            f"truncated capture                 {capture * 1e3:9.1f} ms/row {self.tokens / capture:10,.0f} tokens/s",
            f"runs {self.layers_run} of {self.layers} layers and no head: skips {self.skipped_share:.1%} of the work",
            f"saves {self.saved_share:.1%} of the time ({plain / capture:.2f}x as fast); "
            f"goal: at least {self.skipped_share - 0.10:.1%}: {'met' if self.ok else 'MISSED'}",
        ]


def bench_capture(config: TargetConfig, tokens: int, rounds: int) -> CaptureBench:
    """Measure `rounds` alternating pairs after one pair of warm-up. Raises `TargetError` if the target can't be used."""
    target = load_target(config)
    capture = Capture(target, keep_target=True)
    row = _row(tokens, target.info.vocab_size)
    ids = torch.from_numpy(row.input_ids.astype(np.int64))[None].to(target.device)
    positions = torch.from_numpy(row.position_ids.astype(np.int64))[None].to(target.device)
    out = torch.empty(tokens, target.info.feature_width, dtype=target.embedding.dtype, device=target.device)

    @torch.inference_mode()
    def plain() -> None:
        target.model(input_ids=ids, position_ids=positions, output_hidden_states=True, use_cache=False)

    times: dict[str, list[float]] = {"plain": [], "capture": []}
    for turn in range(rounds + 1):
        for name, work in (("plain", plain), ("capture", lambda: capture.capture(row, out))):
            seconds = _seconds(work, target.device)
            if turn:
                times[name].append(seconds)
    return CaptureBench(
        tokens=tokens,
        layers_run=target.info.layer_ids[-1] + 1,
        layers=target.info.num_layers,
        plain_seconds=statistics.median(times["plain"]),
        capture_seconds=statistics.median(times["capture"]),
        skipped_share=skipped_share(target),
    )


def skipped_share(target: Target) -> float:
    """Share of the weights multiplied per token that lies behind the last tap: later layers and the head."""
    anatomy = target.anatomy
    if anatomy is None:
        raise RuntimeError("this target was cut by a capture")
    layers = [_matrix_weights(anatomy, number) for number in range(len(anatomy.layers))]
    total = sum(layers) + target.head.numel()
    return 1 - sum(layers[: target.info.layer_ids[-1] + 1]) / total


def _matrix_weights(anatomy: Anatomy, layer: int) -> int:
    return sum(parameter.numel() for parameter in anatomy.layers[layer].parameters() if parameter.dim() > 1)


def _row(tokens: int, vocab_size: int) -> TokenRow:
    generator = np.random.default_rng(0)
    documents = (np.arange(tokens) * _DOCUMENTS // tokens).astype(np.int32)
    starts = np.searchsorted(documents, documents)
    return TokenRow(
        input_ids=generator.integers(0, vocab_size, tokens, dtype=np.int32),
        position_ids=(np.arange(tokens) - starts).astype(np.int32),
        document_ids=documents + 1,
        loss_mask=np.ones(tokens, np.uint8),
    )


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
