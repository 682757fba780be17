"""The target's own tokenizer, from the same place as its weights.

A Hugging Face directory or hub id is loaded as it is. A GGUF file holds a vocabulary and the *name* of a pre-tokenizer, which
transformers reads only in part; `load_tokenizer` puts back the digit splitting that it drops and refuses names that neither knows,
because a wrong pre-tokenizer gives wrong tokens without any error. Costs 0.1–1 s, for a GGUF file some 5 s.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tokenizers import decoders, pre_tokenizers
from transformers import AutoTokenizer

from dflash_mp.config import TargetConfig
from dflash_mp.errors import TargetError
from dflash_mp.target.source import LOADING_ERRORS, TargetSource, locate, unloadable

# llama.cpp's names of pre-tokenizers that split every digit off first, then split as GPT-2 does.
_DIGITS_THEN_GPT2 = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
# … that split as GPT-2 does: what transformers builds by itself.
_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"})
# … that transformers before 5.17 built rightly for the architectures it read.
_BY_ARCHITECTURE = frozenset({"qwen2", "llama-bpe", "llama3", "llama-v3"})

_SPECIAL_TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token",
    "tokenizer.ggml.eos_token_id": "eos_token",
    "tokenizer.ggml.unknown_token_id": "unk_token",
    "tokenizer.ggml.padding_token_id": "pad_token",
}


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer (a transformers tokenizer). Raises `TargetError` if there is none or it can't be rebuilt."""
    source = locate(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source.load_arguments(config))
    except Exception as error:
        # The tokenizers library raises a bare Exception for a vocabulary that makes no sense.
        if not isinstance(error, LOADING_ERRORS) and type(error) is not Exception:
            raise
        raise unloadable("tokenizer", source, config, error) from error
    if len(tokenizer) < 2:
        raise TargetError(
            f"{config.path} has no tokenizer: the vocabulary is empty",
            "copy tokenizer.json and tokenizer_config.json of the model into the directory",
        )
    if source.gguf_path is not None:
        _complete_from_gguf(tokenizer, source.gguf_path, source)
    return tokenizer


def _complete_from_gguf(tokenizer: Any, path: Path, source: TargetSource) -> None:
    """Give `tokenizer` what the GGUF file says and transformers leaves out: special tokens (before 5.17) and digit splitting."""
    found = _gguf_metadata(path, "tokenizer.ggml.model", "tokenizer.ggml.pre", *_SPECIAL_TOKENS)
    for key, name in _SPECIAL_TOKENS.items():
        if key in found:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(found[key])))
    if found.get("tokenizer.ggml.model") != "gpt2":
        return
    kind = str(found.get("tokenizer.ggml.pre", ""))
    if kind in _DIGITS_THEN_GPT2:
        backend = tokenizer.backend_tokenizer
        backend.normalizer, backend.pre_tokenizer, backend.decoder = None, digits_then_gpt2(), decoders.ByteLevel()
        tokenizer.clean_up_tokenization_spaces = False
    elif kind not in _GPT2 and kind not in _known_to_transformers():
        raise TargetError(
            f"{source.name}: the pre-tokenizer {kind or '(none named)'!r} of this GGUF file can't be rebuilt, so its tokens would be wrong",
            "use the model's Hugging Face directory or hub id as target.path",
        )


def _gguf_metadata(path: Path, *keys: str) -> dict[str, Any]:
    """Those of the metadata `keys` that the file has. Raises `TargetError` if it is not a GGUF file."""
    from gguf import GGUFReader

    try:
        fields = GGUFReader(path).fields
    except (OSError, ValueError, IndexError) as error:
        raise TargetError(f"{path} is not a readable GGUF file: {error}", "fetch it again") from error
    return {key: fields[key].contents() for key in keys if key in fields}


def digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    """SmolLM's and StarCoder's pre-tokenizer: each digit alone, the rest split as GPT-2 does."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _known_to_transformers() -> frozenset[str]:
    try:
        mapping = importlib.import_module("transformers.integrations.gguf.gguf_tokenizer_mapping")
    except ImportError:
        return _BY_ARCHITECTURE
    return frozenset(getattr(mapping, "GGUF_PRE_TOKENIZER_SPLITS", _BY_ARCHITECTURE))
