"""`dflash-mp bench capture`: a feeder's truncated forward against the model's own with `output_hidden_states=True`.

Both compute the same rows (the same tokens, packed in the same documents) in turn, in one process, so that a busy machine hurts both; the
medians of their times are compared. The rows differ from one another, as in a run. First the capture is compared with the model's own
forward, document by document. The work counted is that of the matrix products, 2 × weights of the layers up to the last tap × tokens, beside
the rate of one large product in the same run. What the capture leaves out is known beforehand: the share of the multiplications by
weights that lies in the layers behind the last tap and in the head; it should save at least that share of the time, less 10%.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dflash_mp.bench.random_target import SHAPES, random_target, write_target_files
from dflash_mp.bench.timing import matmul_rate, timed
from dflash_mp.config import TargetConfig
from dflash_mp.data.row import TokenRow
from dflash_mp.errors import ConfigError
from dflash_mp.target.capture import Capture
from dflash_mp.target.families import Anatomy
from dflash_mp.target.load import Target

_ROWS = 4
# What a GPU should reach: share of the rate of one large product, and times the plain forward.
_RATE_GOAL, _SPEEDUP_GOAL = 0.60, 1.2


@dataclass(frozen=True)
class CaptureBench:
    """Median seconds per row of `tokens` tokens, rates in operations per second, and shares of the plain forward's work or time."""

    tokens: int
    documents: int
    layers_run: int
    layers: int
    how: str
    plain_seconds: float
    first_seconds: float  # the capture's first row, compilation and recording included
    capture_seconds: float
    skipped_share: float
    operations: float  # of the capture of one row
    matmul_rate: float
    on_gpu: bool

    @property
    def saved_share(self) -> float:
        """Share of the plain forward's time that the capture saves."""
        return 1 - self.capture_seconds / self.plain_seconds

    @property
    def rate(self) -> float:
        return self.operations / self.capture_seconds

    @property
    def ok(self) -> bool:
        if self.on_gpu:
            return (
                self.rate >= _RATE_GOAL * self.matmul_rate
                and self.plain_seconds >= _SPEEDUP_GOAL * self.capture_seconds
            )
        return self.saved_share >= self.skipped_share - 0.10

    def lines(self) -> list[str]:
        plain, capture = self.plain_seconds, self.capture_seconds
        goal = f"{self.skipped_share - 0.10:.1%}"
        if self.on_gpu:
            goal = f"{_RATE_GOAL:.0%} of the product's rate and {_SPEEDUP_GOAL:g}x as fast"
        return [
            f"rows of {self.tokens} tokens in {self.documents} documents; capture: {self.how}",
            f"plain forward, all hidden states  {plain * 1e3:9.1f} ms/row {self.tokens / plain:10,.0f} tokens/s",
            f"truncated capture                 {capture * 1e3:9.1f} ms/row {self.tokens / capture:10,.0f} tokens/s; "
            f"first row {self.first_seconds:.1f} s",
            f"{self.operations / 1e12:.3g} TFLOP/row: {self.rate / 1e12:.2f} TFLOP/s = {self.rate / self.matmul_rate:.0%} "
            f"of a plain matrix product's {self.matmul_rate / 1e12:.2f}",
            f"runs {self.layers_run} of {self.layers} layers and no head: skips {self.skipped_share:.1%} of the work",
            f"saves {self.saved_share:.1%} of the time ({plain / capture:.2f}x as fast); "
            f"goal: at least {goal}: {'met' if self.ok else 'MISSED'}",
        ]


