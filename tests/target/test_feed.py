"""The feeder process: a real target's rows through the real command."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import make_tiny_run

from dflash_mp.config import RunConfig
from dflash_mp.config_file import load_config
from dflash_mp.data.row import RowKey
from dflash_mp.data.store import PreparedDataset
from dflash_mp.errors import ConfigError, DataError, StreamError
from dflash_mp.stream.client import RowClient
from dflash_mp.target.capture import Capture
from dflash_mp.target.feed import feed, make_plan, row_maker
from dflash_mp.target.load import load_target


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("feed")
    file = make_tiny_run(directory)
    file.write_text(file.read_text().replace("seed: 0\n", "seed: 3\n") + "stream: {window_mib: 4}\n")
    text = file.read_text().replace(
        "feed:\n", f"feed:\n  endpoints: ['ipc://{directory}/f.sock']\n  stats_seconds: 0.2\n"
    )
    file.write_text(text)
    return file


@pytest.fixture(scope="module")
def config(run_file: Path) -> RunConfig:
    return load_config(run_file).config


@pytest.fixture(scope="module")
def feeder(run_file: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "dflash_mp.cli", "feed", "-c", str(run_file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_the_rows_are_what_the_target_computes_and_sigterm_ends_it_in_order(
    feeder: subprocess.Popen[str], config: RunConfig
) -> None:
    dataset, target = PreparedDataset.open(config.data.path), load_target(config.target)
    plan = make_plan(config, dataset, target)
    make = row_maker(dataset, Capture(target), plan)
    with RowClient.of(config, 0, 1) as client:
        assert client.connect() == plan
        weights = client.fetch_weights()
        assert torch.equal(weights.embedding, target.embedding)
        assert torch.equal(weights.head, target.head)
        keys = [RowKey("train", n) for n in (0, 1, dataset.rows("train"), 10**9)] + [RowKey("held_out", 0)]
        client.schedule(iter(keys))
        for key in keys:
            with client.take(key) as row:
                right = torch.zeros_like(row.buffer)
                make(key, right)
                assert torch.equal(row.buffer, right), key
                stored = dataset.run_row(key, seed=3)
                assert row.tensors.input_ids.tolist() == stored.input_ids.tolist()
                assert row.tensors.loss_mask.tolist() == stored.loss_mask.tolist()
    other = config.model_copy(update={"run_dir": Path("/elsewhere/other-run")})
    with RowClient.of(other, 0, 1) as client, pytest.raises(StreamError, match="belongs to the run 'other-run'"):
        client.connect()
    feeder.send_signal(signal.SIGTERM)
    feeder.send_signal(signal.SIGINT)  # of the same request: what a whole group gets comes more than once
    _, log = feeder.communicate(timeout=60)
    assert feeder.returncode == 0, log
    lines = log.splitlines()
    assert any("feeder 0 | serving target on ipc://" in line for line in lines), log
    assert any("rows/s" in line and "GB/s" in line and "drafters: " in line for line in lines), log
    assert "feeder 0 | stopped after 5 rows" in lines[-1]


@pytest.mark.parametrize("what", ["tokenizer", "chat_template"])
def test_data_prepared_for_another_target_are_refused(what: str, config: RunConfig) -> None:
    dataset, target = PreparedDataset.open(config.data.path), load_target(config.target)
    right = getattr(dataset.manifest, what)
    dataset.manifest = replace(dataset.manifest, **{what: "0123456789abcdef"})
    with pytest.raises(DataError) as caught:
        make_plan(config, dataset, target)
    named = what.replace("_", " ")
    assert f"was prepared with the {named} 0123456789abcdef, but that of the target target is {right}" in str(
        caught.value
    )
    assert "run dflash-mp prepare --force" in caught.value.remedy


def test_a_taken_address_is_found_out_before_the_target_is_loaded(run_file: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        config = load_config(run_file, [f"feed.endpoints=['{endpoint}']", f"target.path={tmp_path}/none"]).config
        with pytest.raises(StreamError, match=f"cannot listen on {endpoint}: Address already in use"):
            feed(config, 0)


@pytest.mark.parametrize(
    ("override", "index", "error", "says"),
    [
        ("seed=3", 1, ConfigError, "--index 1, but the run has 1 feeder"),
        ("data.row_tokens=128", 0, DataError, "has rows of 256 tokens, data.row_tokens is 128"),
        ("data.path=/nowhere", 0, DataError, "/nowhere does not exist"),
        ("feed.endpoints=['tcp://0.0.0.0:5']", 0, StreamError, "can be reached from other hosts"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(
    override: str, index: int, error: type[Exception], says: str, run_file: Path, tmp_path: Path
) -> None:
    free = [f"feed.endpoints=['ipc://{tmp_path}/f.sock']", override]
    with pytest.raises(error) as caught:
        feed(load_config(run_file, free).config, index)
    assert says in str(caught.value)
