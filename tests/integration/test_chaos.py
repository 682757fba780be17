"""The short version of `dflash-mp bench chaos`: kills of supervisor and torchrun, and a comparison that can fail."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_mp.bench.chaos_fleet import PHASES, leftovers, shared_memory_left
from dflash_mp.bench.chaos_kills import Deck
from dflash_mp.bench.chaos_report import STEPS, VICTIMS, ChaosReport, Kill, compare


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_while_it_trains_ends_and_starts_leaves_no_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dflash_mp.cli", "bench", "chaos", "--kills", "3", "--seed", "35", "--no-compile"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "chaos")],
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "chaos" / "chaos.json").read_text())
    assert report["ok"]
    first, *others = [(kill["victim"], kill["phase"], kill["layout"]) for kill in report["kills"]]
    assert first == ("supervisor", "training", "run")
    assert len(others) == 2  # where they land depends on the machine
    assert report["compared_tensors"] > 20
    assert "differing of" in done.stdout


def test_a_deck_holds_every_victim_in_every_phase_before_it_repeats() -> None:
    deck = Deck(random.Random(1))
    places = [(victim, phase) for victim in VICTIMS for phase in PHASES]
    for _ in range(2):
        dealt = [deck.next(lambda card: True) for _ in places]
        assert sorted((card.victim, card.phase) for card in dealt) == sorted(places)


def test_the_reports_of_fleets_add_up(tmp_path: Path) -> None:
    one = ChaosReport(seed=4, runs=2, rows_again=8, orphans=["a"], wall_seconds=3.0)
    one.kills.append(Kill("feeder", "training", "hand", "fleet-1/run-1", 7, 1.5))
    one.write_json(tmp_path / "one.json")
    both = ChaosReport(seed=4)
    for _ in range(2):
        both.add(ChaosReport.read_json(tmp_path / "one.json"))
    assert (both.runs, both.rows_again, both.orphans, both.kills) == (4, 16, ["a", "a"], one.kills * 2)
    assert not both.ok


def test_what_a_killed_compilation_leaves_is_pytorchs_and_all_else_is_named(tmp_path: Path) -> None:
    for name in ("tmpabcdefgh/header.hpp", "torchinductor_me/x/y.so", "ccAbCdEf.s", "tmpother/data", "socket"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    assert leftovers([tmp_path]) == [str(tmp_path / name) for name in ("socket", "tmpother", "tmpother/data")]


def test_shared_memory_counts_as_left_when_nobody_uses_it_any_more() -> None:
    before = set(os.listdir("/dev/shm"))
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="dflash-mp-test-", delete=False) as file:
        file.write(b"x")
        assert file.name not in shared_memory_left(before)
    try:
        assert file.name in shared_memory_left(before)
    finally:
        os.unlink(file.name)


def _checkpoint(run_dir: Path, **tensors: torch.Tensor) -> None:
    directory = run_dir / "checkpoints" / f"step-{STEPS:08d}"
    directory.mkdir(parents=True)
    for name in ("weights", "optimizer"):
        save_file(tensors, directory / f"{name}.safetensors")


def test_one_bit_of_difference_is_found(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "a", w=torch.zeros(3), nan=torch.full((2,), float("nan")))
    _checkpoint(tmp_path / "b", w=torch.tensor([0.0, -0.0, 0.0]), nan=torch.full((2,), float("nan")))
    report = ChaosReport(seed=0)
    compare(tmp_path / "a", tmp_path / "b", report)
    assert report.differing == ["b: weights.safetensors: w", "b: optimizer.safetensors: w"]
    assert not report.ok


def test_a_run_without_its_last_checkpoint_differs(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "a", w=torch.zeros(3))
    report = ChaosReport(seed=0)
    compare(tmp_path / "a", tmp_path / "b", report)
    assert len(report.differing) == 2
