"""Every objective trains: on rows without a target, and (distillation) on a tiny target's own distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_rows import PLAN, SyntheticRows, make_config, make_trainer
from tiny_run import make_tiny_run

from dflash_mp.config import RunConfig
from dflash_mp.config_file import load_config
from dflash_mp.data.row import RowKey
from dflash_mp.data.store import PreparedDataset
from dflash_mp.drafter import schedule, state
from dflash_mp.drafter.trainer import Trainer, train_step
from dflash_mp.drafter.world import World
from dflash_mp.errors import ConfigError
from dflash_mp.stream.codec import plain
from dflash_mp.stream.layout import RowLayout, RowTensors
from dflash_mp.target.capture import Capture
from dflash_mp.target.feed import make_plan, row_maker
from dflash_mp.target.load import load_target


def announce(trainer: Trainer, source: Any) -> None:
    source.schedule(schedule.row_sequence(trainer.config.train, 0, 0, 1, 0))


@pytest.mark.parametrize("objective", ["decay", "dpace"])
def test_a_drafter_begins_to_learn_from_rows(tmp_path: Path, objective: str) -> None:
    rows = SyntheticRows()
    options = {"objective": objective, "steps": 40, "learning_rate": 1e-2, "held_out_every": 0, "held_out_rows": 0}
    trainer = make_trainer(make_config(tmp_path, **options), rows)
    announce(trainer, rows)
    accuracies = [train_step(trainer)[0].accuracy for _ in range(40)]
    assert sum(accuracies[-5:]) / 5 > 0.2, "guessing gives 1 of 18"


def test_distillation_without_the_targets_last_hidden_state_is_refused(tmp_path: Path) -> None:
    rows = SyntheticRows()
    trainer = make_trainer(make_config(tmp_path, objective="distill"), rows)
    announce(trainer, rows)
    with pytest.raises(ConfigError, match="last hidden state"):
        train_step(trainer)


def test_a_stream_without_the_last_hidden_state_is_what_it_was() -> None:
    """Its plan and its rows are those of versions that didn't know it."""
    more = replace(PLAN, target=replace(PLAN.target, last_hidden=True))
    assert "last_hidden" not in plain(PLAN)["target"]
    assert plain(more)["target"]["last_hidden"] is True
    assert more.fingerprint() != PLAN.fingerprint()
    before, after = RowLayout.of(PLAN), RowLayout.of(more)
    assert after.parts[:5] == before.parts
    assert after.nbytes - before.nbytes == PLAN.data.row_tokens * PLAN.target.hidden_size * 4
    assert before.views(torch.zeros(before.nbytes, dtype=torch.uint8)).last_hidden is None


class _Row:
    def __init__(self, layout: RowLayout) -> None:
        self.buffer = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8)
        self.tensors: RowTensors = layout.views(self.buffer)

    def release(self) -> None:
        self.buffer.fill_(0xFF)


class _TargetRows:
    """The target in this process."""

    def __init__(self, config: RunConfig) -> None:
        dataset, self.target = PreparedDataset.open(config.data.path), load_target(config.target)
        self.plan = make_plan(config, dataset, self.target)
        capture = Capture(self.target, last_hidden=self.plan.target.last_hidden, keep_target=True)
        capture.self_check(dataset.row("train", 0))
        self._make, self._layout = row_maker(dataset, capture, self.plan), RowLayout.of(self.plan)

    def schedule(self, keys: Iterator[RowKey]) -> None:
        pass

    def take(self, key: RowKey) -> _Row:
        row = _Row(self._layout)
        self._make(key, row.buffer)
        return row


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    options = ["train.objective=distill", "train.steps=12", "train.learning_rate=3e-3", "train.anchors_per_row=32"]
    return load_config(make_tiny_run(tmp_path_factory.mktemp("distill")), options).config


@pytest.fixture(scope="module")
def rows(config: RunConfig) -> _TargetRows:
    return _TargetRows(config)


def test_rows_carry_the_state_that_the_targets_head_turns_into_its_logits(rows: _TargetRows) -> None:
    row = rows.take(RowKey("train", 0)).tensors
    assert row.last_hidden is not None
    first = row.document_ids == 1
    own = rows.target.model(row.input_ids[first].long()[None], use_cache=False).logits[0]
    torch.testing.assert_close(row.last_hidden[first] @ rows.target.head.t(), own, atol=1e-4, rtol=1e-4)


def test_distillation_brings_the_drafter_nearer_to_the_target(config: RunConfig, rows: _TargetRows) -> None:
    world = World(0, 1, 0, 1, torch.device("cpu"))
    trainer = state.build_trainer(config, rows.plan, rows.target.embedding, rows.target.head, rows, world, None)
    divergences = [train_step(trainer)[0].loss for _ in range(12)]
    assert min(divergences) > 0
    assert divergences[-1] < 0.8 * divergences[0]