def case_target(case: str, device: str = "auto", dtype: str = "auto") -> Target:
    """A target of a named shape with random weights. Raises `ConfigError` for an unknown one."""
    if case not in SHAPES:
        raise ConfigError(f"there is no case {case!r}", f"one of {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary, case)
        write_target_files(directory, SHAPES[case])
        return random_target(TargetConfig.model_validate({"path": str(directory), "device": device, "dtype": dtype}))


def bench_capture(
    target: Target, tokens: int | None, rounds: int, *, documents: int = 12, compiled: bool | None = None
) -> CaptureBench:
    """Measure `rounds` alternating pairs. `tokens`: None is 4,096 on CUDA, else 512. Raises `TargetError` if the target can't be used."""
    device = target.device
    tokens = tokens or default_tokens(device)
    skipped, operations = skipped_share(target), row_operations(target, tokens)
    capture = Capture(target, keep_target=True, row_tokens=tokens, compiled=compiled)
    rows = [bench_row(tokens, documents, target.info.vocab_size, seed) for seed in range(_ROWS)]
    out = torch.empty(tokens, target.info.feature_width, dtype=target.embedding.dtype, device=device)
    first = timed(lambda: capture.capture(rows[0], out), device)
    capture.self_check(rows[1])
    inputs = [
        [torch.from_numpy(part.astype(np.int64))[None].to(device) for part in (row.input_ids, row.position_ids)]
        for row in rows
    ]

    @torch.inference_mode()
    def plain(number: int) -> None:
        ids, positions = inputs[number]
        target.model(input_ids=ids, position_ids=positions, output_hidden_states=True, use_cache=False)

    plain(0)
    times: dict[str, list[float]] = {"plain": [], "capture": []}
    for turn in range(rounds):
        number = turn % _ROWS
        times["plain"].append(timed(partial(plain, number), device))
        times["capture"].append(timed(partial(capture.capture, rows[number], out), device))
    return CaptureBench(
        tokens=tokens,
        documents=min(documents, tokens),
        layers_run=target.info.layer_ids[-1] + 1,
        layers=target.info.num_layers,
        how=capture.forward.describe(),
        plain_seconds=statistics.median(times["plain"]),
        first_seconds=first,
        capture_seconds=statistics.median(times["capture"]),
        skipped_share=skipped,
        operations=operations,
        matmul_rate=matmul_rate(device, target.embedding.dtype),
        on_gpu=device.type == "cuda",
    )


def default_tokens(device: torch.device) -> int:
    """Tokens of a row worth measuring."""
    return 4096 if device.type == "cuda" else 512


def skipped_share(target: Target) -> float:
    """Share of the weights multiplied per token that lies behind the last tap: later layers and the head."""
    run, layers = _weights(target)
    return 1 - run / (layers + target.head.numel())


def row_operations(target: Target, tokens: int) -> float:
    """Floating-point operations of a row's products with weights. Of a mixture of experts, as if all of them were used."""
    return 2.0 * _weights(target)[0] * tokens


def _weights(target: Target) -> tuple[int, int]:
    """Matrix weights of the layers up to the last tap, and of all layers."""
    anatomy = target.anatomy
    if anatomy is None:
        raise RuntimeError("this target was cut by a capture")
    layers = [_matrix_weights(anatomy, number) for number in range(len(anatomy.layers))]
    return sum(layers[: target.info.layer_ids[-1] + 1]), sum(layers)


def _matrix_weights(anatomy: Anatomy, layer: int) -> int:
    return sum(parameter.numel() for parameter in anatomy.layers[layer].parameters() if parameter.dim() > 1)


def bench_row(tokens: int, documents: int, vocab_size: int, seed: int) -> TokenRow:
    """Random tokens in so many documents of random lengths."""
    documents = min(documents, tokens)
    generator = np.random.default_rng(seed)
    cuts = np.sort(generator.choice(np.arange(1, tokens), documents - 1, replace=False))
    numbers = np.searchsorted(cuts, np.arange(tokens), side="right")
    starts = np.concatenate(([0], cuts))[numbers]
    return TokenRow(
        input_ids=generator.integers(0, vocab_size, tokens, dtype=np.int32),
        position_ids=(np.arange(tokens) - starts).astype(np.int32),
        document_ids=(numbers + 1).astype(np.int32),
        loss_mask=np.ones(tokens, np.uint8),
    )
