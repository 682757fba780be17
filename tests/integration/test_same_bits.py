"""However the rows travel, training them gives the same bits: by either lane or none, from one feeder or two, on one rank or three."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import make_tiny_run

from dflash_mp.config import RunConfig
from dflash_mp.config_file import load_config
from dflash_mp.data.row import RowKey
from dflash_mp.data.store import PreparedDataset
from dflash_mp.drafter import checkpoint, state
from dflash_mp.drafter.report import Reporter
from dflash_mp.drafter.trainer import train
from dflash_mp.drafter.world import World
from dflash_mp.stream.layout import RowLayout, RowTensors
from dflash_mp.target.capture import Capture
from dflash_mp.target.feed import make_plan, row_maker
from dflash_mp.target.load import load_target

STEPS = 20
OPTIONS = [f"train.steps={STEPS}", "train.rows_per_step=4", "train.checkpoint_every=20", "train.log_every=20"]


class LocalRow:
    def __init__(self, layout: RowLayout) -> None:
        self.buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self.tensors: RowTensors = layout.views(self.buffer)

    def release(self) -> None:
        self.buffer.fill_(0xFF)


class LocalRows:
    """The target in this process: no sockets, no other process."""

    def __init__(self, config: RunConfig) -> None:
        dataset, target = PreparedDataset.open(config.data.path), load_target(config.target)
        self.plan = make_plan(config, dataset, target)
        self.embedding, self.head = target.embedding, target.head
        capture = Capture(target)
        capture.self_check(dataset.row("train", 0))
        self._make, self._layout = row_maker(dataset, capture, self.plan), RowLayout.of(self.plan)

    def schedule(self, keys: Iterator[RowKey]) -> None:
        pass

    def take(self, key: RowKey) -> LocalRow:
        row = LocalRow(self._layout)
        self._make(key, row.buffer)
        return row


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("bits"))


@pytest.fixture(scope="module")
def streamed(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the others are compared with: one feeder, one rank, through sockets."""
    return run(run_file, tmp_path_factory.mktemp("streamed"))


def run(run_file: Path, run_dir: Path, *overrides: str) -> Path:
    options = [f"run_dir={run_dir}", *OPTIONS, *overrides]
    command = [sys.executable, "-m", "dflash_mp.cli", "run", "-c", str(run_file)]
    command += [word for option in options for word in ("--set", option)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


def tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    directory = run_dir / "checkpoints" / f"step-{STEPS:08d}"
    found: dict[str, torch.Tensor] = {}
    for name in ("weights", "optimizer"):
        found |= {f"{name}.{key}": value for key, value in load_file(directory / f"{name}.safetensors").items()}
    return found


def differing(a: Path, b: Path) -> list[str]:
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def test_streamed_training_equals_training_without_sockets(run_file: Path, streamed: Path, tmp_path: Path) -> None:
    config = load_config(run_file, [f"run_dir={tmp_path}", *OPTIONS]).config
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, world = LocalRows(config), World(0, 1, 0, 1, torch.device("cpu"))
        trainer = state.build_trainer(config, rows.plan, rows.embedding, rows.head, rows, world, None)
        with Reporter(config.run_dir, enabled=True) as report:
            assert train(trainer, rows, report, state.save, lambda: False)
    finally:
        torch.set_num_threads(threads)
    assert checkpoint.steps_of(tmp_path) == [STEPS]
    assert differing(streamed, tmp_path) == []


def test_two_feeders_by_a_lane_each_give_the_same_bits_as_one(run_file: Path, streamed: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="dflash-mp-") as directory:
        # Five bytes longer, for the lane's own socket, this path would be too long.
        path = f"{directory}/{'x' * (104 - len(directory))}"
        run(run_file, tmp_path, f"feed.endpoints=['ipc://{path}', 'ipc://{directory}/y']")
        assert os.listdir(directory) == []
    assert differing(streamed, tmp_path) == []
    lanes = [(run_dir / "logs" / "drafters.log").read_text(encoding="utf-8") for run_dir in (streamed, tmp_path)]
    assert [log.count(", lane shared_memory (") for log in lanes] == [1, 1]
    assert [log.count(", lane inband (the path ") for log in lanes] == [0, 1]


@pytest.mark.parametrize("ranks", [2, 3])  # of the four rows of a step all have two, or one of them
def test_the_number_of_ranks_changes_results_by_rounding_only(
    run_file: Path, streamed: Path, tmp_path: Path, ranks: int
) -> None:
    run(run_file, tmp_path, f"train.drafters={ranks}")
    one, several = tensors(streamed), tensors(tmp_path)
    for name in one:
        if name.startswith("weights."):
            torch.testing.assert_close(one[name], several[name], rtol=1e-4, atol=2e-5, msg=name)
