"""Which token stands for "not yet known" in a block.

It needs a row of the target's embedding and must never occur in text: the configured token, else the tokenizer's own mask token, else
the id that published drafters of the family use, else a special token that the model never saw in use, else a spare row of the
embedding behind the vocabulary. If there is none of these, or the choice can't be used, a `TargetError` says what to set.
"""

from __future__ import annotations

from typing import Any

from dflash_mp.errors import TargetError

# Ids in published drafters, by the target's model type.
_PUBLISHED = {
    "qwen2": 151669,
    "qwen2_moe": 151669,
    "qwen3": 151669,
    "qwen3_moe": 151669,
    "qwen3_5": 248070,
    "qwen3_5_text": 248070,
    "qwen3_5_moe": 248070,
    "qwen3_5_moe_text": 248070,
    "lfm2": 16,
    "lfm2_moe": 16,
}
# Special tokens that tokenizers carry in reserve.
_SPARE = (
    "<|mask|>",
    "<|MASK|>",
    "<mask>",
    "[MASK]",
    "<empty_output>",  # SmolLM, StarCoder
    "<|reserved_special_token_0|>",  # Llama 3
    "<unused0>",  # Gemma
    "[control_8]",  # Mistral
    "<|placeholder1|>",  # Phi 3
    "<|dummy_0|>",  # Phi 4
    "<|extra_0|>",
    "<|reserved_0|>",
)
_SET = "set target.mask_token to a special token (text or id) that never occurs in your text"


def choose_mask_token(
    configured: str | int | None, tokenizer: Any, model_type: str, embedding_rows: int, forbidden: dict[int, str]
) -> int:
    """Id of the mask token. `forbidden` maps ids that it can't be to their names, such as "pad" and "eos"."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if configured is not None:
        token = _configured(configured, vocabulary)
        _refuse_unusable(token, f"target.mask_token {configured!r}", embedding_rows, forbidden)
        return token
    if tokenizer.mask_token_id is not None:
        token = int(tokenizer.mask_token_id)
        _refuse_unusable(token, f"the tokenizer's mask token {tokenizer.mask_token!r}", embedding_rows, forbidden)
        return token
    after_vocabulary = max(vocabulary.values()) + 1
    published = _PUBLISHED.get(model_type)
    special = set(tokenizer.all_special_ids) | {int(i) for i in tokenizer.added_tokens_decoder}
    candidates = (
        [published] if published is not None and (published in special or published >= after_vocabulary) else []
    )
    candidates += [vocabulary[text] for text in _SPARE if text in vocabulary and vocabulary[text] in special]
    candidates.append(after_vocabulary)
    for token in candidates:
        if token < embedding_rows and token not in forbidden:
            return token
    raise TargetError(
        f"the target has no mask token, and no spare one was found among {len(vocabulary)} tokens and {embedding_rows} embedding rows",
        _SET,
    )


def _configured(configured: str | int, vocabulary: dict[str, int]) -> int:
    if isinstance(configured, int):
        return configured
    if configured not in vocabulary:
        raise TargetError(f"target.mask_token {configured!r} is not in the target's vocabulary", _SET)
    return vocabulary[configured]


def _refuse_unusable(token: int, what: str, embedding_rows: int, forbidden: dict[int, str]) -> None:
    if not 0 <= token < embedding_rows:
        raise TargetError(f"{what} (id {token}) is outside the target's {embedding_rows} embedding rows", _SET)
    if token in forbidden:
        raise TargetError(f"{what} (id {token}) is the target's {forbidden[token]} token", _SET)
