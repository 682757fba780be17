"""Attention over a row of packed documents, without a dense mask: transformers' layers run `flex_attention` under a block mask.

A token sees its own document, up to itself and, in a sliding-window layer, no further back than the window. Which tiles of 128 × 128 hold
something follows from the documents at their borders, by a few small operations: nothing of size T × T is formed and nothing is compiled
anew for another row. Grouped heads, capped logits and windows are supported. What a model wants beyond that (sinks, biases, chunks, masks of
its own) raises `UnsupportedAttention` in the first uncompiled pass, so that a caller can use the model's own attention instead.

Importing this module makes `PACKED` known to transformers; it works in a config only inside `documents_of_row`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

PACKED = "dflash_mp_packed"  # the name in a config's _attn_implementation
_TILE = 128
# What layers hand to an attention function and this one may ignore.
_HARMLESS = frozenset(
    {"cache_position", "layer_idx", "output_attentions", "position_embeddings", "position_ids", "use_cache"}
)
_current = threading.local()


class UnsupportedAttention(Exception):
    """The model asks for something that this attention doesn't do; the text says what."""


class PackedDocuments:
    """The documents of one row of T tokens, and the masks that keep them apart. `documents` [T]: integers, equal within a document."""

    def __init__(self, documents: torch.Tensor) -> None:
        first = torch.zeros(1, dtype=torch.int32, device=documents.device)
        changes = (documents[1:] != documents[:-1]).cumsum(0, dtype=torch.int32)
        self._runs = torch.cat((first, changes))  # ascending
        self._masks: dict[int | None, BlockMask] = {}

    def mask(self, window: int | None) -> BlockMask:
        """For full attention, or for the last `window` tokens."""
        if window not in self._masks:
            self._masks[window] = _block_mask(self._runs, window)
        return self._masks[window]

    def check(self, mask: Any, window: int | None) -> None:
        """Raise `UnsupportedAttention` unless `mask` is this row's for `window`."""
        if not any(mask is known for known in self._masks.values()):
            raise UnsupportedAttention("it makes its attention masks itself")
        if mask is not self._masks.get(window):
            raise UnsupportedAttention("its masks have another window than its attention layers")


@contextmanager
def documents_of_row(documents: torch.Tensor) -> Iterator[None]:
    """In this thread, models whose config says `PACKED` attend within these documents."""
    _current.documents = PackedDocuments(documents)
    try:
        yield
    finally:
        _current.documents = None


def _block_mask(runs: torch.Tensor, window: int | None) -> BlockMask:
    tokens = len(runs)
    seen, whole = _tiles(runs, window)
    partial = seen & ~whole
    return BlockMask.from_kv_blocks(
        partial.sum(-1, dtype=torch.int32)[None, None],
        _first(partial)[None, None],
        whole.sum(-1, dtype=torch.int32)[None, None],
        _first(whole)[None, None],
        BLOCK_SIZE=_TILE,
        mask_mod=_rule(runs, window),
        seq_lengths=(tokens, tokens),
        compute_q_blocks=False,  # for gradients
    )


def _rule(runs: torch.Tensor, window: int | None) -> Callable[..., torch.Tensor]:
    """Which columns a token sees: the one place that decides."""

    def full(batch: Any, head: Any, query: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return (column <= query) & (runs[query] == runs[column])

    if window is None:
        return full

    def sliding(batch: Any, head: Any, query: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return full(batch, head, query, column) & (query - column < window)

    return sliding


def _tiles(runs: torch.Tensor, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool [tiles, tiles] twice, of queries and columns: some pair of the tile may be visible; every pair is."""
    tile = torch.arange(-(-len(runs) // _TILE), device=runs.device)
    start = tile * _TILE
    stop = (start + _TILE - 1).clamp(max=len(runs) - 1)
    first, last = runs[start], runs[stop]
    behind = tile[:, None] - tile[None, :]
    seen = (behind >= 0) & (last[None, :] >= first[:, None])
    whole = (behind > 0) & (first[None, :] == last[:, None])
    if window is not None:
        seen &= start[:, None] - stop[None, :] < window
        whole &= stop[:, None] - start[None, :] < window
    return seen, whole


def _first(chosen: torch.Tensor) -> torch.Tensor:
    """Indices int32 along the last dimension, those of true entries first, in order."""
    return torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()


def _mask_for(
    *, q_length: int, local_size: int | None = None, use_vmap: bool = False, attention_mask: Any = None, **more: Any
) -> BlockMask:
    """What transformers calls for each kind of layer of a model."""
    documents: PackedDocuments | None = getattr(_current, "documents", None)
    if documents is None:
        raise RuntimeError("packed attention outside documents_of_row")
    if use_vmap or attention_mask is not None or more.get("allow_is_bidirectional_skip", False):
        raise UnsupportedAttention("its attention has a mask rule of its own")
    return documents.mask(local_size)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [1, heads, T, d] over `key` and `value` [1, kv_heads, T, d]: [1, T, heads, d]."""
    if not torch.compiler.is_compiling():
        _check(module, attention_mask, dropout, sliding_window, more)
    out = _kernel(query)(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def _check(module: Any, mask: Any, dropout: float, window: int | None, more: dict[str, Any]) -> None:
    strange = sorted(
        name for name, given in more.items() if name not in _HARMLESS and given is not None and given is not False
    )
    if strange:
        raise UnsupportedAttention(f"its attention has {', '.join(strange)}")
    if dropout or not getattr(module, "is_causal", True):
        raise UnsupportedAttention("its attention is not causal" if not dropout else "its attention has dropout")
    _current.documents.check(mask, window)


def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, batch: Any, head: Any, query: Any, column: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def _kernel(query: torch.Tensor) -> Any:
    """Not compiled, it forms all scores: for a CPU, and for rows that are shorter than a tile."""
    if torch.compiler.is_compiling() or query.device.type == "cpu" or query.shape[2] < _TILE:
        return flex_attention
    return _compiled(flex_attention)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False, fullgraph=True)


AttentionInterface.register(PACKED, _attend)
AttentionMaskInterface.register(PACKED, _mask_for)
