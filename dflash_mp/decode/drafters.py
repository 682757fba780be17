"""Drafters to decode with: an export, a run's newest checkpoint, or an untrained one; fitted to a loaded target.

A drafter of another target's shape, or one trained with another chat template, is refused: it would decode correctly, slowly, and
without a word about why.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_mp.data.chat_template import chat_template_fingerprint
from dflash_mp.decode.speculative import ModelDrafter
from dflash_mp.drafter import checkpoint
from dflash_mp.drafter.model import DraftModel
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.drafter.state import plan_of
from dflash_mp.drafter.zlab import Origin, load_export, origin_of, read_config
from dflash_mp.errors import CheckpointError
from dflash_mp.target.load import Target


@dataclass(frozen=True)
class TrainedDrafter:
    """Weights on the CPU, and where they come from (None: not this package's)."""

    name: str
    shape: DrafterShape
    weights: dict[str, torch.Tensor]
    origin: Origin | None


def read_drafter(path: Path) -> TrainedDrafter:
    """The drafter in `path`: an exported or published one, a run directory or a checkpoint. Raises `CheckpointError`."""
    directory = checkpoint.find(path)
    if directory is not None:
        weights, state = checkpoint.load_weights(directory)
        shape = DrafterShape.from_json(json.dumps(state["shape"]))
        step = int(state["step"])
        return TrainedDrafter(f"step {step}", shape, weights, Origin.of(plan_of(state, directory), step))
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} holds neither a checkpoint nor an exported drafter",
            "train first, or name a run directory or an export with --drafter",
        )
    origin = origin_of(read_config(path), path / "config.json")
    shape, weights = load_export(path)
    return TrainedDrafter(path.absolute().name, shape, weights, origin)


def untrained_drafter(shape: DrafterShape, seed: int) -> TrainedDrafter:
    """A drafter as training begins with it."""
    with torch.device("meta"):
        model = DraftModel(shape)
    model.to_empty(device="cpu").init_weights(seed)
    return TrainedDrafter("untrained", shape, model.state_dict(), None)


def fit(drafter: TrainedDrafter, target: Target) -> ModelDrafter:
    """Put `drafter` on the target's device, in the target's dtype. Raises `CheckpointError` if it is another target's."""
    refuse_other_target(drafter, target)
    with torch.device("meta"):
        model = DraftModel(drafter.shape)
    model.load_state_dict(drafter.weights, strict=True, assign=True)
    model = model.to(target.device, target.embedding.dtype).eval().requires_grad_(False)
    return ModelDrafter(model, target.embedding, target.head)


def refuse_other_target(drafter: TrainedDrafter, target: Target) -> None:
    """Raise `CheckpointError` unless `drafter` fits the target and was trained with its chat template."""
    shape, info = drafter.shape, target.info
    facts: dict[str, tuple[Any, Any]] = {
        "hidden size": (shape.hidden_size, info.hidden_size),
        "vocabulary": (shape.vocab_size, info.vocab_size),
        "target layers": (shape.num_target_layers, info.num_layers),
        "logit soft-cap": (shape.logit_softcap, info.logit_softcap),
    }
    differences = [f"{what} {mine} instead of {its}" for what, (mine, its) in facts.items() if mine != its]
    if differences:
        raise CheckpointError(
            f"the drafter ({drafter.name}) was made for another target than {info.name}: {', '.join(differences)}",
            "name the drafter that was trained on this target",
        )
    template = chat_template_fingerprint(target.tokenizer)
    if drafter.origin is not None and drafter.origin.chat_template != template:
        raise CheckpointError(
            f"the drafter ({drafter.name}) was trained with another chat template "
            f"({drafter.origin.chat_template}) than this target's ({template}); few of its tokens would be accepted",
            "use the tokenizer that the training used, or prepare and train again with this one",
        )
