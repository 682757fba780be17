"""Attention within packed documents is dense attention under the mask that says the same, and nothing of that mask's size is formed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_mp.target.packed_attention import (
    PackedDocuments,
    UnsupportedAttention,
    _attend,
    _mask_for,
    documents_of_row,
)

CUTS = [[], [128], [1, 2, 150, 299], [127, 128, 256], list(range(9, 300, 9))]
WINDOWS = [None, 1, 24, 200]


def documents_of(cuts: list[int], tokens: int) -> torch.Tensor:
    """Numbers that are neither ascending nor dense, as padding (0) comes last in a row."""
    ascending = torch.bucketize(torch.arange(tokens), torch.tensor(cuts, dtype=torch.int64), right=True)
    return (len(cuts) - ascending) * 7


def dense_mask(documents: torch.Tensor, window: int | None) -> torch.Tensor:
    query, column = torch.arange(len(documents))[:, None], torch.arange(len(documents))[None, :]
    near = torch.ones_like(query == column) if window is None else query - column < window
    return (column <= query) & (documents[:, None] == documents[None, :]) & near


class Layer(torch.nn.Module):
    is_causal = True


def attend(query: Any, key: Any, value: Any, documents: torch.Tensor, window: int | None, **more: Any) -> torch.Tensor:
    with documents_of_row(documents):
        mask = _mask_for(q_length=len(documents), local_size=window)
        out, _ = _attend(Layer(), query, key, value, mask, sliding_window=window, **more)
    return out.transpose(1, 2)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("tokens", "cuts"), [*((300, cuts) for cuts in CUTS), (384, CUTS[3])])
def test_it_is_dense_attention_under_the_same_mask(tokens: int, cuts: list[int], window: int | None) -> None:
    generator = torch.Generator().manual_seed(tokens + len(cuts))
    query = torch.randn(1, 6, tokens, 16, generator=generator)
    key, value = (torch.randn(1, 2, tokens, 16, generator=generator) for _ in range(2))
    documents = documents_of(cuts, tokens)
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=dense_mask(documents, window), scale=0.3, enable_gqa=True
    )
    got = attend(query, key, value, documents, window, scaling=0.3)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)


def test_logits_are_capped() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (4 * torch.randn(1, 2, 140, 8, generator=generator) for _ in range(3))
    documents = documents_of([70], 140)
    scores = 5.0 * torch.tanh(query @ key.transpose(2, 3) * 0.5 / 5.0)
    want = scores.masked_fill(~dense_mask(documents, None), float("-inf")).softmax(-1) @ value
    torch.testing.assert_close(
        attend(query, key, value, documents, None, scaling=0.5, softcap=5.0), want, atol=2e-6, rtol=2e-5
    )


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("tokens", [300, 384, 1])
def test_the_tiles_are_those_that_hold_something(tokens: int, cuts: list[int], window: int | None) -> None:
    documents = documents_of([cut for cut in cuts if cut < tokens], tokens)
    mask = PackedDocuments(documents).mask(window)
    dense = dense_mask(documents, window)
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    for row in range(-(-tokens // 128)):
        for column in range(-(-tokens // 128)):
            tile = dense[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            what = "whole" if tile.all() and tile.shape[1] == 128 else "partial" if tile.any() else "nothing"
            found = "whole" if (row, column) in whole else "partial" if (row, column) in partial else "nothing"
            assert found == what, (row, column)
    assert not partial & whole


def listed(counts: torch.Tensor | None, indices: torch.Tensor | None) -> set[tuple[int, int]]:
    assert counts is not None
    assert indices is not None
    return {(row, int(column)) for row, count in enumerate(counts[0, 0]) for column in indices[0, 0, row, : int(count)]}


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("window", [None, 24])
def test_nothing_as_large_as_a_dense_mask_is_made(window: int | None) -> None:
    documents = documents_of(list(range(100, 4096, 100)), 4096)
    with Largest() as largest:
        PackedDocuments(documents).mask(window)
        assert 0 < largest.elements <= 4096
        dense_mask(documents, window)
        assert largest.elements == 4096**2  # what it would look like


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"s_aux": torch.zeros(2)}, "its attention has s_aux"),
        ({"position_bias": torch.zeros(2), "other": 3}, "its attention has other, position_bias"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_what_it_cannot_do_is_said(more: dict[str, Any], says: str) -> None:
    query = torch.randn(1, 2, 10, 8)
    with pytest.raises(UnsupportedAttention, match=says):
        attend(query, query, query, documents_of([5], 10), None, **more)


def test_a_mask_of_the_models_own_and_another_window_than_the_masks_are_refused() -> None:
    query, documents = torch.randn(1, 2, 10, 8), documents_of([5], 10)
    with documents_of_row(documents):
        with pytest.raises(UnsupportedAttention, match="makes its attention masks itself"):
            _attend(Layer(), query, query, query, None)
        chunks = _mask_for(q_length=10, local_size=4)
        with pytest.raises(UnsupportedAttention, match="another window"):
            _attend(Layer(), query, query, query, chunks, sliding_window=None)
        for rule in ({"use_vmap": True}, {"attention_mask": torch.ones(1, 10)}, {"allow_is_bidirectional_skip": True}):
            with pytest.raises(UnsupportedAttention, match="mask rule of its own"):
                _mask_for(q_length=10, **rule)  # type: ignore[arg-type]
