"""Training on rows in fp8, through real sockets by both lanes, beside training on the same rows as the target computes them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from test_compatibility import OLD_FRAMES
from tiny_run import make_tiny_run

from dflash_mp.config import RunConfig
from dflash_mp.config_file import load_config
from dflash_mp.data.row import RowKey
from dflash_mp.data.store import PreparedDataset
from dflash_mp.drafter import checkpoint, schedule, state
from dflash_mp.drafter.trainer import train_step
from dflash_mp.drafter.world import World
from dflash_mp.errors import CheckpointError, StreamError
from dflash_mp.stream import messages as m
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.handshake import expectations, refusal
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.weights import FrozenWeights
from dflash_mp.target.capture import Capture
from dflash_mp.target.feed import make_plan, row_maker
from dflash_mp.target.load import Target, load_target

STEPS, ROWS = 16, 4
FP8 = "stream.wire_dtype=fp8"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("fp8"), documents=240)


def configured(run_file: Path, *overrides: str) -> RunConfig:
    options = [f"train.steps={STEPS}", "train.learning_rate=3e-3", "train.anchors_per_row=32", "target.dtype=bfloat16"]
    return load_config(run_file, [*options, *overrides]).config


@contextmanager
def feeder(config: RunConfig, directory: Path, poke: str = "") -> Iterator[str]:
    """A feeder of this process that serves the run's target; its address. `poke` names a parameter to damage."""
    dataset, target = PreparedDataset.open(config.data.path), load_target(config.target)
    plan = make_plan(config, dataset, target)
    capture = Capture(target, last_hidden=plan.target.last_hidden, keep_target=True)
    damage(target, poke)
    weights, stop = FrozenWeights(target.embedding, target.head), threading.Event()
    with FeederService(f"ipc://{directory}/f.sock", plan, weights, run=expectations(config).run) as service:
        serving = threading.Thread(target=service.serve, args=(row_maker(dataset, capture, plan), stop))
        serving.start()
        try:
            yield service.endpoint
        finally:
            stop.set()
            serving.join()


def damage(target: Target, name: str) -> None:
    with torch.no_grad():
        for parameter in (p for n, p in target.model.named_parameters() if n == name):
            parameter.view(-1)[0] = torch.nan


def connected(config: RunConfig, endpoint: str, shared_memory: bool = True) -> RowClient:
    stream = config.stream.model_copy(update={"connect_seconds": 30.0, "row_seconds": 60.0})
    return RowClient([endpoint], expectations(config), stream=stream, shared_memory=shared_memory)


@dataclass
class Trained:
    losses: list[float]
    weights: dict[str, torch.Tensor]
    lanes: list[str]
    bytes_per_row: float


