"""Rows through real sockets between real processes."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from feeder_process import Behaviour, FeederProcess, feeders, until
from stream_client import PATIENT, client_of, keys, take_all

from dflash_mp.bench.synthetic import synthetic_plan, synthetic_weights
from dflash_mp.data.row import RowKey
from dflash_mp.errors import StreamError
from dflash_mp.stream import dealing
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.messages import CHUNK_BYTES


def ipc(tmp_path: Path, name: str = "feeder") -> str:
    return f"ipc://{tmp_path}/{name}.sock"


def test_two_drafters_get_their_rows_from_two_feeders_over_ipc_and_tcp(tmp_path: Path) -> None:
    patient = Behaviour(silent_seconds=PATIENT)
    # Else a row that is late on a busy machine would be asked of the other feeder, too, and one that lies in a ring be given up for it.
    never_late = patch.object(dealing, "_SLACK_SECONDS", PATIENT)
    with (
        never_late,
        feeders(*(FeederProcess(to, behaviour=patient) for to in (ipc(tmp_path), "tcp://127.0.0.1:0"))) as started,
    ):
        endpoints = [feeder.endpoint for feeder in started]
        failures: list[BaseException] = []
        shares: list[dict[str, int]] = []

        def drafter(rank: int) -> None:
            try:
                with client_of(endpoints, rank=rank, world=2, silent_seconds=PATIENT) as client:
                    client.connect()
                    until(lambda: len(client._io.live()) == 2)
                    wanted = keys(rank * 100, rank * 100 + 60) + [RowKey("held_out", n) for n in range(8)]
                    client.schedule(iter(wanted))
                    assert list(take_all(client, wanted)) == wanted
                    shares.append(client.stats.rows_by_feeder)
                    assert client.stats.rows == 68
                    assert client.stats.reasked == 0
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=drafter, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures, failures
        assert len(shares) == 2
        assert all(min(share.values()) > 0 for share in shares), shares  # both feeders work for both


def test_a_row_of_several_chunks_arrives_whole_and_aligned(tmp_path: Path) -> None:
    plan = synthetic_plan(row_tokens=1024, hidden_size=2304)
    layout = RowLayout.of(plan)
    assert 2 * CHUNK_BYTES < layout.nbytes < 3 * CHUNK_BYTES
    with (
        feeders(FeederProcess(ipc(tmp_path), plan)) as (feeder,),
        client_of([feeder.endpoint], plan, rows=3) as client,
    ):
        assert client.connect() == plan
        client.schedule(iter(keys(0, 6)))
        for _ in take_all(client, keys(0, 5)):
            pass
        with client.take(RowKey("train", 5)) as row:
            assert row.buffer.data_ptr() % 64 == 0
            assert row.tensors.features.shape == (1024, 2 * 2304)
            assert row.tensors.features.dtype == torch.bfloat16
            mask = row.tensors.loss_mask
            assert mask.data_ptr() == row.buffer.data_ptr() + layout.parts[4].offset  # views, not copies


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_weights_arrive_in_chunks_and_a_tied_head_once(tmp_path: Path, tied: bool) -> None:
    plan = synthetic_plan(hidden_size=1024, vocab_size=3000, tied_head=tied)  # 6 MB: two chunks
    with feeders(FeederProcess(ipc(tmp_path), plan)) as (feeder,), client_of([feeder.endpoint], plan) as client:
        client.connect()
        weights, right = client.fetch_weights(), synthetic_weights(plan)
        assert torch.equal(weights.embedding, right.embedding)
        assert torch.equal(weights.head, right.head)
        assert (weights.head is weights.embedding) == tied
        client.schedule(iter(keys(0, 4)))
        assert len(list(take_all(client, keys(0, 4)))) == 4


def test_the_schedule_is_read_only_as_far_as_the_window_goes(tmp_path: Path) -> None:
    read: list[int] = []

    def endless() -> object:
        for ordinal in range(10**9):
            read.append(ordinal)
            yield RowKey("train", ordinal)

    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,), client_of([feeder.endpoint], rows=4) as client:
        client.connect()
        client.schedule(endless())  # type: ignore[arg-type]
        assert len(read) == 4
        for _ in take_all(client, keys(0, 10)):
            pass
        assert len(read) == 14


def test_schedules_follow_each_other(tmp_path: Path) -> None:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,), client_of([feeder.endpoint]) as client:
        client.connect()
        client.schedule(iter(keys(0, 2)))
        client.schedule(iter([RowKey("held_out", 1)]))
        assert len(list(take_all(client, [*keys(0, 2), RowKey("held_out", 1)]))) == 3
        client.schedule(iter(keys(7, 9)))
        assert len(list(take_all(client, keys(7, 9)))) == 2


def test_rows_taken_out_of_order_or_never_released_are_bugs_that_show_at_once(tmp_path: Path) -> None:
    with feeders(FeederProcess(ipc(tmp_path))) as (feeder,), client_of([feeder.endpoint], rows=2) as client:
        client.connect()
        client.schedule(iter(keys(0, 9)))
        with pytest.raises(RuntimeError, match="train row 0 is next, not train row 1"):
            client.take(RowKey("train", 1))
        held = [client.take(key) for key in keys(0, 2)]
        with pytest.raises(RuntimeError, match="all 2 slots of the window are held"):
            client.take(RowKey("train", 2))
        held[0].release()
        held[0].release()  # once is enough
        with client.take(RowKey("train", 2)):
            pass


def test_a_window_too_small_to_go_on_is_refused_with_the_number_that_would_do(tmp_path: Path) -> None:
    plan = synthetic_plan(row_tokens=2048, hidden_size=128)
    with feeders(FeederProcess(ipc(tmp_path), plan)) as (feeder,):
        with client_of([feeder.endpoint], plan, rows=1.9) as client, pytest.raises(StreamError) as caught:
            client.connect()
        enough = float(caught.value.remedy.split()[-1])
        with client_of([feeder.endpoint], plan, window_mib=enough) as client:
            client.connect()
            client.schedule(iter(keys(0, 5)))
            assert len(list(take_all(client, keys(0, 5)))) == 5


def test_a_slow_feeder_makes_as_few_rows_as_it_manages(tmp_path: Path) -> None:
    with feeders(
        FeederProcess(ipc(tmp_path, "slow"), behaviour=Behaviour(seconds_per_row=0.2)),
        FeederProcess(ipc(tmp_path, "fast"), behaviour=Behaviour(seconds_per_row=0.01)),
    ) as (slow, fast):
        with client_of([slow.endpoint, fast.endpoint], rows=32) as client:
            client.connect()
            client.schedule(iter(keys(0, 80)))
            assert len(list(take_all(client, keys(0, 80)))) == 80
            share = client.stats.rows_by_feeder
        assert share[fast.endpoint] > 5 * share[slow.endpoint], share


def test_the_feeder_knows_who_is_connected_and_who_waits(tmp_path: Path) -> None:
    behaviour = Behaviour(seconds_per_row=0.2, silent_seconds=PATIENT)
    with feeders(FeederProcess(ipc(tmp_path), behaviour=behaviour)) as (feeder,):
        with client_of([feeder.endpoint], rank=1, world=2, rows=3, silent_seconds=PATIENT) as client:
            client.connect()
            client.schedule(iter(keys(0, 9)))
            feeder.look()
            taken = take_all(client, keys(0, 9))
            for _ in range(6):
                next(taken)
            assert feeder.look()[0].computing > 0.5
            for _ in taken:
                pass
            until(lambda: feeder.look()[0].drafters[0].rows == 9)  # the last slot is released
            busy, _, _ = feeder.look()
            assert [(d.name, d.rank, d.lane) for d in busy.drafters] == [("rank 1", 1, "inband")]
            assert busy.rows == 9
            assert "rank 1 (inband, 0 asked)" in busy.line()
            threading.Event().wait(0.4)
            resting, _, _ = feeder.look()
            assert resting.idle > 0.9
            assert "waits for drafters to ask" in resting.line()
        until(lambda: not feeder.look()[0].drafters)
