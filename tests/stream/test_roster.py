"""Feeders join and leave a running job through the file that names them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from feeder_process import Behaviour, FeederProcess, feeders, until
from stream_client import QUICK, client_of, keys, take_all
from test_stream import ipc

from dflash_mp.errors import StreamError
from dflash_mp.stream.endpoints import check_endpoint
from dflash_mp.stream.roster import Roster


def check(endpoint: str) -> None:
    check_endpoint(endpoint, insecure_no_auth=False)


def write(file: Path, *lines: str) -> None:
    """As an editor does, and a Kubernetes volume: another file in its place."""
    other = file.with_suffix(".new")
    other.write_text("\n".join(lines) + "\n")
    os.replace(other, file)


def test_the_file_adds_to_the_configuration_and_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "feeders"
    write(file, "# ours", "ipc:///a  # the first", "", "ipc:///b", "ipc:///given")
    roster = Roster(["ipc:///given"], file, check)
    assert roster.endpoints == ["ipc:///given", "ipc:///a", "ipc:///b"]
    assert not roster.changed(10.0)
    write(file, "ipc:///c")
    assert not roster.changed(10.5)  # a look per second
    assert roster.changed(11.5)
    assert roster.endpoints == ["ipc:///given", "ipc:///c"]
    assert not roster.changed(13.0)


def test_a_file_that_goes_wrong_is_reported_once_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "feeders"
    write(file, "ipc:///a")
    roster = Roster([], file, check)
    write(file, "tcp://10.0.0.5:5555")
    with caplog.at_level(logging.ERROR):
        assert not roster.changed(10.0)
        assert not roster.changed(20.0)
    file.unlink()
    with caplog.at_level(logging.ERROR):
        assert not roster.changed(30.0)
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "tcp://10.0.0.5:5555 can be reached from other hosts, and nothing authenticates who connects",
        f"cannot read stream.feeders_file {file}: No such file or directory",
    ]
    assert roster.endpoints == ["ipc:///a"]


def test_an_emptied_file_changes_nothing_and_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`> file` empties it before anything is written."""
    file = tmp_path / "feeders"
    write(file, "ipc:///a")
    roster = Roster(["ipc:///given"], file, check)
    file.write_text("")
    with caplog.at_level(logging.ERROR):
        assert not roster.changed(10.0)
        assert not roster.changed(20.0)
    assert [record.message for record in caplog.records] == [
        f"stream.feeders_file {file} names no feeder; the feeders stay the same until it is right"
    ]
    assert roster.endpoints == ["ipc:///given", "ipc:///a"]
    file.write_text("ipc:///b\n")
    assert roster.changed(30.0)


def test_at_the_start_the_file_must_be_right(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match=r"cannot read stream\.feeders_file"):
        Roster(["ipc:///a"], tmp_path / "none", check)
    write(tmp_path / "empty", "# nobody")
    with pytest.raises(StreamError, match="no feeder is named"):
        Roster([], tmp_path / "empty", check)


def test_a_feeder_at_a_new_address_joins_a_running_job_and_one_that_is_struck_off_is_left(tmp_path: Path) -> None:
    file = tmp_path / "feeders"
    slow = Behaviour(seconds_per_row=0.02)
    write(file, ipc(tmp_path, "a"))
    a, b, c = (ipc(tmp_path, name) for name in "abc")
    with (
        feeders(FeederProcess(a, behaviour=slow), FeederProcess(b, behaviour=slow)) as (first, second),
        client_of([], rows=4, **QUICK, feeders_file=file) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 1000)))
        assert len(list(take_all(client, keys(0, 20)))) == 20
        first.kill()
        write(file, b)
        assert len(list(take_all(client, keys(20, 60)))) == 40
        assert list(client.stats.rows_by_feeder) == [b]
        with feeders(FeederProcess(c, behaviour=slow)):
            write(file, b, c)
            rows = take_all(client, keys(60, 1000))
            until(lambda: next(rows) and client.stats.rows_by_feeder.get(c, 0) > 0)
            write(file, c)
            until(lambda: next(rows) and list(client.stats.rows_by_feeder) == [c])
            until(lambda: not second.look()[0].drafters)
            assert next(rows)


def test_a_second_address_of_a_feeder_that_is_added_to_a_running_job_is_dropped_for_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "feeders"
    slow = Behaviour(seconds_per_row=0.02)
    with feeders(FeederProcess(ipc(tmp_path), behaviour=slow)) as (feeder,):
        write(file, feeder.endpoint)
        with client_of([], rows=4, **QUICK, feeders_file=file) as client:
            client.connect()
            client.schedule(iter(keys(0, 1000)))
            rows = take_all(client, keys(0, 1000))
            again = f"ipc://{tmp_path}/./feeder.sock"
            write(file, feeder.endpoint, again)
            until(lambda: next(rows) and [link.state for link in client._io.links][1:] == ["closed"])
            assert len(list(zip(rows, range(100), strict=False))) == 100
            assert client._io.links[1].describe(0.0).startswith(f"{again} was left: {feeder.endpoint} and {again} lead")
    assert sum("lead to the same feeder" in record.message for record in caplog.records) == 1


def test_of_two_addresses_of_a_feeder_the_first_stays_even_if_it_answers_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "feeder").mkdir()
    late, early = f"ipc://{tmp_path}/late/feeder.sock", ipc(tmp_path / "feeder")
    with (
        feeders(FeederProcess(early, behaviour=Behaviour(seconds_per_row=0.02))),
        client_of([late, early], rows=4, **QUICK) as client,
    ):
        client.connect()
        client.schedule(iter(keys(0, 1000)))
        rows = take_all(client, keys(0, 1000))
        assert next(rows)
        assert [link.state for link in client._io.links] == ["connecting", "live"]
        (tmp_path / "late").symlink_to(tmp_path / "feeder")
        until(lambda: next(rows) and [link.state for link in client._io.links] == ["live", "closed"])
        assert len(list(zip(rows, range(100), strict=False))) == 100
        assert [link.state for link in client._io.links] == ["live", "closed"]
        assert client._io.links[1].describe(0.0).startswith(f"{early} was left: {late} and {early} lead")
    assert sum("lead to the same feeder" in record.message for record in caplog.records) == 1
