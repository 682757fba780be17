from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from synthetic_rows import SyntheticRows, make_config, make_trainer

from dflash_mp.data.row import RowKey
from dflash_mp.drafter import checkpoint, state
from dflash_mp.drafter.metrics import _SCALARS
from dflash_mp.drafter.report import Reporter
from dflash_mp.drafter.rows import TakenRow
from dflash_mp.drafter.trainer import Trainer, train, train_step
from dflash_mp.drafter.world import World
from dflash_mp.errors import CheckpointError, DflashError
from dflash_mp.stream.client_patience import StoppedWaiting


def run_to_end(trainer: Trainer, source: SyntheticRows, stop_after: int | None = None) -> bool:
    with Reporter(trainer.config.run_dir, enabled=True) as report:
        return train(
            trainer, source, report, state.save, lambda: stop_after is not None and trainer.step + 1 >= stop_after
        )


def tensors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.optimizer.tensors().items()}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    differing = [name for name in a if not torch.equal(a[name], b[name])]
    assert not differing


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_stopping_and_resuming_equals_not_stopping_bitwise(tmp_path: Path, precision: str) -> None:
    whole, rows = make_config(tmp_path / "whole", precision=precision), SyntheticRows()
    uninterrupted = make_trainer(whole, rows)
    assert run_to_end(uninterrupted, rows)

    parts = make_config(tmp_path / "parts", precision=precision)
    for stop_after in (2, 5, None):
        rows = SyntheticRows()
        trainer = make_trainer(parts, rows, checkpoint.find(parts.run_dir))
        assert run_to_end(trainer, rows, stop_after) == (stop_after is None)
        if stop_after is not None:
            assert trainer.step == stop_after
    assert_same_bits(tensors_of(uninterrupted), tensors_of(trainer))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, dict(uninterrupted.model.named_parameters())[name])


