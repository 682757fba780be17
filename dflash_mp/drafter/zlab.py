"""z-lab's drafter directory: `config.json` and `model.safetensors`, the form that dflash, vLLM and SGLang load.

`drafter_config` says a shape in that form and `load_export` reads one back: an export of this package or a published drafter. A config
that asks for what `DraftModel` is not (a sliding window, scaled RoPE, biases, another architecture), a name too many or too few, or a
tensor of another shape is a `CheckpointError`: loaders that ignore such things draft from random weights. Nothing in the
directory is executed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dflash_mp import __version__
from dflash_mp.drafter.model import DraftModel
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.errors import CheckpointError, ConfigError
from dflash_mp.stream.plan import StreamPlan

ARCHITECTURE = "DFlashDraftModel"
WEIGHTS_FILE = "model.safetensors"
ORIGIN = "dflash_mp"  # key of config.json: where an export of this package comes from


@dataclass(frozen=True)
class Origin:
    """Where a drafter comes from. Stored in an export, so that decoding can refuse another chat template or thinking mode."""

    target: str  # name
    target_weights: str  # checksum
    tokenizer: str  # hash
    chat_template: str  # hash
    thinking: str  # "default", "on" or "off"
    dataset: str  # fingerprint of the prepared dataset
    step: int
    version: str = __version__

    @staticmethod
    def of(plan: StreamPlan, step: int) -> Origin:
        return Origin(
            target=plan.target.name,
            target_weights=plan.target.weights,
            tokenizer=plan.data.tokenizer,
            chat_template=plan.data.chat_template,
            thinking=plan.data.thinking,
            dataset=plan.data.dataset,
            step=step,
        )


def drafter_config(shape: DrafterShape, dtype: torch.dtype, *, tied_head: bool = False) -> dict[str, Any]:
    """The content of `config.json`. Readers differ in where they look, so `block_size` and RoPE's theta stand in both places."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "dflash_config": {
            "target_layer_ids": list(shape.layer_ids),
            "mask_token_id": shape.mask_token_id,
            "block_size": shape.block_size,
        },
        "num_target_layers": shape.num_target_layers,
        "num_hidden_layers": shape.layers,
        "layer_types": ["full_attention"] * shape.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.layers,
        "is_causal": False,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab_size,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": _one_or_list(shape.eos_token_ids),
        "pad_token_id": shape.pad_token_id,
        "tie_word_embeddings": tied_head,
        "use_cache": True,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if shape.embedding_scale != 1.0:
        config["input_embedding_scale"] = shape.embedding_scale
    if shape.logit_scale != 1.0:
        config["output_multiplier"] = shape.logit_scale
    if shape.logit_softcap is not None:
        config["final_logit_softcapping"] = shape.logit_softcap
    return config


