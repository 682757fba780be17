"""The target, ready to be tapped or to decode: model, tokenizer, and the facts that its drafters need.

`load_target` is the only way in. It loads everything onto one device, frozen, and fixes `TargetInfo`; two processes that load the same
target with the same configuration get equal infos. Costs the reading of the weights plus a checksum over them (16 GB/s).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dflash_mp.config import TargetConfig
from dflash_mp.stream.plan import TargetInfo
from dflash_mp.target.checksum import weights_checksum
from dflash_mp.target.families import Anatomy, attention_shape, dissect, mlp_width, norm_eps, rope_theta
from dflash_mp.target.layer_ids import choose_layer_ids
from dflash_mp.target.mask_token import choose_mask_token
from dflash_mp.target.model import load_model
from dflash_mp.target.source import locate
from dflash_mp.target.tokenizer import load_tokenizer


@dataclass
class Target:
    """A loaded target with H hidden values and V embedding rows. `model` and `anatomy` are None once a capture has freed them."""

    model: Any  # transformers causal LM, eval mode, no gradients
    tokenizer: Any
    device: torch.device
    info: TargetInfo
    embedding: torch.Tensor  # [V, H]
    head: torch.Tensor  # [V, H]
    anatomy: Anatomy | None
    attention: str = "auto"  # as configured
    ways: int = 1  # processes that share its layers (`dflash_mp.target.split`)


def load_target(config: TargetConfig) -> Target:
    """Load what `config` names. Raises `TargetError` with the remedy for everything that can be wrong with it."""
    tokenizer = load_tokenizer(config)
    return assemble(load_model(config), tokenizer, locate(config).name, config)


def assemble(model: Any, tokenizer: Any, name: str, config: TargetConfig) -> Target:
    """The target called `name` of a frozen transformers causal LM that is on its device. Raises `TargetError`."""
    anatomy = dissect(model, name)
    return Target(
        model=model,
        tokenizer=tokenizer,
        device=anatomy.embedding.device,
        info=_describe(model, tokenizer, anatomy, name, config),
        embedding=anatomy.embedding.detach(),
        head=anatomy.head.detach(),
        anatomy=anatomy,
        attention=config.attention,
    )


def _describe(model: Any, tokenizer: Any, anatomy: Anatomy, name: str, config: TargetConfig) -> TargetInfo:
    text = anatomy.config
    rows, hidden = anatomy.embedding.shape
    eos = _eos_ids(model, tokenizer, text)
    bos = _token_id(tokenizer.bos_token_id, text, "bos_token_id")
    pad = _token_id(tokenizer.pad_token_id, text, "pad_token_id")
    heads, kv_heads, head_dim = attention_shape(text)
    return TargetInfo(
        name=name,
        weights=weights_checksum({"decoder": anatomy.decoder, "head": model.get_output_embeddings()}),
        num_layers=len(anatomy.layers),
        hidden_size=hidden,
        vocab_size=rows,
        layer_ids=choose_layer_ids(len(anatomy.layers), config.taps, config.layer_ids),
        dtype=str(anatomy.embedding.dtype).removeprefix("torch."),
        mask_token_id=choose_mask_token(
            config.mask_token, tokenizer, str(text.model_type), rows, _named(bos=(bos,), pad=(pad,), eos=eos)
        ),
        bos_token_id=bos,
        eos_token_ids=eos,
        pad_token_id=pad,
        tied_head=anatomy.tied,
        intermediate_size=mlp_width(text),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=norm_eps(text),
        rope_theta=rope_theta(text),
        max_positions=int(getattr(text, "max_position_embeddings", None) or 2048),
        embedding_scale=anatomy.embedding_scale,
        logit_softcap=anatomy.logit_softcap,
        logit_scale=anatomy.logit_scale,
    )


def _eos_ids(model: Any, tokenizer: Any, text: Any) -> tuple[int, ...]:
    """Where the target's own `generate` stops; if it doesn't say, the config's or the tokenizer's end of text."""
    generation = getattr(model, "generation_config", None)
    for ids in (getattr(generation, "eos_token_id", None), getattr(text, "eos_token_id", None), tokenizer.eos_token_id):
        if ids is not None:
            return tuple(int(i) for i in (ids if isinstance(ids, (list, tuple)) else (ids,)))
    return ()


def _token_id(first: int | None, text: Any, name: str) -> int | None:
    found = first if first is not None else getattr(text, name, None)
    return None if found is None else int(found)


def _named(**kinds: tuple[int | None, ...]) -> dict[int, str]:
    return {token: kind for kind, tokens in kinds.items() for token in tokens if token is not None}
