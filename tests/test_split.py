"""Sharing out GPUs: the slower side sets the pace, and every split trains the same batch."""

from __future__ import annotations

import pytest

from dflash_mp.drafter.schedule import rows_of_step
from dflash_mp.split import Batch, Pace, Split, advice, best_split, splits


def test_the_best_split_has_the_fastest_slower_side() -> None:
    pace, batch = Pace(feeder_rows_per_second=10.0, micro_batch_seconds=0.2), Batch(20, 1)
    by_hand = {
        (n, 8 - n): min(10.0 * n, 20 / (-(-20 // (8 - n)) * 0.2)) for n in range(1, 8)
    }  # a drafter takes 5 rows/s
    best = best_split(pace, 8, batch)
    assert (best.feeders, best.drafters) == max(by_hand, key=by_hand.__getitem__) == (3, 5)
    assert best.rows_per_second == pytest.approx(25.0)
    assert best.who_waits == "feeders"
    assert best.wait_share == pytest.approx(1 - 25 / 30)


@pytest.mark.parametrize(("feeder", "wanted"), [(1000.0, (1, 7)), (0.01, (7, 1))])
def test_a_side_that_is_never_short_gets_one(feeder: float, wanted: tuple[int, int]) -> None:
    best = best_split(Pace(feeder, 0.1), 8, Batch(84, 1))
    assert (best.feeders, best.drafters) == wanted


def test_ranks_that_a_batch_cannot_use_bring_nothing() -> None:
    """Four rows on four ranks are one micro-batch each; a fifth rank would have none, and three must do two."""
    rates = {s.drafters: s.drafters_rows_per_second for s in splits(Pace(5.0, 0.1), 6, Batch(4, 1))}
    assert rates == pytest.approx({5: 40.0, 4: 40.0, 3: 20.0, 2: 20.0, 1: 10.0})


def test_what_a_step_costs_besides_is_paid_by_every_rank() -> None:
    with_optimizer = {s.drafters: s.drafters_rows_per_second for s in splits(Pace(1, 0.1, 0.4), 5, Batch(8, 1))}
    assert with_optimizer == pytest.approx({4: 8 / 0.6, 3: 8 / 0.7, 2: 8 / 0.8, 1: 8 / 1.2})


@pytest.mark.parametrize("micro_batch_rows", [1, 2, 3])
def test_every_split_trains_the_rows_of_the_step_once_in_as_many_micro_batches_as_reckoned(
    micro_batch_rows: int,
) -> None:
    for drafters in range(1, 8):
        ranks = [rows_of_step(3, rank, drafters, 20, micro_batch_rows) for rank in range(drafters)]
        assert {len(batches) for batches in ranks} == {Batch(20, micro_batch_rows).micro_batches(drafters)}
        found = sorted(key.ordinal for batches in ranks for batch in batches for key in batch if key is not None)
        assert found == list(range(60, 80))


def test_advice_names_who_waits_and_the_split_that_would_balance() -> None:
    text = advice(Split(2, 6, 12.0, 30.0), Batch(24, 1))
    assert "2 feeders could make 12 rows/s, 6 drafters could take 30: the drafters wait 60% of their time" in text
    assert "4:4 (feeders:drafters) would balance, with 20 rows/s" in text
    assert "no other split of 3 would be faster" in advice(Split(1, 2, 10.0, 10.0), Batch(24, 1))


def test_one_gpu_cannot_be_shared_out() -> None:
    with pytest.raises(ValueError, match="1 GPUs"):
        best_split(Pace(1, 1), 1, Batch(1, 1))