class Withheld(SyntheticRows):
    """Rows of which one does not come before the process is asked to stop."""

    def __init__(self, missing: RowKey) -> None:
        super().__init__()
        self._missing = missing

    def take(self, key: RowKey) -> TakenRow:
        if key == self._missing:
            raise StoppedWaiting("stopped while waiting for a row")
        return super().take(key)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("missing", "done"),
    [(RowKey("train", 14), 4), (RowKey("train", 13), 4), (RowKey("train", 12), 4), (RowKey("train", 1), 0)],
)
def test_a_step_that_lacks_a_row_when_a_stop_is_asked_for_is_dropped_and_the_last_one_saved(
    tmp_path: Path, missing: RowKey, done: int, ahead: bool
) -> None:
    whole, rows = make_config(tmp_path / "whole", log_every=1, micro_batch_rows=2), SyntheticRows()
    uninterrupted = make_trainer(whole, rows)
    assert run_to_end(uninterrupted, rows)

    parts, rows = make_config(tmp_path / "parts", log_every=1, micro_batch_rows=2), Withheld(missing)
    assert not run_to_end(make_trainer(parts, rows, ahead=ahead), rows)
    assert rows.held == 0
    assert checkpoint.steps_of(parts.run_dir) == ([done] if done else [])
    lines = [json.loads(line) for line in (parts.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max((line["step"] for line in lines if line["kind"] == "train"), default=0) == done

    rows = SyntheticRows()
    trainer = make_trainer(parts, rows, checkpoint.find(parts.run_dir))
    assert trainer.step == done
    assert run_to_end(trainer, rows)
    assert_same_bits(tensors_of(uninterrupted), tensors_of(trainer))


def test_a_stop_cuts_a_held_out_measurement_short_and_it_is_not_reported(tmp_path: Path) -> None:
    config, rows = make_config(tmp_path, held_out_rows=4, held_out_every=2), SyntheticRows()
    trainer = make_trainer(config, rows)
    asked = False

    def stop_requested() -> bool:
        """Asked for after step 2, when that step has long been agreed on."""
        nonlocal asked
        asked = asked or trainer.step == 2
        return asked

    with Reporter(config.run_dir, enabled=True) as report:
        assert not train(trainer, rows, report, state.save, stop_requested)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "held_out"] == [0]
    assert checkpoint.steps_of(config.run_dir) == [2]


def test_training_lowers_the_loss_and_lifts_tau_on_held_out_rows(tmp_path: Path) -> None:
    config, rows = make_config(tmp_path, steps=80, held_out_rows=4, anchors_per_row=24), SyntheticRows()
    run_to_end(make_trainer(config, rows), rows)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    before, after = [line for line in lines if line["kind"] == "held_out"]
    assert before["step"] == 0
    assert after["step"] == 80
    assert after["loss"] < 0.5 * before["loss"]
    assert after["tau"] > before["tau"] + 1.0


@pytest.mark.parametrize("micro_batch_rows", [2, 3])
def test_the_split_into_micro_batches_changes_results_by_rounding_only(tmp_path: Path, micro_batch_rows: int) -> None:
    rows = SyntheticRows()
    one = make_trainer(make_config(tmp_path / "one"), rows)
    run_to_end(one, rows)
    rows = SyntheticRows()
    several = make_trainer(make_config(tmp_path / "several", micro_batch_rows=micro_batch_rows), rows)
    run_to_end(several, rows)
    for name, parameter in one.model.named_parameters():
        torch.testing.assert_close(parameter, several.model.get_parameter(name), rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_changes_no_bit(tmp_path: Path) -> None:
    results = []
    for checkpointing in (False, True):
        rows = SyntheticRows()
        trainer = make_trainer(make_config(tmp_path / str(checkpointing), gradient_checkpointing=checkpointing), rows)
        run_to_end(trainer, rows)
        results.append(tensors_of(trainer))
    assert_same_bits(*results)


def test_a_row_without_anchors_takes_part_and_changes_nothing(tmp_path: Path) -> None:
    """Rows 0 … 2 are the first step; without anchors in row 1 its update equals that of a step without row 1."""
    with_silent_row, without = [], []
    for rows_per_step, silent, found in ((3, frozenset({2}), with_silent_row), (2, frozenset(), without)):
        rows = SyntheticRows(silent)
        trainer = make_trainer(make_config(tmp_path / str(rows_per_step), rows_per_step=rows_per_step), rows)
        rows.schedule(iter_of_first_step(rows_per_step))
        figures, _ = train_step(trainer)
        found.append((figures.loss, tensors_of(trainer)))
    assert with_silent_row[0][0] == without[0][0]
    assert_same_bits(with_silent_row[0][1], without[0][1])


def iter_of_first_step(rows: int):  # noqa: ANN201
    from dflash_mp.data.row import RowKey

    return iter([RowKey("train", i) for i in range(rows)])


def test_a_step_of_rows_without_any_anchor_leaves_the_weights_and_stays_finite(tmp_path: Path) -> None:
    rows = SyntheticRows(frozenset(range(3)))
    trainer = make_trainer(make_config(tmp_path), rows)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    rows.schedule(iter_of_first_step(3))
    figures, norm = train_step(trainer)
    assert (figures.loss, figures.tau, norm) == (0.0, 0.0, 0.0)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_gradient_that_is_not_finite_stops_the_run_and_names_the_tensor(tmp_path: Path) -> None:
    rows = SyntheticRows()
    trainer = make_trainer(make_config(tmp_path), rows)
    with torch.no_grad():
        trainer.model.norm.weight[0] = float("inf")
    rows.schedule(iter_of_first_step(3))
    with pytest.raises(DflashError, match=r"gradient of \S+ is not finite"):
        train_step(trainer)
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows_per_step": 4}, "rows_per_step 3, not 4"),
        ({"steps": 1}, "beyond train.steps 1"),
    ],
)
def test_resuming_under_another_configuration_is_refused(tmp_path: Path, change: dict[str, int], message: str) -> None:
    config, rows = make_config(tmp_path, steps=2), SyntheticRows()
    run_to_end(make_trainer(config, rows), rows)
    with pytest.raises(CheckpointError, match=message):
        make_trainer(make_config(tmp_path, **{"steps": 2, **change}), SyntheticRows(), checkpoint.find(tmp_path))


