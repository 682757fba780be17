"""Which token becomes the mask token."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_mp.bench.tiny import tiny_tokenizer
from dflash_mp.errors import TargetError
from dflash_mp.target.mask_token import choose_mask_token

NAMES = {256: "pad", 258: "eos"}


def choose(
    configured: str | int | None = None, *, tokenizer: Any = None, family: str = "llama", rows: int = 288
) -> int:
    return choose_mask_token(configured, tokenizer or tiny_tokenizer(), family, rows, NAMES)


def test_the_configured_token_wins_as_text_or_id() -> None:
    assert choose("<|im_start|>") == 257
    assert choose(270) == 270


def test_the_tokenizers_own_mask_token_comes_next() -> None:
    assert choose() == 259


def test_without_one_a_spare_special_token_is_taken() -> None:
    tokenizer = tiny_tokenizer(mask_token=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<empty_output>"]})
    assert choose(tokenizer=tokenizer) == tokenizer.convert_tokens_to_ids("<empty_output>")


def test_else_a_spare_row_behind_the_vocabulary() -> None:
    assert choose(tokenizer=tiny_tokenizer(mask_token=False)) == 259


def test_published_ids_are_used_where_they_are_spare() -> None:
    tokenizer = tiny_tokenizer(mask_token=False)
    assert choose(tokenizer=tokenizer, family="qwen3", rows=151_936) == 151_669
    assert choose(tokenizer=tokenizer, family="qwen3", rows=288) == 259  # outside this embedding
    assert choose(tokenizer=tokenizer, family="lfm2") == 259  # 16 is a letter of this vocabulary


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        (288, "outside the target's 288 embedding rows"),
        (-1, "outside"),
        ("<nothing>", "not in the target's vocabulary"),
        (256, "pad token"),
        ("<|im_end|>", "eos token"),
    ],
)
def test_a_token_that_cannot_be_the_mask_is_refused(configured: str | int, message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        choose(configured)
    assert "target.mask_token" in caught.value.remedy


def test_a_tokenizers_mask_token_outside_the_embedding_is_refused() -> None:
    with pytest.raises(TargetError, match="outside the target's 259 embedding rows"):
        choose(rows=259)


def test_a_target_without_any_spare_token_is_refused_with_the_option_to_set() -> None:
    with pytest.raises(TargetError, match="no spare one") as caught:
        choose(tokenizer=tiny_tokenizer(mask_token=False), rows=259)
    assert "target.mask_token" in caught.value.remedy
