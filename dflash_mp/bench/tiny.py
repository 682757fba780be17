"""Tiny random targets: a whole Hugging Face checkpoint of 0.4 M parameters, written in well under a second.

`write_tiny_target` writes config, generation config, safetensors weights and a byte-level tokenizer with a ChatML template and a mask
token: all that the real commands need of a target. The same arguments give the same bytes. Embedding and head are ten times
wider than a trained model's initialisation so that the two best logits lie far apart and rounding can't flip a greedy choice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Family = Literal["qwen3", "qwen2", "llama", "mistral", "gemma2"]
_CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_target(
    directory: Path,
    *,
    family: Family = "qwen3",
    seed: int = 0,
    layers: int = 4,
    hidden: int = 96,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 32,
    intermediate: int = 256,
    vocab_size: int = 288,
    max_positions: int = 4096,
    sliding_window: int = 24,
    tied: bool = False,
    mask_token: bool = True,
    chat_template: bool = True,
) -> Path:
    """Write a random target into `directory` (made if missing) and return it.

    The tokenizer has 256 byte tokens and `SPECIAL_TOKENS`; embedding rows beyond them (`vocab_size`, at least 260) are spare.
    `sliding_window` is used by the families that have one (mistral: all layers, gemma2: every other layer).
    """
    tokenizer = tiny_tokenizer(mask_token=mask_token, chat_template=chat_template)
    if vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size {vocab_size} is below the {len(tokenizer)} tokens of the tokenizer")
    config_class, model_class = _CLASSES[family]
    extra: dict[str, Any] = {}
    if family in ("mistral", "gemma2"):
        extra["sliding_window"] = sliding_window
    if family == "gemma2":
        extra["query_pre_attn_scalar"] = head_dim
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        initializer_range=0.1,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        _widen(model, seed)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def tiny_tokenizer(*, mask_token: bool = True, chat_template: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one token per UTF-8 byte, ids 0–255, then `SPECIAL_TOKENS`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    special = SPECIAL_TOKENS if mask_token else SPECIAL_TOKENS[:3]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    named = {"mask_token": SPECIAL_TOKENS[3]} if mask_token else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        **named,
    )
    if chat_template:
        tokenizer.chat_template = CHATML
    return tokenizer


@torch.no_grad()
def _widen(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in {
        id(p): p for p in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    }.values():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
