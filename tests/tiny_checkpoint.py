"""A checkpoint as training would leave it, of a drafter that wasn't trained: for what comes after training."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_mp.config import RunConfig
from dflash_mp.data.store import PreparedDataset
from dflash_mp.drafter import checkpoint
from dflash_mp.drafter.model import DraftModel
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.stream.codec import plain
from dflash_mp.stream.plan import DataPlan, StreamPlan
from dflash_mp.target.load import load_target


def write_tiny_checkpoint(config: RunConfig, step: int = 4, seed: int = 7) -> Path:
    """Write the checkpoint of `step` into the run directory of `config`, whose dataset is prepared, and return its directory."""
    manifest = PreparedDataset.open(config.data.path).manifest
    data = DataPlan(
        dataset=manifest.fingerprint,
        seed=config.seed,
        row_tokens=manifest.row_tokens,
        rows=manifest.train.rows,
        held_out_rows=manifest.held_out.rows,
        tokenizer=manifest.tokenizer,
        chat_template=manifest.chat_template,
        thinking=manifest.thinking,
    )
    plan = StreamPlan(data, load_target(config.target).info)
    shape = DrafterShape.from_config(config.drafter, plan.target)
    model = DraftModel(shape)
    model.init_weights(seed)
    state = {"plan": plain(plan), "shape": json.loads(shape.to_json()), "config": config.model_dump(mode="json")}
    return checkpoint.save(config.run_dir, checkpoint.Checkpoint(step, model.state_dict(), {}, state), keep=2)