def trained(config: RunConfig, directory: Path, shared_memory: bool = True) -> Trained:
    world = World(0, 1, 0, 1, torch.device("cpu"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with feeder(config, directory) as endpoint, connected(config, endpoint, shared_memory) as client:
            plan, frozen = client.connect(), client.fetch_weights()
            trainer = state.build_trainer(config, plan, frozen.embedding, frozen.head, client, world, None)
            client.schedule(schedule.row_sequence(config.train, 0, 0, 1, 0))
            losses = [train_step(trainer)[0].loss for _ in range(STEPS)]
            stats = client.stats
            assert stats.rows == STEPS * ROWS
            weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
            return Trained(losses, weights, list(client.lanes.values()), stats.bytes / stats.rows)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(configured(run_file), tmp_path_factory.mktemp("plain"))


def test_it_trains_as_on_plain_rows_by_either_lane_with_half_the_bytes(
    run_file: Path, plain: Trained, tmp_path: Path
) -> None:
    config = configured(run_file, FP8)
    shared, inband = (trained(config, tmp_path, shared_memory) for shared_memory in (True, False))
    assert (shared.lanes, inband.lanes) == (["shared_memory"], ["inband"])
    assert shared.losses == inband.losses
    assert all(torch.equal(shared.weights[name], inband.weights[name]) for name in shared.weights)
    assert shared.losses != plain.losses
    assert plain.losses[-1] < 0.9 * plain.losses[0]
    assert shared.losses == pytest.approx(plain.losses, rel=0.01)
    k, h = 2, 96  # so few values that their scales and the token's 13 bytes count
    assert shared.bytes_per_row == inband.bytes_per_row == 256 * (k * h + 4 * k + 13)
    assert plain.bytes_per_row == 256 * (2 * k * h + 13)


def test_distillation_trains_on_a_last_hidden_state_in_fp8(run_file: Path, tmp_path: Path) -> None:
    distill = configured(run_file, "train.objective=distill")
    losses = trained(distill, tmp_path).losses
    in_fp8 = trained(configured(run_file, "train.objective=distill", FP8), tmp_path).losses
    assert in_fp8[-1] < 0.9 * in_fp8[0]
    assert in_fp8 != losses
    assert in_fp8 == pytest.approx(losses, rel=0.03)


@pytest.mark.parametrize(
    ("served", "wanted", "says"),
    [([FP8], [], "stream.wire_dtype: auto wanted, fp8 served"), ([], [FP8], "fp8 wanted, auto served")],
)
def test_sides_that_disagree_are_told_how(
    run_file: Path, tmp_path: Path, served: list[str], wanted: list[str], says: str
) -> None:
    with feeder(configured(run_file, *served), tmp_path) as endpoint:  # noqa: SIM117
        with connected(configured(run_file, *wanted), endpoint) as client, pytest.raises(StreamError, match=says):
            client.connect()


def test_a_drafter_of_the_first_release_is_served_plain_rows_and_refused_others(run_file: Path) -> None:
    dataset, target = PreparedDataset.open(configured(run_file).data.path), load_target(configured(run_file).target)
    old = m.decode(bytes.fromhex(OLD_FRAMES["Hello"]))
    assert isinstance(old, m.Hello)
    for options in ([], [FP8]):
        config = configured(run_file, *options)
        plan, said = make_plan(config, dataset, target), expectations(config)
        expects = replace(old.expects, run=said.run, seed=said.seed, row_tokens=said.row_tokens, layer_ids=None)
        refused = refusal(replace(old, plan=None, expects=expects), plan, said.run)
        # Nothing that the first release wouldn't know goes out unless fp8 is asked for.
        assert (b"wire_dtype" in m.encode(replace(old, plan=plan, expects=said))) == bool(options)
        assert (refused is not None) == bool(options)
        if refused is not None:
            assert (refused.code, refused.remedy) == (
                "plan",
                "start feeder and drafter with the same configuration; prepare the data again if data.* changed",
            )
            assert "stream.wire_dtype: auto wanted, fp8 served" in refused.reason


def test_a_row_that_is_not_finite_ends_in_an_error_that_names_it(
    run_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, key = configured(run_file, FP8), RowKey("train", 0)
    with feeder(config, tmp_path, "model.layers.0.mlp.down_proj.weight") as endpoint:  # noqa: SIM117
        with connected(config, endpoint) as client:
            client.connect()
            client.schedule(iter([key]))
            with pytest.raises(
                StreamError, match=r"train row 0: the hidden state after layer \d of its token 0 is not"
            ):
                client.take(key)
    assert any("train row 0" in record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)


def test_the_command_runs_on_fp8_says_so_and_does_not_go_on_from_its_checkpoint_without(
    run_file: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "dflash_mp.cli", "run", "-c", str(run_file), "--set", f"run_dir={tmp_path}"]
    done = subprocess.run([*command, "--set", FP8], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows in fp8, from the start" in (tmp_path / "logs" / "drafters.log").read_text("utf-8")
    assert "on cpu, sent in fp8" in (tmp_path / "logs" / "feeder-0.log").read_text("utf-8")
    directory = checkpoint.find(tmp_path)
    assert directory is not None
    stored = json.loads((directory / "state.json").read_text("utf-8"))["plan"]
    assert stored["target"]["wire_dtype"] == "fp8"
    plan = state.plan_of({"plan": stored}, directory)
    assert RowLayout.of(plan).nbytes == 256 * (2 * 96 + 8 + 13)
    config = load_config(run_file, [f"run_dir={tmp_path}"]).config
    other, world = (
        replace(plan, target=replace(plan.target, wire_dtype="auto")),
        World(0, 1, 0, 1, torch.device("cpu")),
    )
    embedding = torch.zeros(plan.target.vocab_size, plan.target.hidden_size)
    with pytest.raises(CheckpointError, match=r"target.wire_dtype: 'auto' here, 'fp8' there"):
        state.build_trainer(config, other, embedding, embedding, None, world, directory)  # type: ignore[arg-type]
