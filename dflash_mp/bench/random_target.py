"""Targets of a named shape with random weights, made on the device: no checkpoint is read, or written.

`write_target_files` writes what else a target's directory holds (config, tokenizer); `random_target` loads such a directory with weights that
are a function of the seed, the kind of device and PyTorch's version, so that feeders of one machine serve the same rows. The tokenizer has a
token for each byte, whatever the vocabulary's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from dflash_mp.bench.tiny import tiny_tokenizer
from dflash_mp.config import TargetConfig
from dflash_mp.target.load import Target, assemble
from dflash_mp.target.model import target_device, target_dtype
from dflash_mp.target.source import locate
from dflash_mp.target.tokenizer import load_tokenizer


@dataclass(frozen=True)
class TargetShape:
    """A dense decoder of the Qwen3 family."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False

    def config(self) -> Qwen3Config:
        """As transformers wants it, the special tokens those of the byte-level tokenizer."""
        tokenizer = tiny_tokenizer()
        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=40_960,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=self.tied,
            architectures=["Qwen3ForCausalLM"],
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )


SHAPES = {
    "8b": TargetShape(36, 4096, 12288, 32, 8, 128, 151_936),
    "0.6b": TargetShape(28, 1024, 3072, 16, 8, 128, 151_936, tied=True),
    "tiny": TargetShape(8, 96, 192, 3, 1, 32, 320),
}


def write_target_files(directory: Path, shape: TargetShape) -> None:
    """Write everything but weights into `directory`, which is made if missing."""
    directory.mkdir(parents=True, exist_ok=True)
    shape.config().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)


def random_target(config: TargetConfig, seed: int = 0) -> Target:
    """As `load_target` of the directory `config.path`, but with random weights. Raises `TargetError`."""
    source, device = locate(config), target_device(config.device)
    model_config = AutoConfig.from_pretrained(source.location)
    attention = None if config.attention in ("auto", "packed") else config.attention
    model = random_model(model_config, device, target_dtype(config.dtype, device), seed, attention)
    return assemble(model, load_tokenizer(config), source.name, config)


def random_model(
    config: Any, device: torch.device, dtype: torch.dtype, seed: int = 0, attention: str | None = None
) -> Any:
    """A transformers causal LM of that `config`, frozen and in eval mode, made on `device`. Leaves PyTorch's random state as it was."""
    arguments = {} if attention is None else {"attn_implementation": attention}
    cuda = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **arguments)
    return model.to(device).eval().requires_grad_(False)
