"""Guards and queues, with threads that meet at events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dflash_mp.data.row import RowKey
from dflash_mp.errors import ConfigError, DataError, StreamError
from dflash_mp.stream.layout import RowLayout
from dflash_mp.threads import guards
from dflash_mp.threads.guards import GUARDS, LockTimeout, Turn, guard_named
from dflash_mp.threads.queues import RowQueue
from dflash_mp.threads.sources import SyntheticRows, _MadeHere
from dflash_mp.threads.work import SCALES, Work, row_lengths, synthetic_work


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return synthetic_work(SCALES["quick"], tmp_path, drafters=2, devices=("cpu",), steps=3, vary=0.5)


def enters(turn: Turn, tokens: int) -> bool:
    """Whether another thread gets its turn at once; the turn is kept."""
    try:
        turn.enter(tokens)
    except LockTimeout:
        return False
    return True


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "LOCK_SECONDS", 0.05)


def two_turns(name: str) -> tuple[Turn, Turn]:
    turns = GUARDS[name].turns()
    return turns(), turns()


def test_under_no_guard_turns_overlap(impatient: None) -> None:
    a, b = two_turns("none")
    assert enters(a, 8)
    assert enters(b, 8)


def test_the_full_lock_lets_one_in_at_a_time(impatient: None) -> None:
    a, b = two_turns("full-lock")
    for _ in range(3):
        a.enter(8)
        assert not enters(b, 8)
        a.leave(completed=True)
        assert enters(b, 8)
        b.leave(completed=True)


def test_the_first_call_lock_is_over_after_a_first_step_that_succeeds(impatient: None) -> None:
    a, b = two_turns("first-call-lock")
    a.enter(8)
    assert not enters(b, 8)
    a.leave(completed=False)
    a.enter(8)
    assert not enters(b, 8)
    a.leave(completed=True)
    b.enter(8)
    assert enters(a, 9)  # a has had its first step: free, new length or not


def test_the_new_shape_lock_is_shared_for_known_lengths_and_exclusive_for_new_ones(impatient: None) -> None:
    a, b = two_turns("new-shape-lock")
    for turn in (a, b):
        turn.enter(8)
        turn.leave(completed=True)
    assert enters(a, 8)
    assert enters(b, 8)
    b.leave(completed=True)
    assert not enters(b, 9)
    a.leave(completed=True)
    assert enters(b, 9)
    assert not enters(a, 8)
    b.leave(completed=False)
    a.enter(8)
    assert not enters(b, 9)  # it did not complete: still new


def test_leaving_without_having_entered_is_harmless() -> None:
    for name in GUARDS:
        GUARDS[name].turns()().leave(completed=True)


def test_an_unknown_guard_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no guard 'hope'") as raised:
        guard_named("hope")
    assert "full-lock" in raised.value.remedy


def queue_of(work: Work, ahead: int = 2, row_seconds: float = 60.0) -> tuple[RowQueue, Callable[[RowKey], RowLayout]]:
    assert work.plan is not None
    whole, layout_of = RowLayout.of(work.plan), row_lengths(work, work.plan, 0)
    source = _MadeHere(SyntheticRows(work.plan).make, whole)
    queue = RowQueue(source, whole, layout_of, number=0, rows_per_step=1, ahead=ahead, row_seconds=row_seconds)
    return queue, layout_of


def keys(count: int) -> Iterator[RowKey]:
    return (RowKey("train", ordinal) for ordinal in range(count))


def test_lengths_are_a_function_of_drafter_and_row_and_at_least_half(work: Work) -> None:
    assert work.plan is not None
    tokens = work.plan.data.row_tokens
    first, again, other = (row_lengths(work, work.plan, number) for number in (0, 0, 1))
    lengths = [first(key).row_tokens for key in keys(200)]
    assert lengths == [again(key).row_tokens for key in keys(200)]
    assert lengths != [other(key).row_tokens for key in keys(200)]
    assert min(lengths) >= tokens // 2
    assert 0.3 < sum(length == tokens for length in lengths) / 200 < 0.7
    assert len(set(lengths)) > 10


def test_a_queued_row_is_the_beginning_of_the_sources_row(work: Work) -> None:
    queue, layout_of = queue_of(work)
    assert work.plan is not None
    whole = RowLayout.of(work.plan)
    expected = torch.zeros(whole.nbytes, dtype=torch.uint8)
    with queue:
        queue.schedule(keys(8))
        for key in keys(8):
            SyntheticRows(work.plan).make(key, expected)
            row, full, length = queue.take(key).tensors, whole.views(expected), layout_of(key).row_tokens
            assert torch.equal(row.features, full.features[:length])
            assert torch.equal(row.input_ids, full.input_ids[:length])
            assert torch.equal(row.document_ids, full.document_ids[:length])
            queue.commit()


def test_rows_taken_since_the_last_commit_can_be_taken_again(work: Work) -> None:
    queue, _ = queue_of(work, ahead=4)
    with queue:
        queue.schedule(keys(6))
        taken = [queue.take(key).buffer.clone() for key in keys(2)]
        queue.rewind()
        assert all(torch.equal(queue.take(key).buffer, row) for key, row in zip(keys(2), taken, strict=True))
        queue.commit()
        assert queue.take(RowKey("train", 2)).key.ordinal == 2


def test_the_queue_holds_no_more_rows_than_it_has_slots(work: Work) -> None:
    queue, _ = queue_of(work, ahead=2, row_seconds=3.0)
    with queue:
        queue.schedule(keys(50))
        for key in keys(3):
            queue.take(key)
        with pytest.raises(StreamError, match=r"train row 3 did not come in 3 s"):
            queue.take(RowKey("train", 3))
    assert queue.broken


def test_what_fails_in_feeding_is_raised_where_the_row_is_taken(work: Work) -> None:
    def make(key: RowKey, buffer: torch.Tensor) -> None:
        raise DataError(f"{key} is gone")

    assert work.plan is not None
    whole = RowLayout.of(work.plan)
    queue = RowQueue(_MadeHere(make, whole), whole, lambda key: whole, number=0, rows_per_step=1)
    with queue:
        queue.schedule(keys(1))
        with pytest.raises(DataError, match="train row 0 is gone"):
            queue.take(RowKey("train", 0))
    assert queue.broken


def test_the_feeder_thread_ends_with_the_block(work: Work) -> None:
    queue, _ = queue_of(work)
    with queue:
        queue.schedule(keys(1000))
        queue.take(RowKey("train", 0))
    assert not [thread for thread in threading.enumerate() if thread.name == "feeder 0"]


def test_lengths_that_vary_need_whole_micro_batches(tmp_path: Path) -> None:
    work = synthetic_work(SCALES["quick"], tmp_path, drafters=1, devices=("cpu",), steps=1)
    train = work.config.train.model_copy(update={"rows_per_step": 3, "micro_batch_rows": 2})
    with pytest.raises(ConfigError, match="no multiple"):
        Work(**{**vars(work), "config": work.config.model_copy(update={"train": train})})


def test_work_survives_the_way_to_another_process(work: Work) -> None:
    assert Work.from_json(work.to_json()) == work
