"""The drafter's shape: every number that its weights, its exported config and its decoding depend on.

Hidden size, vocabulary, taps and RoPE come from the target (`TargetInfo`) and can't be chosen; layers, block size, heads and MLP width
can (`DrafterConfig`), and what is left out is the target's. Numbers that can't go together raise `ConfigError` before any weight exists.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from dflash_mp.config import DrafterConfig
from dflash_mp.errors import ConfigError
from dflash_mp.stream.plan import TargetInfo


@dataclass(frozen=True)
class DrafterShape:
    """Immutable; `ConfigError` at construction when the numbers don't fit together."""

    layers: int
    hidden_size: int  # the target's: embedding and head are shared
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int  # tokens of a block, the anchor included
    layer_ids: tuple[int, ...]  # tapped target layers, 0-based
    mask_token_id: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    num_target_layers: int  # all decoder layers of the target
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for what, remedy in _faults(self):
            raise ConfigError(what, remedy)

    @staticmethod
    def from_config(config: DrafterConfig, target: TargetInfo) -> DrafterShape:
        """The shape that `config` asks for on this `target`. Raises `ConfigError`."""

        def given(value: int | None, default: int) -> int:
            return default if value is None else value

        return DrafterShape(
            layers=config.layers,
            hidden_size=target.hidden_size,
            intermediate_size=given(config.intermediate_size, target.intermediate_size),
            heads=given(config.heads, target.heads),
            kv_heads=given(config.kv_heads, target.kv_heads),
            head_dim=given(config.head_dim, target.head_dim),
            block_size=config.block_size,
            layer_ids=tuple(target.layer_ids),
            mask_token_id=target.mask_token_id,
            vocab_size=target.vocab_size,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope_theta,
            max_positions=target.max_positions,
            num_target_layers=target.num_layers,
            embedding_scale=target.embedding_scale,
            logit_softcap=target.logit_softcap,
            logit_scale=target.logit_scale,
            bos_token_id=target.bos_token_id,
            eos_token_ids=tuple(target.eos_token_ids),
            pad_token_id=target.pad_token_id,
        )

    @property
    def feature_width(self) -> int:
        """K·H: values per token of the target's tapped hidden states."""
        return len(self.layer_ids) * self.hidden_size

    def parameter_count(self) -> int:
        """Trained parameters: the layers, `fc` and the two norms outside them. Embedding and head are the target's."""
        h, q, kv = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = 2 * h * q + 2 * h * kv + 3 * h * self.intermediate_size + 2 * h + 2 * self.head_dim
        return self.layers * layer + self.feature_width * h + 2 * h

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives an equal shape back."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> DrafterShape:
        """Read what `to_json` wrote. Raises `ConfigError` on anything else."""
        try:
            tree: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"the drafter's shape is not JSON: {error}", "the file is damaged: restore it") from None
        known = {field.name for field in fields(DrafterShape)}
        if not isinstance(tree, dict) or set(tree) != known:
            keys = set(tree) if isinstance(tree, dict) else set()
            raise ConfigError(
                f"the drafter's shape has missing keys {sorted(known - keys)} and unknown keys {sorted(keys - known)}",
                "it was written by another version of dflash-mp, or is damaged",
            )
        tuples = {
            key: tuple(tree[key]) for key in ("layer_ids", "eos_token_ids") if isinstance(tree[key], (list, tuple))
        }
        return DrafterShape(**{**tree, **tuples})


_COUNTS = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size", "max_positions")


def _faults(shape: DrafterShape) -> list[tuple[str, str]]:
    """(what is wrong, remedy) of each fault; empty for a sound shape."""
    found = [
        (f"the drafter's {key} is {getattr(shape, key)!r}, not a positive whole number", f"set drafter.{key} ≥ 1")
        for key in _COUNTS
        if not isinstance(getattr(shape, key), int) or getattr(shape, key) < 1
    ]
    if found:
        return found
    if shape.heads % shape.kv_heads:
        found.append(
            (
                f"{shape.heads} attention heads can't share {shape.kv_heads} key/value heads evenly",
                "choose drafter.heads as a multiple of drafter.kv_heads",
            )
        )
    if shape.head_dim % 2:
        found.append((f"head_dim {shape.head_dim} is odd: RoPE turns pairs", "set drafter.head_dim to an even number"))
    if shape.block_size < 2:
        found.append((f"block_size {shape.block_size} leaves nothing to predict", "set drafter.block_size ≥ 2"))
    return found + _target_faults(shape)


def _target_faults(shape: DrafterShape) -> list[tuple[str, str]]:
    found = []
    ids = shape.layer_ids
    if not ids or any(after <= before for before, after in itertools.pairwise(ids)):
        found.append((f"tapped layers {ids} aren't an increasing list", "set target.layer_ids, for example [1, 6, 11]"))
    elif ids[0] < 0 or ids[-1] > shape.num_target_layers - 2:
        found.append(
            (
                f"tapped layers {ids} leave 0 … {shape.num_target_layers - 2} of a target with {shape.num_target_layers} "
                "layers (the last layer can't be tapped: implementations disagree on its norm)",
                "correct target.layer_ids",
            )
        )
    if not 0 <= shape.mask_token_id < shape.vocab_size:
        found.append(
            (
                f"mask token {shape.mask_token_id} is outside the target's {shape.vocab_size} embedding rows",
                "set target.mask_token to an unused token of the vocabulary",
            )
        )
    elif shape.mask_token_id == shape.pad_token_id or shape.mask_token_id in shape.eos_token_ids:
        found.append(
            (
                f"mask token {shape.mask_token_id} is the target's pad or end-of-text token",
                "set target.mask_token to an unused token of the vocabulary",
            )
        )
    if shape.rope_theta <= 0 or shape.rms_norm_eps <= 0:
        found.append(
            (
                f"rope_theta {shape.rope_theta} and rms_norm_eps {shape.rms_norm_eps} must be positive",
                "the target's config is unusual or damaged",
            )
        )
    return found
