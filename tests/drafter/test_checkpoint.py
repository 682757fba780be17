from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_mp.drafter import checkpoint
from dflash_mp.drafter.checkpoint import Checkpoint
from dflash_mp.errors import CheckpointError


def write(run_dir: Path, step: int, keep: int = 2) -> Path:
    weights = {"w": torch.randn(5, 7)}
    return checkpoint.save(run_dir, Checkpoint(step, weights, {"m": torch.ones(3)}, {"plan": {}, "shape": {}}), keep)


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    weights = {"w": torch.randn(5, 7), "b": torch.randn(3).to(torch.bfloat16)}
    saved = Checkpoint(12, weights, {"m": torch.rand(2)}, {"plan": {"a": 1}, "shape": {"b": 2}})
    loaded = checkpoint.load(checkpoint.save(tmp_path, saved, keep=1))
    assert loaded.step == 12
    assert (loaded.state["plan"], loaded.state["shape"]) == ({"a": 1}, {"b": 2})
    for name, tensor in weights.items():
        assert torch.equal(loaded.weights[name], tensor)
        assert loaded.weights[name].dtype == tensor.dtype


def test_the_newest_is_found_and_the_oldest_are_removed(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path) is None
    for step in (5, 100, 20):
        write(tmp_path, step, keep=2)
    assert checkpoint.steps_of(tmp_path) == [20, 100]
    assert checkpoint.find(tmp_path) == tmp_path / "checkpoints" / "step-00000100"
    assert checkpoint.find(tmp_path / "checkpoints" / "step-00000020") is not None


def test_an_unfinished_write_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "checkpoints" / ".step-00000002.77.tmp").mkdir()
    assert checkpoint.find(tmp_path) == tmp_path / "checkpoints" / "step-00000001"
    write(tmp_path, 3)
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_damage_is_named_and_never_loaded(tmp_path: Path, name: str, damage: str) -> None:
    directory = write(tmp_path, 4)
    file = directory / name
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-5])
    elif damage == "flip":
        content[-3] ^= 0x10
        file.write_bytes(content)
    else:
        file.unlink()
    says = {"cut": "cut short", "flip": "checksum differs", "gone": "missing"}[damage]
    with pytest.raises(CheckpointError, match=rf"{name} is .*{says}[\s\S]*remove {directory}"):
        checkpoint.load(directory)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, 4)
    state = json.loads((directory / "state.json").read_text())
    (directory / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load(directory)
    (directory / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(directory)


_SAVE_BIG = """
import resource, signal, sys
from pathlib import Path
import torch
from dflash_mp.drafter import checkpoint
from dflash_mp.drafter.checkpoint import Checkpoint
from dflash_mp.errors import CheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    weights = {"w": torch.ones(1 << 16)}
    checkpoint.save(Path(sys.argv[1]), Checkpoint(2, weights, {"m": torch.ones(3)}, {"plan": {}, "shape": {}}), 2)
except CheckpointError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("largest", [1000, 100_000])
def test_a_write_that_is_cut_off_is_one_clear_error_and_the_last_checkpoint_stands(
    tmp_path: Path, largest: int
) -> None:
    before = write(tmp_path, 1)
    command = [sys.executable, "-c", _SAVE_BIG, str(tmp_path), str(largest)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 6, done.stderr
    assert "cannot write the checkpoint of step 2" in done.stdout
    assert "File too large" in done.stdout
    assert "Traceback" not in done.stderr
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == [before.name]
    assert checkpoint.load(before).step == 1


def test_a_full_disk_is_one_clear_error_and_the_last_checkpoint_stands(small_disk: Path) -> None:
    before = write(small_disk, 1)
    big = Checkpoint(2, {"w": torch.ones(1 << 16)}, {"m": torch.ones(3)}, {"plan": {}, "shape": {}})
    with pytest.raises(CheckpointError, match=r"step 2 to .*No space left"):
        checkpoint.save(small_disk, big, 2)
    assert [entry.name for entry in (small_disk / "checkpoints").iterdir()] == [before.name]
    assert checkpoint.load(before).step == 1


def test_a_read_only_file_system_is_one_clear_error_and_the_last_checkpoint_stands(small_disk: Path) -> None:
    before = write(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"step 2 to .*Read-only file system"):
        write(small_disk, 2)
    assert checkpoint.load(before).step == 1


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a directory should be")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 3"):
        write(tmp_path, 3)
