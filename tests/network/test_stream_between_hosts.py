"""Rows between hosts: a slow, lossy or cut wire, and feeders whose address changes, cost time and nothing else; by IPv6 as well."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from feeder_process import Behaviour, FeederProcess, feeders, until
from hosts import Host, network
from stream_client import client_of, keys, take_all

from dflash_mp.data.row import RowKey
from dflash_mp.errors import StreamError
from dflash_mp.stream.keys import DrafterKeys, keygen

PARTITION_SECONDS = float(os.environ.get("DFLASH_MP_PARTITION_SECONDS", "5"))  # 30 in the long mode
BOUNDS = {"connect_seconds": 60.0, "row_seconds": 60.0 + 2 * PARTITION_SECONDS, "silent_seconds": 2.0}

_PLAIN = Behaviour()


@pytest.fixture
def key_files(tmp_path: Path) -> Path:
    keygen(tmp_path / "keys")
    return tmp_path / "keys"


def feeder_on(host: Host, key_files: Path, address: str, behaviour: Behaviour = _PLAIN) -> FeederProcess:
    return FeederProcess(f"tcp://{address}:5555", None, replace(behaviour, host=host.path, keys=key_files))


@pytest.mark.parametrize("ip", [4, 6])
def test_delay_and_loss_cost_time_only(key_files: Path, ip: int) -> None:
    with network("feeder", "drafter") as (wire, far, near):
        address = far.address if ip == 4 else f"[{far.address6}]"
        wire.shape(delay=0.05, loss=0.01)
        with (
            feeders(feeder_on(far, key_files, address, Behaviour(silent_seconds=60.0))) as (feeder,),
            near.entered(),
            client_of(
                [feeder.endpoint], keys=DrafterKeys.load(key_files), **{**BOUNDS, "silent_seconds": 60.0}
            ) as client,
        ):
            client.connect()
            client.fetch_weights()
            client.schedule(iter(keys(0, 60)))
            assert len(list(take_all(client, keys(0, 60)))) == 60
            assert client.stats.reasked == 0


def test_a_partition_is_waited_out_and_what_was_under_way_is_asked_again(key_files: Path) -> None:
    with network("feeder", "drafter") as (wire, far, near):
        slow = Behaviour(seconds_per_row=0.02, silent_seconds=2.0)
        with (
            feeders(feeder_on(far, key_files, far.address, slow)) as (feeder,),
            near.entered(),
            client_of([feeder.endpoint], keys=DrafterKeys.load(key_files), **BOUNDS) as client,
        ):
            client.connect()
            client.schedule(iter(keys(0, 160)))
            rows = take_all(client, keys(0, 160))
            for _ in range(40):
                next(rows)
            taken: list[RowKey] = []
            taking = threading.Thread(target=lambda: taken.extend(rows), daemon=True)  # so there is a row under way
            taking.start()
            wire.cut(far, near)
            until(lambda: not client._io.live(), 30)
            until(lambda: not feeder.look()[0].drafters, 30)
            if (left := PARTITION_SECONDS - 2) > 0:
                time.sleep(left)
            wire.mend()
            taking.join(BOUNDS["row_seconds"])
            assert taken == keys(40, 160)
            assert client.stats.reasked >= 1


def test_behind_a_partition_the_wait_is_bounded_and_says_what_is_missing(key_files: Path) -> None:
    with network("feeder", "drafter") as (wire, far, near):
        with feeders(feeder_on(far, key_files, far.address)) as (feeder,), near.entered():
            bounds = {**BOUNDS, "row_seconds": 4.0, "silent_seconds": 1.0}
            with client_of([feeder.endpoint], keys=DrafterKeys.load(key_files), rank=1, world=2, **bounds) as client:
                client.connect()
                client.schedule(iter(keys(0, 9)))
                wire.cut(far, near)
                with pytest.raises(StreamError) as caught:
                    list(take_all(client, keys(0, 9)))
        text = str(caught.value)
        assert "rank 1: train row " in text
        assert "did not come within 4 s: no feeder is left" in text
        assert f"{feeder.endpoint}: lost " in text
        assert "silent for 1 s" in text


def test_a_feeder_whose_address_changes_is_found_through_the_file(key_files: Path, tmp_path: Path) -> None:
    file = tmp_path / "feeders"
    with network("feeder", "drafter") as (_, far, near):
        file.write_text(f"tcp://{far.address}:5555\n")
        slow = Behaviour(seconds_per_row=0.02)
        with (
            feeders(feeder_on(far, key_files, far.address, slow)) as (first,),
            near.entered(),
            client_of([], keys=DrafterKeys.load(key_files), **{**BOUNDS, "feeders_file": file}) as client,
        ):
            client.connect()
            client.schedule(iter(keys(0, 60)))
            assert len(list(take_all(client, keys(0, 20)))) == 20
            far.move("10.77.0.9")
            first.kill()
            with feeders(feeder_on(far, key_files, far.address, slow)):
                file.write_text(f"tcp://{far.address}:5555\n")
                assert len(list(take_all(client, keys(20, 60)))) == 40
