"""A target's numbers without loading it: its configuration, and the headers of its weight files.

Costs reading some kilobytes. A hub id is looked up among what is cached on this machine; the network is not used.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from dflash_mp.config import TargetConfig
from dflash_mp.errors import TargetError
from dflash_mp.stream.plan import TargetInfo
from dflash_mp.target.families import attention_shape, mlp_width, norm_eps, rope_theta
from dflash_mp.target.layer_ids import choose_layer_ids
from dflash_mp.target.source import LOADING_ERRORS, TargetSource, locate, unloadable

_INDEX = "model.safetensors.index.json"
_HEADER_LENGTH = 8
_LONGEST_HEADER = 100 << 20


@dataclass(frozen=True)
class TargetSize:
    """`info` has the numbers that sizes depend on; its mask token and checksums mean nothing. `parameters` counts all of the checkpoint, 0 where it isn't known."""

    info: TargetInfo
    parameters: int


def read_target_size(config: TargetConfig, dtype: str) -> TargetSize:
    """The size of the target that `config` names, whose features will have `dtype`. Raises `TargetError`."""
    source = locate(config)
    arguments = source.load_arguments(config)
    if not source.local:
        arguments["local_files_only"] = True
    try:
        text = AutoConfig.from_pretrained(source.location, **arguments).get_text_config(decoder=True)
        parameters = _parameters(source, config)
    except LOADING_ERRORS as error:
        raise unloadable("configuration", source, config, error) from error
    return TargetSize(_info(text, source.name, config, dtype), parameters)


def parameters_of(directory: Path) -> int:
    """Values in the safetensors files of `directory`. Raises `TargetError` if there are none, or one is damaged."""
    index = directory / _INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise TargetError(f"{directory} holds no safetensors weights", "fetch the whole checkpoint again")
    return sum(_values(directory / name) for name in names)


def _values(file: Path) -> int:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_HEADER_LENGTH), "little")
        if not 2 <= length <= _LONGEST_HEADER:
            raise TargetError(f"{file} is no safetensors file", "fetch the checkpoint again")
        header: dict[str, Any] = json.loads(opened.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _parameters(source: TargetSource, config: TargetConfig) -> int:
    if source.gguf_path is not None:
        from gguf import GGUFReader

        return sum(int(tensor.n_elements) for tensor in GGUFReader(source.gguf_path).tensors)
    if source.local:
        return parameters_of(Path(source.location))
    from huggingface_hub import snapshot_download

    return parameters_of(Path(snapshot_download(source.location, revision=config.revision, local_files_only=True)))


def _info(text: Any, name: str, config: TargetConfig, dtype: str) -> TargetInfo:
    heads, kv_heads, head_dim = attention_shape(text)
    layers = int(text.num_hidden_layers)
    return TargetInfo(
        name=name,
        weights="",
        num_layers=layers,
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        layer_ids=choose_layer_ids(layers, config.taps, config.layer_ids),
        dtype=dtype,
        mask_token_id=0,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
        tied_head=bool(getattr(text, "tie_word_embeddings", False)),
        intermediate_size=mlp_width(text),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=norm_eps(text),
        rope_theta=rope_theta(text),
        max_positions=int(getattr(text, "max_position_embeddings", None) or 2048),
    )
