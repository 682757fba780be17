"""Checkpoints: safetensors and JSON, written whole or not at all.

`RUN/checkpoints/step-00000500/` holds `weights.safetensors` (fp32 masters under the drafter's own names), `optimizer.safetensors`
(moments and random state) and `state.json` (step, seed, plan, shape, and the size and checksum of both files). A checkpoint is written under a temporary
name, flushed to disk, and renamed; a directory that has its final name is therefore complete unless the disk damaged it later, and
`load` checks sizes and checksums before anything is used. Nothing in a checkpoint is ever executed.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_mp.drafter.steps import steps_of
from dflash_mp.errors import CheckpointError

FORMAT = 1
_TENSOR_FILES = ("weights.safetensors", "optimizer.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory. `weights`: fp32 masters; `optimizer`: moments; `state`: the facts of state.json."""

    step: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, Any]


def save(run_dir: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write `checkpoint` below `run_dir`, keep the newest `keep`, and return its directory. Raises `CheckpointError`."""
    parent = run_dir / "checkpoints"
    final = parent / f"step-{checkpoint.step:08d}"
    temporary = parent / f".step-{checkpoint.step:08d}.{os.getpid()}.tmp"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(".step-*.tmp"):
            shutil.rmtree(stale)
        temporary.mkdir()
        for name, tensors in zip(_TENSOR_FILES, (checkpoint.weights, checkpoint.optimizer), strict=True):
            save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, temporary / name)
        files = {name: _size_and_checksum(temporary / name) for name in _TENSOR_FILES}
        facts = {"format": FORMAT, "step": checkpoint.step, **checkpoint.state, "files": files}
        (temporary / "state.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        for path in [*temporary.iterdir(), temporary]:
            flush(path)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        flush(parent)
        for old in steps_of(run_dir)[:-keep]:
            shutil.rmtree(parent / f"step-{old:08d}")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"cannot write the checkpoint of step {checkpoint.step} to {parent}: {getattr(error, 'strerror', None) or error}",
            "free space or permissions there; earlier checkpoints are untouched, and the same command resumes from the last",
        ) from error
    return final


def find(path: Path) -> Path | None:
    """The newest checkpoint of a run directory, or `path` itself when it is a checkpoint; None when there is none."""
    if (path / "state.json").is_file():
        return path
    steps = steps_of(path)
    return path / "checkpoints" / f"step-{steps[-1]:08d}" if steps else None


def read_state(directory: Path) -> dict[str, Any]:
    """The facts of `state.json`, checked for its format. Raises `CheckpointError`."""
    file = directory / "state.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        version = state["format"]
        complete = {"step", "files", "plan", "shape"} <= set(state)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", _remove(directory)) from None
    if version != FORMAT:
        raise CheckpointError(
            f"{directory} is a checkpoint of format {version}; this version of dflash-mp reads format {FORMAT}",
            "resume with the version that wrote it, or start in a new run_dir",
        )
    if not complete:
        raise CheckpointError(f"{file} lacks some of its entries", _remove(directory))
    return dict(state)


def load(directory: Path) -> Checkpoint:
    """Read a checkpoint onto the CPU, after checking sizes and checksums. Raises `CheckpointError` naming the damaged file."""
    state = read_state(directory)
    weights, optimizer = (_load_tensors(directory, name, state) for name in _TENSOR_FILES)
    return Checkpoint(int(state["step"]), weights, optimizer, state)


def load_weights(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The fp32 weights and the facts of `state.json`, checked as by `load`, without reading the optimizer's file."""
    state = read_state(directory)
    return _load_tensors(directory, _TENSOR_FILES[0], state), state


def _load_tensors(directory: Path, name: str, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    _check_file(directory, name, state["files"].get(name, {}))
    try:
        tensors: dict[str, torch.Tensor] = load_file(directory / name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory} cannot be read: {error}", _remove(directory)) from error
    return tensors


def _check_file(directory: Path, name: str, expected: dict[str, Any]) -> None:
    path = directory / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", _remove(directory))
    if path.stat().st_size != expected.get("bytes"):
        raise CheckpointError(
            f"{path} is cut short: {path.stat().st_size} of {expected.get('bytes')} bytes", _remove(directory)
        )
    if _size_and_checksum(path) != expected:
        raise CheckpointError(f"{path} is damaged: its checksum differs", _remove(directory))


def _remove(directory: Path) -> str:
    return f"remove {directory}; the next start then resumes from the checkpoint before it"


def _size_and_checksum(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3": digest.hexdigest()}


def flush(path: Path) -> None:
    """Have the system write what `path`, a file or directory, holds to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