def test_resuming_with_options_that_lead_elsewhere_says_which(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun = {"objective": "decay", "schedule": "cosine"}
    config, rows = make_config(tmp_path, steps=2, **begun), SyntheticRows()
    run_to_end(make_trainer(config, rows), rows)
    found = checkpoint.find(tmp_path)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make_trainer(make_config(tmp_path, steps=2, log_every=1, decay_ratio=0.5, **begun), SyntheticRows(), found)
        assert not caplog.records, "neither log lines nor another schedule's option change what is learnt"
        make_trainer(make_config(tmp_path, steps=9, dpace_alpha=0.4, loss_gamma=2.0), SyntheticRows(), found)
    assert [record.getMessage() for record in caplog.records] == [
        f'goes on from {found} with other options: train.steps 9, not 2; train.objective "dpace", not "decay"; '
        'train.dpace_alpha 0.4, not 0.5; train.schedule "wsd", not "cosine"'
    ]


def test_more_anchors_than_a_row_has_tokens_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = SyntheticRows()
    tokens = make_trainer(make_config(tmp_path, steps=1), rows).plan.data.row_tokens
    for anchors, warned in ((tokens - 1, False), (tokens, True)):
        caplog.clear()
        make_trainer(make_config(tmp_path, steps=1, anchors_per_row=anchors), rows)
        said = f"train.anchors_per_row is {anchors}, but a row of {tokens} tokens has {tokens - 1} anchors at most"
        assert (said in caplog.text) is warned


def test_resuming_on_another_stream_spells_out_the_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    import synthetic_rows

    config, rows = make_config(tmp_path, steps=2), SyntheticRows()
    run_to_end(make_trainer(config, rows), rows)
    other = dataclasses.replace(
        synthetic_rows.PLAN, data=dataclasses.replace(synthetic_rows.PLAN.data, dataset="other")
    )
    monkeypatch.setattr(synthetic_rows, "PLAN", other)
    with pytest.raises(CheckpointError, match=r"data.dataset: 'other' here, 'data' there"):
        make_trainer(config, SyntheticRows(), checkpoint.find(tmp_path))


@pytest.mark.parametrize("ahead", [False, True])
def test_every_row_of_the_run_is_taken_once_and_in_order(tmp_path: Path, ahead: bool) -> None:
    config, rows = make_config(tmp_path, steps=4, held_out_rows=2, held_out_every=2), SyntheticRows()
    run_to_end(make_trainer(config, rows, ahead=ahead), rows)
    assert rows.held == 0
    assert [key.ordinal for key in rows.taken if key.split == "train"] == list(range(12))
    assert len([key for key in rows.taken if key.split == "held_out"]) == 2 * 3


def test_rows_loaded_ahead_change_no_bit_and_are_taken_before_the_step_is_over(tmp_path: Path) -> None:
    trainers, taken = [], []
    for ahead in (False, True):
        config = make_config(tmp_path / str(ahead), steps=5, micro_batch_rows=2, held_out_rows=2, held_out_every=3)
        rows = SyntheticRows()
        trainers.append(make_trainer(config, rows, ahead=ahead))
        run_to_end(trainers[-1], rows)
        trainer = make_trainer(config, rows, ahead=ahead)
        rows.schedule(iter(RowKey("train", ordinal) for ordinal in range(9)))
        train_step(trainer)
        taken.append(rows.taken[-1])
        trainer.loader.drop_ahead()
        assert rows.held == 0
    assert_same_bits(*map(tensors_of, trainers))
    assert taken == [RowKey("train", 2), RowKey("train", 4)]


def test_what_was_loaded_ahead_is_for_the_load_of_the_same_rows_only(tmp_path: Path) -> None:
    rows = SyntheticRows()
    loader = make_trainer(make_config(tmp_path), rows, ahead=True).loader
    rows.schedule(iter(RowKey("train", ordinal) for ordinal in range(2)))
    loader.load_ahead([RowKey("train", 0)])
    with pytest.raises(RuntimeError, match="loaded ahead"):
        loader.load([RowKey("train", 1)])


class AnotherIsAsked(World):
    """Beside this rank there is one that is asked to stop in its third step."""

    steps = 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        if len(values) > 1:  # not a barrier's
            AnotherIsAsked.steps += 1
            values[_SCALARS.index("stop")] += AnotherIsAsked.steps == 3
        return values


def test_what_was_loaded_ahead_is_given_back_when_another_rank_was_asked_to_stop(tmp_path: Path) -> None:
    config, rows = make_config(tmp_path, held_out_rows=0), SyntheticRows()
    trainer = make_trainer(config, rows, ahead=True)
    trainer.world = AnotherIsAsked(0, 1, 0, 1, torch.device("cpu"))
    assert not run_to_end(trainer, rows)
    assert trainer.step == 3
    assert rows.taken[-1] == RowKey("train", 9)
    assert rows.held == 0
