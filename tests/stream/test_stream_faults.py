"""What dies, stalls, lies or belongs elsewhere costs a bounded time and is named."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from drafter_process import start_drafter
from feeder_process import Behaviour, FeederProcess, feeders, until
from stream_client import PATIENT, client_of, keys, take_all
from test_stream import ipc

from dflash_mp.bench.synthetic import synthetic_expectations, synthetic_plan
from dflash_mp.data.row import RowKey
from dflash_mp.errors import StreamError
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.client_link import Link


def test_a_killed_feeders_rows_come_from_the_other(tmp_path: Path) -> None:
    with (
        feeders(
            FeederProcess(ipc(tmp_path, "a"), behaviour=Behaviour(seconds_per_row=0.02, stuck_after=10)),
            FeederProcess(ipc(tmp_path, "b"), behaviour=Behaviour(seconds_per_row=0.02)),
        ) as (first, second),
        client_of([first.endpoint, second.endpoint], rows=8) as client,
    ):
        client.connect()
        until(lambda: len(client._io.live()) == 2)
        client.schedule(iter(keys(0, 40)))
        for key in take_all(client, keys(0, 40)):
            if key.ordinal >= 10 and client._io.links[0].asked:  # for what it won't have sent when it dies
                first.kill()
        assert client.stats.rows == 40
        assert client.stats.reasked >= 1
        assert client.stats.rows_by_feeder[second.endpoint] > client.stats.rows_by_feeder[first.endpoint]


def test_with_no_feeder_left_the_wait_is_bounded_and_names_what_is_missing(tmp_path: Path) -> None:
    with feeders(FeederProcess(ipc(tmp_path, "a")), FeederProcess(ipc(tmp_path, "b"))) as started:
        with client_of([f.endpoint for f in started], rank=1, world=2, row_seconds=1.0) as client:
            client.connect()
            client.schedule(iter(keys(0, 9)))
            first, *rest = take_all(client, keys(0, 1))
            assert (first.ordinal, rest) == (0, [])
            for feeder in started:
                feeder.kill()
            start = time.monotonic()
            with pytest.raises(StreamError) as caught:
                list(take_all(client, keys(1, 9)))
            assert 0.9 < time.monotonic() - start < 20
        text = str(caught.value)
        assert "rank 1: train row " in text
        assert "did not come within 1 s: no feeder is left" in text
        assert all(f"{feeder.endpoint}: lost" in text for feeder in started)


def test_a_feeder_that_starts_again_at_its_address_is_used_again(tmp_path: Path) -> None:
    slow = Behaviour(seconds_per_row=0.02)
    with (
        feeders(FeederProcess(ipc(tmp_path), behaviour=slow)) as started,
        client_of([ipc(tmp_path)], rows=3) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 40)))
        for key in take_all(client, keys(0, 40)):
            if key.ordinal in (9, 19):
                started[-1].kill()
                started.append(FeederProcess(ipc(tmp_path), behaviour=slow))
            if key.ordinal == 29:
                assert started[-1].stop() == 0
                started.append(FeederProcess(ipc(tmp_path), behaviour=slow))
        assert client.stats.rows == 40
        started[-1].close()


def test_a_feeder_that_answers_nothing_is_taken_for_dead(tmp_path: Path) -> None:
    with (
        feeders(FeederProcess(ipc(tmp_path, "a")), FeederProcess(ipc(tmp_path, "b"))) as (first, second),
        client_of([first.endpoint, second.endpoint], rows=6, silent_seconds=0.5) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 30)))
        for key in take_all(client, keys(0, 30)):
            if key.ordinal == 5:
                first.pause()
        share = client.stats.rows_by_feeder
        assert share[second.endpoint] > share[first.endpoint]
        first.resume()
        until(lambda: len(first.look()[0].drafters) == 1)  # it is back
        client.schedule(iter(keys(30, 50)))
        assert len(list(take_all(client, keys(30, 50)))) == 20


def test_a_feeder_stuck_in_a_row_is_told_from_a_dead_one(tmp_path: Path) -> None:
    with (
        feeders(FeederProcess(ipc(tmp_path), behaviour=Behaviour(stuck_at=2, silent_seconds=PATIENT))) as (feeder,),
        client_of([feeder.endpoint], row_seconds=4.0, silent_seconds=PATIENT) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 5)))
        with pytest.raises(StreamError) as caught:
            list(take_all(client, keys(0, 5)))
        assert "rank 0: train row 2 did not come within 4 s" in str(caught.value)
        assert f"{feeder.endpoint} is connected and busy with train row 2 for " in str(caught.value)


def test_an_error_of_the_target_reaches_who_asked(tmp_path: Path) -> None:
    with (
        feeders(FeederProcess(ipc(tmp_path), behaviour=Behaviour(fails={3: False}))) as (feeder,),
        client_of([feeder.endpoint]) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 9)))
        with pytest.raises(StreamError, match="could not give train row 3: row is broken"):
            list(take_all(client, keys(0, 9)))


def test_a_passing_error_is_tried_elsewhere_but_not_for_ever(tmp_path: Path) -> None:
    troubled = Behaviour(fails={n: True for n in range(40)})
    with feeders(FeederProcess(ipc(tmp_path, "a"), behaviour=troubled), FeederProcess(ipc(tmp_path, "b"))) as both:
        with client_of([f.endpoint for f in both]) as client:
            client.connect()
            client.schedule(iter(keys(0, 20)))
            assert len(list(take_all(client, keys(0, 20)))) == 20
        with client_of([both[0].endpoint]) as client:
            client.connect()
            client.schedule(iter(keys(0, 20)))
            with pytest.raises(StreamError, match=r"RuntimeError: a passing trouble \(3 attempts\)"):
                client.take(RowKey("train", 0))


def test_a_row_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,), client_of([feeder.endpoint]) as client:
        client.connect()
        client.schedule(iter([RowKey("held_out", 8)]))
        with pytest.raises(StreamError, match="held_out row 8: there are 8 held-out rows"):
            client.take(RowKey("held_out", 8))


def test_a_corrupted_row_is_asked_again_and_counted(tmp_path: Path) -> None:
    with (
        feeders(FeederProcess(ipc(tmp_path), behaviour=Behaviour(corrupts=2, silent_seconds=PATIENT))) as (feeder,),
        client_of([feeder.endpoint], silent_seconds=PATIENT) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 20)))
        assert len(list(take_all(client, keys(0, 20)))) == 20
        assert client.stats.checksum_errors == 2
        assert client.stats.reasked == 2
    with (
        feeders(FeederProcess(ipc(tmp_path), behaviour=Behaviour(corrupts=100))) as (feeder,),
        client_of([feeder.endpoint]) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 20)))
        with pytest.raises(StreamError, match=r"train row 0: it arrived corrupted \(3 attempts\)"):
            client.take(RowKey("train", 0))


def test_a_drafter_of_another_run_is_refused_in_words(tmp_path: Path) -> None:
    with feeders(FeederProcess(ipc(tmp_path), behaviour=Behaviour(run="theirs"))) as (feeder,):
        with client_of([feeder.endpoint]) as client, pytest.raises(StreamError) as caught:
            client.connect()
        assert "rank 0: " in str(caught.value)
        assert "this feeder serves the run 'theirs', the drafter belongs to the run 'synthetic'" in str(caught.value)
        assert "give both the same run_dir" in caught.value.remedy
        assert not feeder.look()[0].drafters


def test_a_drafter_with_another_configuration_is_refused_with_what_differs(tmp_path: Path) -> None:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,):
        expects = replace(synthetic_expectations(synthetic_plan(row_tokens=128)), seed=5, layer_ids=(1, 3))
        with RowClient([feeder.endpoint], expects) as client, pytest.raises(StreamError) as caught:
            client.connect()
        assert "seed: 5 wanted, 0 served; data.row_tokens: 128 wanted, 64 served" in str(caught.value)
        assert "target.layer_ids: (1, 3) wanted, (1, 2) served" in str(caught.value)


def test_a_checkpoint_of_other_rows_is_refused_with_what_differs(tmp_path: Path) -> None:
    plan = synthetic_plan()
    other = replace(plan, data=replace(plan.data, dataset="another"), target=replace(plan.target, weights="others"))
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,):
        client = RowClient([feeder.endpoint], synthetic_expectations(plan), plan=other)
        with client, pytest.raises(StreamError) as caught:
            client.connect()
        assert "data.dataset: 'another' here, 'synthetic' there" in str(caught.value)
        assert "target.weights: 'others' here, 'synthetic' there" in str(caught.value)


def test_feeders_that_serve_different_rows_are_found_out(tmp_path: Path) -> None:
    plan = synthetic_plan()
    other = replace(plan, target=replace(plan.target, weights="others"))
    with (
        feeders(FeederProcess(ipc(tmp_path, "a"), plan), FeederProcess(ipc(tmp_path, "b"), other)) as both,
        client_of([f.endpoint for f in both]) as client,
        pytest.raises(StreamError, match=r"target\.weights: "),
    ):
        client.connect()


def test_a_wrong_feeder_that_joins_later_is_not_used(tmp_path: Path) -> None:
    plan = synthetic_plan()
    other = replace(plan, target=replace(plan.target, weights="others"))
    with (
        feeders(FeederProcess(ipc(tmp_path, "a"), plan)) as (right,),
        client_of([right.endpoint, ipc(tmp_path, "b")]) as client,
    ):
        client.connect()
        with feeders(FeederProcess(ipc(tmp_path, "b"), other)):
            until(lambda: client._io.links[1].state == "refused")
            client.schedule(iter(keys(0, 20)))
            assert len(list(take_all(client, keys(0, 20)))) == 20
            assert client.stats.rows_by_feeder[ipc(tmp_path, "b")] == 0


def test_a_feeder_named_twice_is_found_out(tmp_path: Path) -> None:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,):
        twice = [feeder.endpoint, f"ipc://{tmp_path}/./feeder.sock"]
        with client_of(twice) as client, pytest.raises(StreamError, match="lead to the same feeder"):
            client.connect()


def test_no_feeder_at_all_is_a_bounded_wait(tmp_path: Path) -> None:
    with client_of([ipc(tmp_path)], connect_seconds=0.5) as client, pytest.raises(StreamError) as caught:
        client.connect()
    assert re.search(rf"no feeder after [01] s: {ipc(tmp_path)}: nothing answers there", str(caught.value))


def test_a_drafter_that_starts_again_takes_its_own_place(tmp_path: Path) -> None:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,), client_of([feeder.endpoint]) as old:
        old.connect()
        old.schedule(iter(keys(0, 99)))
        with client_of([feeder.endpoint]) as new:
            new.connect()
            new.schedule(iter(keys(0, 9)))
            assert len(list(take_all(new, keys(0, 9)))) == 9
            assert len(feeder.look()[0].drafters) == 1
            with pytest.raises(StreamError, match="another process has connected as rank 0"):
                list(take_all(old, keys(0, 99)))


def test_a_drafter_that_leaves_or_dies_frees_what_it_held(tmp_path: Path) -> None:
    with feeders(FeederProcess(ipc(tmp_path), behaviour=Behaviour(silent_seconds=0.5))) as (feeder,):
        leaving = client_of([feeder.endpoint], rank=0, world=2)
        leaving.connect()
        leaving.schedule(iter(keys(0, 9)))
        leaving.close()
        assert not feeder.look()[0].drafters  # at once
        dying = start_drafter(feeder.endpoint)
        until(lambda: [d.name for d in feeder.look()[0].drafters] == ["rank 1"])
        dying.kill()
        dying.join()
        until(lambda: not feeder.look()[0].drafters, seconds=2)


def test_a_dead_drafter_is_noticed_in_seconds_however_long_a_silence_may_be(tmp_path: Path) -> None:
    with feeders(FeederProcess(ipc(tmp_path), behaviour=Behaviour(silent_seconds=600))) as (feeder,):
        dying = start_drafter(feeder.endpoint)
        until(lambda: feeder.look()[0].drafters)
        dying.kill()
        dying.join()
        until(lambda: not feeder.look()[0].drafters, seconds=15)


def test_a_stuck_feeders_rows_come_from_another_and_it_is_named_when_there_is_none(tmp_path: Path) -> None:
    with (
        feeders(
            FeederProcess(ipc(tmp_path, "stuck"), behaviour=Behaviour(stuck_at=12)),
            FeederProcess(ipc(tmp_path, "good"), behaviour=Behaviour(seconds_per_row=0.02)),
        ) as (stuck, good),
        client_of([stuck.endpoint, good.endpoint], rows=4, row_seconds=60.0) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 60)))
        started = time.monotonic()
        assert len(list(take_all(client, keys(0, 40)))) == 40
        assert time.monotonic() - started < 15  # not row_seconds, nor silent_seconds: it isn't silent
        good.kill()
    with (
        feeders(FeederProcess(ipc(tmp_path), behaviour=Behaviour(stuck_at=4, silent_seconds=PATIENT))) as (feeder,),
        client_of([feeder.endpoint], rank=1, world=2, row_seconds=8.0, silent_seconds=PATIENT) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 9)))
        with pytest.raises(StreamError) as caught:
            list(take_all(client, keys(0, 9)))
        assert "rank 1: train row 4 did not come within 8 s: " in caught.value.what
        assert re.search(rf"{feeder.endpoint} was asked \d+ s ago", caught.value.what)
        assert re.search(rf"{feeder.endpoint} is connected and busy with train row 4 for \d+ s", caught.value.what)
        assert re.search(r"it answers, but is stuck: it made rows in 0\.\d s before", caught.value.what)
        assert "the feeder answers, its target does not" in caught.value.remedy


def test_a_stopped_feeder_is_said_to_answer_nothing(tmp_path: Path) -> None:
    with (
        feeders(FeederProcess(ipc(tmp_path), behaviour=Behaviour(seconds_per_row=0.02))) as (feeder,),
        client_of([feeder.endpoint], row_seconds=5.0, silent_seconds=60.0) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 99)))
        rows = take_all(client, keys(0, 99))
        next(rows)
        feeder.pause()
        with pytest.raises(StreamError) as caught:
            list(rows)
        assert re.search(
            rf"{feeder.endpoint} is connected but silent for \d+ s: stopped, or cut off", str(caught.value)
        )


def test_a_failure_of_the_streams_thread_surfaces_where_rows_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(link: Link, now: float) -> None:
        raise ValueError("a bug")

    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,), client_of([feeder.endpoint]) as client:
        client.connect()
        monkeypatch.setattr(Link, "tick", fail)
        client.schedule(iter(keys(0, 9)))
        with pytest.raises(StreamError, match="the stream's thread failed: ValueError: a bug") as caught:
            list(take_all(client, keys(0, 9)))
        assert isinstance(caught.value.__cause__, ValueError)
