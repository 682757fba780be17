from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_mp.config import TrainConfig
from dflash_mp.data.row import RowKey
from dflash_mp.drafter.schedule import held_out_due, learning_rate, row_sequence, rows_of_step


@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 20), st.integers(1, 4))
def test_ranks_share_a_steps_rows_without_gap_or_overlap(step: int, world: int, rows: int, micro: int) -> None:
    shares = [rows_of_step(step, rank, world, rows, micro) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1, "every rank runs the same number of micro-batches"
    assert all(len(batch) == micro for share in shares for batch in share)
    keys = sorted(key for share in shares for batch in share for key in batch if key is not None)
    assert keys == [RowKey("train", step * rows + i) for i in range(rows)]


@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 5))
def test_what_a_rank_announces_is_what_its_steps_take(world: int, rows: int, start: int) -> None:
    train = TrainConfig(steps=6, rows_per_step=rows, held_out_every=4)
    for rank in range(world):
        announced = [key for key in row_sequence(train, start, rank, world, held_out=3) if key.split == "train"]
        batches = (batch for step in range(start, 6) for batch in rows_of_step(step, rank, world, rows, 1))
        assert announced == [key for batch in batches for key in batch if key is not None]


def test_held_out_loss_is_measured_before_the_first_and_after_the_last_step() -> None:
    assert [step for step in range(11) if held_out_due(step, TrainConfig(steps=10, held_out_every=0))] == [0, 10]
    assert [step for step in range(11) if held_out_due(step, TrainConfig(steps=10, held_out_every=4))] == [0, 4, 8, 10]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", {0: 0.5, 1: 1.0, 2: 1.0, 11: 0.55, 19: 0.1 + 0.9 * 0.5 * (1 + -0.9848077530122081)}),
        ("wsd", {0: 0.5, 1: 1.0, 2: 1.0, 15: 1.0, 16: 1.0, 18: 0.55}),
    ],
)
def test_learning_rate_warms_up_and_decays(schedule: str, expected: dict[int, float]) -> None:
    train = TrainConfig(
        steps=20, learning_rate=1.0, warmup_ratio=0.1, schedule=schedule, decay_ratio=0.2, min_learning_rate_ratio=0.1
    )
    for step, rate in expected.items():
        assert learning_rate(step, train) == pytest.approx(rate)