def load_export(directory: Path) -> tuple[DrafterShape, dict[str, torch.Tensor]]:
    """Shape and weights (as stored, on the CPU) of the drafter in `directory`. Raises `CheckpointError`."""
    shape = shape_of(read_config(directory), directory / "config.json")
    return shape, load_weights(directory / WEIGHTS_FILE, shape)


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` as it stands. Raises `CheckpointError`."""
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", "name a directory that `export` wrote") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object", "name a directory that `export` wrote")
    return config


def shape_of(config: dict[str, Any], file: Path) -> DrafterShape:
    """The shape that `config` describes; `file` is named in errors. Raises `CheckpointError`."""
    _refuse_what_differs(config, file)

    def need(*names: str) -> Any:
        for name in names:
            value = drafter_value(config, name)
            if value is not None:
                return value
        raise CheckpointError(
            f"{file} lacks {names[0]}",
            "add it, or export the drafter again: guessing it would be wrong for some target",
        )

    eos = drafter_value(config, "eos_token_id")
    softcap = drafter_value(config, "final_logit_softcapping")
    try:
        return DrafterShape(
            layers=int(need("num_hidden_layers")),
            hidden_size=int(need("hidden_size")),
            intermediate_size=int(need("intermediate_size")),
            heads=int(need("num_attention_heads")),
            kv_heads=int(need("num_key_value_heads", "num_attention_heads")),
            head_dim=int(need("head_dim")),
            block_size=int(need("block_size")),
            layer_ids=tuple(int(i) for i in need("target_layer_ids")),
            mask_token_id=int(need("mask_token_id")),
            vocab_size=int(need("vocab_size")),
            rms_norm_eps=float(need("rms_norm_eps")),
            rope_theta=_rope_theta(config, file),
            max_positions=int(need("max_position_embeddings")),
            num_target_layers=int(need("num_target_layers")),
            embedding_scale=float(drafter_value(config, "input_embedding_scale", 1.0)),
            logit_softcap=None if not softcap else float(softcap),
            logit_scale=float(drafter_value(config, "output_multiplier", 1.0)),
            bos_token_id=drafter_value(config, "bos_token_id"),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            pad_token_id=drafter_value(config, "pad_token_id"),
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file} has a value of the wrong type: {error}", "export the drafter again") from None
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error.what}", "export the drafter again") from None


def drafter_value(config: dict[str, Any], name: str, default: Any = None) -> Any:
    """`name` in `dflash_config`, else at the top, as z-lab's loader looks it up."""
    inner = config.get("dflash_config")
    for place in (inner if isinstance(inner, dict) else {}, config):
        if place.get(name) is not None:
            return place[name]
    return default


def origin_of(config: dict[str, Any], file: Path) -> Origin | None:
    """Where the drafter of `config` comes from; None if this package did not export it. Raises `CheckpointError`."""
    facts = config.get(ORIGIN)
    if facts is None:
        return None
    known = {field.name: field.type for field in fields(Origin)}
    kinds = {"str": str, "int": int}
    if not isinstance(facts, dict) or any(not isinstance(facts.get(k), kinds[str(t)]) for k, t in known.items()):
        raise CheckpointError(f"{file}: the block {ORIGIN} is damaged", "export the drafter again")
    return Origin(**{name: facts[name] for name in known})


def expected_tensors(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a drafter: 11 per layer and 3."""
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in DraftModel(shape).state_dict().items()}


def load_weights(file: Path, shape: DrafterShape) -> dict[str, torch.Tensor]:
    """The tensors of `file`, whose names and shapes are exactly those of `shape`. Raises `CheckpointError`."""
    try:
        weights: dict[str, torch.Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", "export the drafter again") from None
    check_tensors(weights, shape, file)
    return weights


def check_tensors(weights: dict[str, torch.Tensor], shape: DrafterShape, where: Path) -> None:
    """Raise `CheckpointError` unless `weights` has exactly the names and shapes of `shape`; `where` is named."""
    expected = expected_tensors(shape)
    missing, unknown = sorted(set(expected) - set(weights)), sorted(set(weights) - set(expected))
    if missing or unknown:
        raise CheckpointError(
            f"{where} is not this drafter: {len(missing)} tensors missing {missing[:3]}, {len(unknown)} unknown {unknown[:3]}",
            "config and weights must come from the same drafter",
        )
    for name, value in weights.items():
        if tuple(value.shape) != expected[name]:
            raise CheckpointError(
                f"{where}: {name} is {list(value.shape)}, but the config says {list(expected[name])}",
                "config and weights must come from the same drafter",
            )


def _refuse_what_differs(config: dict[str, Any], file: Path) -> None:
    remedy = "this package reads DFlash drafters with full attention and plain RoPE"
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in (ARCHITECTURE, "Qwen3DFlashDraftModel"):
        raise CheckpointError(f"{file} is of architecture {architecture!r}, not {ARCHITECTURE}", remedy)
    layer_types = config.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types) or config.get("use_swa"):
        raise CheckpointError(f"{file} has sliding-window layers", remedy)
    if config.get("is_causal") or drafter_value(config, "causal"):
        raise CheckpointError(f"{file} asks for causal attention inside the block", remedy)
    if config.get("attention_bias"):
        raise CheckpointError(f"{file} has attention biases", remedy)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise CheckpointError(f"{file} scales RoPE ({scaling})", remedy)
    outer, inner = config.get("block_size"), (config.get("dflash_config") or {}).get("block_size")
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(
            f"{file} gives block_size {outer} at the top and {inner} in dflash_config", "make both the trained one"
        )


def _rope_theta(config: dict[str, Any], file: Path) -> float:
    flat, nested = config.get("rope_theta"), (config.get("rope_parameters") or {}).get("rope_theta")
    if flat is not None and nested is not None and float(flat) != float(nested):
        raise CheckpointError(f"{file} gives two values of rope_theta: {flat} and {nested}", "make both the target's")
    theta = flat if flat is not None else nested
    if theta is None:
        raise CheckpointError(f"{file} lacks rope_theta", "add the target's")
    return float(theta)


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)
