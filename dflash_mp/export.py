"""`dflash-mp export`: a checkpoint becomes a directory that dflash, vLLM and SGLang load as it is.

    OUT/model.safetensors   11 tensors per layer and 3, in the dtype asked for; no embedding, no head
    OUT/config.json         z-lab's keys, and a block `dflash_mp` that says where the drafter comes from
    OUT/README.md           what it is and how to serve it

Everything is written under a temporary name beside OUT, flushed, read back and checked: names and shapes exactly as the config says,
hidden states of a random block equal bit for bit to those of the trained weights in that dtype, and the config's values as transformers
reads them. Only then is it renamed to OUT; a failure leaves OUT as it was. Raises `CheckpointError`. Costs the weights once in memory in
float32 and twice in the exported dtype.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dflash_mp.drafter import checkpoint
from dflash_mp.drafter.model import DraftCache, DraftModel
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.drafter.state import plan_of
from dflash_mp.drafter.zlab import (
    ORIGIN,
    WEIGHTS_FILE,
    Origin,
    check_tensors,
    drafter_config,
    drafter_value,
    load_export,
    read_config,
)
from dflash_mp.errors import CheckpointError
from dflash_mp.stream.layout import FLOAT_TYPES


def export_checkpoint(source: Path, out: Path, *, dtype: str = "bfloat16", force: bool = False) -> DrafterShape:
    """Export the checkpoint `source`, or the newest one of the run directory `source`, to `out`. Raises `CheckpointError`.

    An `out` that is an earlier export is replaced; anything else that is there already needs `force`.
    """
    directory = checkpoint.find(source)
    if directory is None:
        raise CheckpointError(f"there is no checkpoint in {source}", "name a run directory or a step-… directory in it")
    _refuse_to_overwrite(source, out, force)
    weights, state = checkpoint.load_weights(directory)
    shape = DrafterShape.from_json(json.dumps(state["shape"]))
    plan = plan_of(state, directory)
    check_tensors(weights, shape, directory / "weights.safetensors")
    write_export(
        weights, shape, Origin.of(plan, int(state["step"])), out, dtype=dtype, tied=plan.target.tied_head, force=force
    )
    return shape


def write_export(
    weights: dict[str, torch.Tensor],
    shape: DrafterShape,
    origin: Origin,
    out: Path,
    *,
    dtype: str = "bfloat16",
    tied: bool = False,
    force: bool = False,
) -> None:
    """Write, check and rename to `out` a drafter with these `weights` (any floating dtype). `tied`: the target's head is tied."""
    if dtype not in FLOAT_TYPES:
        raise CheckpointError(f"cannot export in dtype {dtype!r}", f"choose one of {', '.join(FLOAT_TYPES)}")
    _refuse_to_overwrite(None, out, force)
    tensors = {name: value.detach().to("cpu", FLOAT_TYPES[dtype]).contiguous() for name, value in weights.items()}
    _refuse_non_finite(tensors)
    config = {**drafter_config(shape, FLOAT_TYPES[dtype], tied_head=tied), ORIGIN: dict(vars(origin))}
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_file(tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (temporary / WEIGHTS_FILE).chmod((temporary / "config.json").stat().st_mode)  # safetensors keeps it from others
        (temporary / "README.md").write_text(model_card(shape, origin, out.absolute().name), encoding="utf-8")
        check_export(temporary, tensors, shape)
        for path in [*temporary.iterdir(), temporary]:
            checkpoint.flush(path)
        _put_in_place(temporary, out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the export {out}: {getattr(error, 'strerror', None) or error}",
            "free space or permissions there",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_export(directory: Path, weights: dict[str, torch.Tensor], shape: DrafterShape) -> None:
    """Raise `CheckpointError` unless `directory` reads back as `shape` and drafts exactly as `weights`, in their dtype, do."""
    stored_shape, stored = load_export(directory)
    if stored_shape != shape:
        raise CheckpointError(f"{directory} reads back as {stored_shape}, not {shape}", "this is a defect: report it")
    difference = (_draft(stored, shape) - _draft(weights, shape)).abs().max()
    if not difference == 0:
        raise CheckpointError(
            f"{directory} drafts otherwise than the trained weights: hidden states differ by up to {difference:.3g}",
            "the disk or the memory is faulty: export again, elsewhere",
        )
    _check_as_transformers_reads_it(directory, shape)


def model_card(shape: DrafterShape, origin: Origin, name: str) -> str:
    """The README of an export."""
    target = origin.target
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [dflash, speculative-decoding]
---

# {name}

A DFlash drafter for `{target}`: proposes {shape.block_size - 1} tokens in one pass, which the target verifies in one pass.
{shape.layers} layers, {shape.parameter_count() / 1e6:.1f} M parameters, conditioned on the target's layers {", ".join(map(str, shape.layer_ids))}.
Embedding and head are the target's. Trained for {origin.step} steps with dflash-mp {origin.version}.

It works best with the chat template it was trained with (hash `{origin.chat_template}`, thinking: {origin.thinking}).

## Serve

Replace `TARGET` by the path or hub id of `{target}`, and `DRAFTER` by that of this directory.

vLLM:

    vllm serve TARGET --speculative-config '{{"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": {shape.block_size - 1}}}'

SGLang:

    python -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH \\
        --speculative-draft-model-path DRAFTER --speculative-num-draft-tokens {shape.block_size}

Python:

    from dflash import DFlashDraftModel
    drafter = DFlashDraftModel.from_pretrained("DRAFTER").eval()
    drafter.spec_generate(target, input_ids, max_new_tokens=256, stop_token_ids=[tokenizer.eos_token_id])
"""


def _draft(weights: dict[str, torch.Tensor], shape: DrafterShape) -> torch.Tensor:
    """Hidden states [1, B, H], as float64, of a random block after a random context of eight tokens."""
    dtype = weights["fc.weight"].dtype
    with torch.device("meta"):
        model = DraftModel(shape)
    model.load_state_dict(weights, strict=True, assign=True)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 8, shape.feature_width, generator=generator).to(dtype)
    noise = torch.randn(1, shape.block_size, shape.hidden_size, generator=generator).to(dtype)
    positions = torch.arange(8 + shape.block_size)[None]
    return model.draft_block(features, noise, positions, DraftCache(shape.layers)).double()


def _check_as_transformers_reads_it(directory: Path, shape: DrafterShape) -> None:
    from transformers import Qwen3Config

    read = Qwen3Config.from_pretrained(directory)
    nested = getattr(read, "dflash_config", {})
    values: dict[str, tuple[Any, Any]] = {
        "rope_theta": (read.rope_parameters["rope_theta"], shape.rope_theta),
        "head_dim": (read.head_dim, shape.head_dim),
        "block_size": (getattr(read, "block_size", None), shape.block_size),
        "dflash_config.block_size": (nested.get("block_size"), shape.block_size),
        "dflash_config.target_layer_ids": (nested.get("target_layer_ids"), list(shape.layer_ids)),
        "dflash_config.mask_token_id": (nested.get("mask_token_id"), shape.mask_token_id),
        "num_target_layers": (getattr(read, "num_target_layers", None), shape.num_target_layers),
        "num_hidden_layers": (read.num_hidden_layers, shape.layers),
        "num_key_value_heads": (read.num_key_value_heads, shape.kv_heads),
        "rms_norm_eps": (read.rms_norm_eps, shape.rms_norm_eps),
        "layer_types": (list(read.layer_types), ["full_attention"] * shape.layers),
    }
    wrong = [f"{key} {got!r} instead of {want!r}" for key, (got, want) in values.items() if got != want]
    if wrong:
        raise CheckpointError(f"transformers reads the export's config as {'; '.join(wrong)}", "report this defect")


def _refuse_to_overwrite(source: Path | None, out: Path, force: bool) -> None:
    if source is not None and source.resolve().is_relative_to(out.resolve()):
        raise CheckpointError(f"{out} holds the checkpoint itself", "name another output directory")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())) or _is_export(out):
        return
    if not out.is_dir():
        raise CheckpointError(f"{out} is a file", "name another output directory")
    if not force:
        raise CheckpointError(
            f"{out} exists and is not an earlier export", "name another output directory, or replace it with --force"
        )


def _is_export(out: Path) -> bool:
    if not (out / "config.json").is_file():
        return False
    try:
        return drafter_value(read_config(out), ORIGIN) is not None
    except CheckpointError:
        return False


def _refuse_non_finite(tensors: dict[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(
                f"the weight {name} is not finite in {value.dtype}",
                "export an earlier checkpoint, or with --dtype float32",
            )


def _put_in_place(temporary: Path, out: Path) -> None:
    """Rename; what was at `out` goes first to a name of its own, so that one of the two is always whole."""
    old = out.parent / f".{out.name}.{os.getpid()}.old"
    if out.exists():
        out.rename(old)
    try:
        temporary.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    checkpoint.flush(out.parent)
    shutil.rmtree(old, ignore_errors=True)
