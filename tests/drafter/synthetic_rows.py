"""A run without a target: rows made from their key, for tests of the trainer alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_mp.config import RunConfig
from dflash_mp.data.row import RowKey
from dflash_mp.drafter import state
from dflash_mp.drafter.batch import BatchLoader
from dflash_mp.drafter.trainer import Trainer
from dflash_mp.drafter.world import World
from dflash_mp.stream.layout import RowLayout, RowTensors
from dflash_mp.stream.plan import DataPlan, StreamPlan, TargetInfo

VOCAB, HIDDEN, TOKENS = 20, 32, 48
PLAN = StreamPlan(
    DataPlan("data", 0, TOKENS, 64, 8, "tokenizer", "template", "default"),
    TargetInfo(
        name="synthetic",
        weights="none",
        num_layers=6,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        layer_ids=(1, 3),
        dtype="float32",
        mask_token_id=VOCAB - 1,
        bos_token_id=None,
        eos_token_ids=(VOCAB - 2,),
        pad_token_id=None,
        tied_head=True,
        intermediate_size=64,
        heads=4,
        kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_positions=TOKENS,
    ),
)
LAYOUT = RowLayout.of(PLAN)
EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7)) * 0.5


@dataclass
class SyntheticRow:
    buffer: torch.Tensor
    source: SyntheticRows | None = None

    @property
    def tensors(self) -> RowTensors:
        return LAYOUT.views(self.buffer)

    def release(self) -> None:
        self.buffer.fill_(0xFF)  # whoever reads a released row reads not-a-number
        if self.source is not None:
            self.source.held -= 1


class SyntheticRows:
    """Two documents that count upwards from a random token: what follows can be learnt from the features."""

    def __init__(self, unsupervised: frozenset[int] = frozenset()) -> None:
        self.taken: list[RowKey] = []
        self.held = 0  # rows that were not released yet
        self._unsupervised = unsupervised

    def schedule(self, keys: Iterator[RowKey]) -> None:
        self._expected = keys

    def take(self, key: RowKey) -> SyntheticRow:
        assert next(self._expected) == key, "rows are taken in the order that was announced"
        self.taken.append(key)
        self.held += 1
        row = make_row(key, supervised=key.split == "held_out" or key.ordinal not in self._unsupervised)
        row.source = self
        return row


def make_row(key: RowKey, supervised: bool = True) -> SyntheticRow:
    random = torch.Generator().manual_seed(key.ordinal * 2 + (key.split == "held_out"))
    row = SyntheticRow(torch.zeros(LAYOUT.nbytes, dtype=torch.uint8))
    views, half = row.tensors, TOKENS // 2
    for number, start in enumerate((0, half), start=1):
        first = int(torch.randint(0, VOCAB - 2, (), generator=random))
        views.input_ids[start : start + half] = (first + torch.arange(half)) % (VOCAB - 2)
        views.position_ids[start : start + half] = torch.arange(half)
        views.document_ids[start : start + half] = number
    views.loss_mask.fill_(int(supervised))
    known = EMBEDDING[views.input_ids.long()]
    views.features.copy_(torch.cat((known, known.roll(1, 0)), 1))
    return row


def make_config(run_dir: Path, **train: object) -> RunConfig:
    options = {
        "steps": 6,
        "rows_per_step": 3,
        "anchors_per_row": 8,
        "learning_rate": 5e-3,
        "device": "cpu",
        "threads": 1,
    }
    return RunConfig.model_validate(
        {
            "run_dir": str(run_dir),
            "target": {"path": "none"},
            "data": {"path": "none", "row_tokens": TOKENS},
            "drafter": {"layers": 2, "block_size": 4},
            "train": {**options, **train},
        }
    )


def make_trainer(
    config: RunConfig, source: SyntheticRows, resume: Path | None = None, *, ahead: bool = False
) -> Trainer:
    """`ahead`: with rows loaded as on CUDA, while the step before is not yet over."""
    world = World(0, 1, 0, 1, torch.device("cpu"))
    trainer = state.build_trainer(config, PLAN, EMBEDDING, EMBEDDING, source, world, resume)
    if ahead:
        trainer.loader = BatchLoader(
            source,
            LAYOUT,
            trainer.shape,
            seed=config.seed,
            anchors_per_row=config.train.anchors_per_row,
            device=world.device,
            ahead=True,
        )
    return trainer
