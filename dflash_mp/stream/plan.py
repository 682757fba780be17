"""What a stream is made of: the facts that feeder and drafter agree on at the handshake.

`DataPlan` fixes every row's tokens, `TargetInfo` fixes every row's features; both travel in WELCOME and are stored in checkpoints.
Two feeders with equal fingerprints serve equal rows.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash_mp.stream.codec import LATER, plain

DTYPES = ("float32", "bfloat16", "float16")  # of features, embedding and head
WIRE_DTYPES = ("auto", "fp8")  # of hidden states in a row: the target's dtype, or a byte each (`fp8_rows`)


@dataclass(frozen=True)
class DataPlan:
    """The rows of a run. Row `n` of split `train` is `dataset_row(n, rows, seed)`; of `held_out`, stored row `n`."""

    dataset: str  # fingerprint of the prepared dataset
    seed: int
    row_tokens: int
    rows: int  # stored rows of the split `train`
    held_out_rows: int
    tokenizer: str  # hash of the vocabulary and special tokens
    chat_template: str  # hash of the template's text
    thinking: str  # "default", "on" or "off"

    def fingerprint(self) -> str:
        return _fingerprint(self)


@dataclass(frozen=True)
class TargetInfo:
    """The target's facts that a drafter's shape, training and export need."""

    name: str  # hub id, or the directory's name
    weights: str  # checksum of the weights that the features depend on
    num_layers: int  # all decoder layers of the target
    hidden_size: int
    vocab_size: int  # rows of the embedding
    layer_ids: tuple[int, ...]  # tapped decoder layers, 0-based: feature = hidden_states[id + 1]
    dtype: str  # of the features, the embedding and the head: "float32", "bfloat16" or "float16"
    mask_token_id: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    tied_head: bool  # the head is the embedding
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    embedding_scale: float = 1.0  # Gemma: sqrt(hidden_size)
    logit_softcap: float | None = None  # Gemma: tanh(logits / cap) · cap
    logit_scale: float = 1.0  # Granite, Cohere: logits · scale
    last_hidden: bool = field(default=False, metadata=LATER)  # rows carry the last hidden state, too
    wire_dtype: str = field(default="auto", metadata=LATER)  # one of WIRE_DTYPES

    @property
    def feature_width(self) -> int:
        """K·H: values per token in a row's features."""
        return len(self.layer_ids) * self.hidden_size

    def fingerprint(self) -> str:
        return _fingerprint(self)


@dataclass(frozen=True)
class StreamPlan:
    """All that a feeder promises: its data and its target."""

    data: DataPlan
    target: TargetInfo

    def fingerprint(self) -> str:
        return _fingerprint(self)

    def differences(self, other: StreamPlan) -> list[str]:
        """Each field that differs, as "target.layer_ids: (1, 7) here, (1, 8) there"; empty when the plans are equal."""
        mine, theirs = _flat(self), _flat(other)
        return [f"{key}: {mine[key]!r} here, {theirs[key]!r} there" for key in mine if mine[key] != theirs[key]]


def _flat(plan: StreamPlan) -> dict[str, Any]:
    return {f"{part}.{key}": value for part in ("data", "target") for key, value in asdict(getattr(plan, part)).items()}


def _fingerprint(facts: DataPlan | TargetInfo | StreamPlan) -> str:
    return hashlib.sha256(json.dumps(plain(facts), sort_keys=True).encode()).hexdigest()[:16]
