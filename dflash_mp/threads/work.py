"""What a comparison trains: one configuration, its rows and its time, the same for threads and for processes.

Drafter `i` trains with `config.seed + i` (initial weights, anchors) on the rows of the run, in the run's order. With `vary` > 0 that share of
its micro-batches is cut to a length keyed by the drafter's seed and the row, so that new shapes, and with them compilations, keep
coming at the same steps whoever runs it. `Work` goes to other processes as JSON.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from dflash_mp.config import RunConfig
from dflash_mp.data.row import RowKey
from dflash_mp.errors import ConfigError
from dflash_mp.stream.codec import plain, reader
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.plan import DataPlan, StreamPlan, TargetInfo

RowsFrom = Literal["synthetic", "stream", "colocated"]
_SCALE = float(1 << 64)


@dataclass(frozen=True)
class Work:
    """`plan` is that of the synthetic rows; None when a target makes them. `seconds` None: to the last step of the configuration."""

    config: RunConfig
    rows: RowsFrom
    plan: StreamPlan | None
    drafters: int
    devices: tuple[str, ...]  # one per drafter
    backend: str  # what compiles the layers
    vary: float
    seconds: float | None

    def __post_init__(self) -> None:
        train = self.config.train
        if self.vary > 0 and train.rows_per_step % train.micro_batch_rows:
            raise ConfigError(
                f"rows of varying length need whole micro-batches, but train.rows_per_step {train.rows_per_step} is no multiple "
                f"of train.micro_batch_rows {train.micro_batch_rows}",
                "change one of them, or set --vary-lengths 0",
            )

    def to_json(self) -> str:
        """For `from_json`, in this or another process."""
        tree = {field: getattr(self, field) for field in ("rows", "drafters", "devices", "backend", "vary", "seconds")}
        tree |= {"config": self.config.model_dump(mode="json"), "plan": None if self.plan is None else plain(self.plan)}
        return json.dumps(tree, indent=1)

    @staticmethod
    def from_json(text: str) -> Work:
        """Read what `to_json` wrote."""
        tree: dict[str, Any] = json.loads(text)
        plan = None if tree["plan"] is None else reader(StreamPlan)(_tuples(tree["plan"]), "plan")
        config = RunConfig.model_validate(tree["config"])
        return Work(**{**tree, "config": config, "plan": plan, "devices": tuple(tree["devices"])})


def row_lengths(work: Work, plan: StreamPlan, number: int) -> Callable[[RowKey], RowLayout]:
    """The layout of each row of drafter `number`: the whole row, or cut to at least half of it."""
    tokens, group = plan.data.row_tokens, work.config.train.micro_batch_rows
    layouts = {tokens: RowLayout.of(plan)}

    def layout_of(key: RowKey) -> RowLayout:
        length, seed = tokens, work.config.seed + number
        digest = xxhash.xxh3_64_intdigest(struct.pack("<QQB", key.ordinal // group, seed, key.split == "held_out"))
        if digest / _SCALE < work.vary:
            length = tokens // 2 + xxhash.xxh3_64_intdigest(struct.pack("<Q", digest)) % (tokens - tokens // 2)
        if length not in layouts:
            layouts[length] = RowLayout.of(replace(plan, data=replace(plan.data, row_tokens=length)))
        return layouts[length]

    return layout_of


@dataclass(frozen=True)
class Scale:
    """A size to compare at, with synthetic rows."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    layers: int
    taps: int
    block_size: int
    row_tokens: int
    anchors: int
    rows_per_step: int
    backend: str  # inductor needs a C compiler on a CPU; aot_eager has Dynamo, AOTAutograd and the joint trace, and no kernels
    vary: float
    seconds: float


SCALES = {
    "quick": Scale(64, 128, 2, 1, 32, 256, 2, 2, 4, 96, 8, 1, "aot_eager", 0.05, 12.0),
    "gpu": Scale(1024, 3072, 16, 8, 64, 32_000, 5, 3, 16, 2048, 128, 1, "inductor", 0.1, 30.0),
}


def synthetic_work(
    scale: Scale,
    run_dir: Path,
    *,
    drafters: int,
    devices: tuple[str, ...],
    steps: int = 100_000,
    seconds: float | None = None,
    vary: float | None = None,
    threads: int = 1,
    seed: int = 0,
) -> Work:
    """Work at `scale`; `seconds` and `vary` replace the scale's own."""
    device = devices[0].partition(":")[0]
    config = RunConfig.model_validate(
        {
            "run_dir": str(run_dir),
            "seed": seed,
            "target": {"path": "synthetic"},
            "data": {"path": "synthetic", "row_tokens": scale.row_tokens},
            "drafter": {"layers": scale.layers, "block_size": scale.block_size},
            "train": {
                "steps": steps,
                "rows_per_step": scale.rows_per_step,
                "anchors_per_row": scale.anchors,
                "learning_rate": 1e-3,
                "warmup_ratio": 0.0,
                "gradient_checkpointing": True,
                "device": device,
                "threads": threads,
                "held_out_rows": 0,
            },
        }
    )
    return Work(
        config=config,
        rows="synthetic",
        plan=synthetic_plan(scale, seed, "bfloat16" if device == "cuda" else "float32"),
        drafters=drafters,
        devices=tuple(devices[i % len(devices)] for i in range(drafters)),
        backend=scale.backend,
        vary=scale.vary if vary is None else vary,
        seconds=scale.seconds if seconds is None and steps == 100_000 else seconds,
    )


def synthetic_plan(scale: Scale, seed: int, dtype: str, row_tokens: int | None = None) -> StreamPlan:
    """A plan without a target behind it; `row_tokens` replaces the scale's."""
    tokens = row_tokens or scale.row_tokens
    data = DataPlan("synthetic", seed, tokens, 1 << 20, 0, "synthetic", "synthetic", "default")
    target = TargetInfo(
        name="synthetic",
        weights="synthetic",
        num_layers=scale.taps + 2,
        hidden_size=scale.hidden_size,
        vocab_size=scale.vocab_size,
        layer_ids=tuple(range(1, scale.taps + 1)),
        dtype=dtype,
        mask_token_id=scale.vocab_size - 1,
        bos_token_id=None,
        eos_token_ids=(scale.vocab_size - 2,),
        pad_token_id=None,
        tied_head=True,
        intermediate_size=scale.intermediate_size,
        heads=scale.heads,
        kv_heads=scale.kv_heads,
        head_dim=scale.head_dim,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_positions=tokens,
    )
    return StreamPlan(data, target)


def _tuples(tree: Any) -> Any:
    if isinstance(tree, list):
        return tuple(_tuples(item) for item in tree)
    return {key: _tuples(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
