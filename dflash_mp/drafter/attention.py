"""Which columns a draft query sees, and attention under that rule.

Queries are the `Q = N·B` slots of a row's `N` blocks. Columns are the row's `T` context tokens, then the same `Q` slots. One rule,
`visible`, decides; three builders turn it into what an attention kernel wants, and `attend` runs the kernel that belongs to a mask:

- `flex_mask`: CUDA. A block-sparse mask without a head dimension; memory O(b·Q·(T+Q)/128²).
- `blockwise_mask`: a CPU. Each block attends to the context and to its own slots; the Q×Q part is never formed. Memory O(b·N·T).
- `dense_mask`: anywhere, for reference and for `attention: sdpa` on CUDA. Memory b·Q·(T+Q) bytes.

Unused blocks see only themselves, so that no softmax is over nothing; their outputs are finite and carry no weight in the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

NO_DOCUMENT = -1  # the document of an unused block: no token's
_TILE = 128  # rows and columns of a tile of the block-sparse mask
_CONTEXT = -1  # the block of a context column: no block's


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of `b` rows stand. Integer tensors on one device."""

    documents: torch.Tensor  # [b, T] document of each context token; padding is 0
    anchors: torch.Tensor  # [b, N] row index of each block's anchor
    anchor_documents: torch.Tensor  # [b, N] document of the anchor (≥ 1); NO_DOCUMENT for an unused block
    block_size: int


class BlockwiseMask(NamedTuple):
    """`hidden` [b, N, T]: added to the scores of a block's slots on the context: 0 where visible, −inf elsewhere (float32)."""

    hidden: torch.Tensor


AttentionMask: TypeAlias = "BlockMask | BlockwiseMask | torch.Tensor"


def visible(
    column: torch.Tensor,
    column_document: torch.Tensor,
    column_block: torch.Tensor | int,
    block: torch.Tensor,
    anchor: torch.Tensor,
    anchor_document: torch.Tensor,
) -> torch.Tensor:
    """The rule: does a slot of `block` see `column`? Bool, of the arguments' broadcast shape.

    A context column (`column_block` −1) is seen when it lies in the anchor's document and strictly before the anchor: when the
    drafter runs, the target hasn't read the anchor yet. A draft column is seen by its own block's slots, in both directions.
    """
    before = (column < anchor) & (column_document == anchor_document) & (column_block == _CONTEXT)
    return before | (column_block == block)


def flex_mask(layout: BlockLayout) -> BlockMask:
    """The mask for `flex_attention`, shared by all heads. Static shapes: compiled once per (b, N, T).

    Which tiles hold something is found here, with a few eager operations, and not by `create_block_mask`: compiled for these
    lengths it took minutes, and not compiled it would form the whole Q × (T+Q) matrix.
    """
    documents, anchors, anchor_documents = layout.documents, layout.anchors, layout.anchor_documents
    tokens, size = documents.shape[1], layout.block_size
    queries = anchors.shape[1] * size

    def rule(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        in_context = column < tokens
        block = query // size
        return visible(
            column,
            documents[b, torch.where(in_context, column, 0)],
            torch.where(in_context, _CONTEXT, (column - tokens) // size),
            block,
            anchors[b, block],
            anchor_documents[b, block],
        )

    seen, whole = _tiles(rule, layout)
    partial = seen & ~whole
    return BlockMask.from_kv_blocks(
        partial.sum(-1, dtype=torch.int32)[:, None],
        _first(partial)[:, None],
        whole.sum(-1, dtype=torch.int32)[:, None],
        _first(whole)[:, None],
        BLOCK_SIZE=_TILE,
        mask_mod=rule,
        seq_lengths=(queries, tokens + queries),
    )


def dense_mask(layout: BlockLayout) -> torch.Tensor:
    """Bool [b, 1, Q, T+Q], true where visible: the `attn_mask` of scaled dot-product attention."""
    context = _context_visible(layout)
    batch, blocks, _ = context.shape
    number = torch.arange(blocks, device=context.device)
    nowhere = torch.zeros((), dtype=torch.int64, device=context.device)
    own = visible(nowhere, nowhere, number[None, :], number[:, None], nowhere, nowhere)
    size = layout.block_size
    own = own.repeat_interleave(size, 1).expand(batch, -1, -1)
    return torch.cat((context, own), 2).repeat_interleave(size, 1).unsqueeze(1)


def blockwise_mask(layout: BlockLayout) -> BlockwiseMask:
    """The mask for the CPU path: the context's part of the rule; a block's own slots need none."""
    context = _context_visible(layout)
    hidden = torch.zeros(context.shape, dtype=torch.float32, device=context.device)
    return BlockwiseMask(hidden.masked_fill_(~context, float("-inf")))


def attend(
    query: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    draft: tuple[torch.Tensor, torch.Tensor],
    mask: AttentionMask | None,
) -> torch.Tensor:
    """Attention of `query` [b, heads, Q, d] over context and draft keys and values [b, kv_heads, T or Q, d]; [b, heads, Q, d].

    `mask` None: every column is visible (decoding, where there is one block and all context precedes it).
    """
    if isinstance(mask, BlockwiseMask):
        return _attend_blockwise(query, context, draft, mask.hidden)
    key = torch.cat((context[0], draft[0]), 2)
    value = torch.cat((context[1], draft[1]), 2)
    grouped = query.shape[1] != key.shape[1]
    if isinstance(mask, BlockMask):
        if grouped:
            # Left to the kernel, one program adds up the gradient of a tile of keys over all blocks that see it and all query heads:
            # the few tiles of a document's beginning then keep a few multiprocessors busy while the others have nothing left to do.
            key, value = _for_each_query_head(key, query.shape[1]), _for_each_query_head(value, query.shape[1])
        kernel = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
        out: torch.Tensor = kernel(query, key, value, block_mask=mask)
        return out
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


def _for_each_query_head(part: torch.Tensor, heads: int) -> torch.Tensor:
    """`part` [b, kv_heads, length, d] as [b, heads, length, d]."""
    batch, kv, length, dim = part.shape
    return part[:, :, None].expand(-1, -1, heads // kv, -1, -1).reshape(batch, heads, length, dim)


def _attend_blockwise(
    query: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    draft: tuple[torch.Tensor, torch.Tensor],
    hidden: torch.Tensor,
) -> torch.Tensor:
    (context_key, context_value), (draft_key, draft_value) = context, draft
    batch, heads, queries, dim = query.shape
    kv, tokens = context_key.shape[1:3]
    blocks = hidden.shape[1]
    group, size = heads // kv, queries // blocks
    # [b, kv, N, group·B, d]: the slots of a block, of all heads that share a key head, are the rows of one matrix.
    rows = (query * dim**-0.5).view(batch, kv, group, blocks, size, dim).transpose(2, 3)
    rows = rows.reshape(batch, kv, blocks, group * size, dim)
    on_context = rows.view(batch, kv, blocks * group * size, dim) @ context_key.transpose(2, 3)
    on_context = on_context.view(batch, kv, blocks, group * size, tokens).add_(hidden[:, None, :, None])
    own_key = draft_key.view(batch, kv, blocks, size, dim)
    own_value = draft_value.view(batch, kv, blocks, size, dim)
    scores = torch.cat((on_context, rows @ own_key.transpose(3, 4)), 4)
    to_context, to_own = scores.softmax(4, dtype=torch.float32).to(query.dtype).split((tokens, size), 4)
    of_context = to_context.reshape(batch, kv, -1, tokens) @ context_value
    out = of_context.view(batch, kv, blocks, group * size, dim) + to_own @ own_value
    return out.view(batch, kv, blocks, group, size, dim).transpose(2, 3).reshape(batch, heads, queries, dim)


def _tiles(rule: Any, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool [b, Q tiles, column tiles] twice: some pair of the tile is visible; every pair is."""
    batch, blocks = layout.anchors.shape
    size, device = layout.block_size, layout.anchors.device
    queries = blocks * size
    rows = torch.arange(batch, device=device)[:, None, None]
    first_slot = torch.arange(0, queries, size, device=device)[None, :, None]
    columns = torch.arange(layout.documents.shape[1] + queries, device=device)[None, None, :]
    of_block = rule(rows, 0, first_slot, columns)  # the slots of a block see the same columns
    of_block = F.pad(of_block, (0, -of_block.shape[2] % _TILE)).unflatten(2, (-1, _TILE)).sum(3)
    of_query = F.pad(of_block.repeat_interleave(size, 1), (0, 0, 0, -queries % _TILE)).unflatten(1, (-1, _TILE))
    return of_query.amax(2) > 0, of_query.amin(2) == _TILE


def _first(chosen: torch.Tensor) -> torch.Tensor:
    """Indices int32 along the last dimension, those of true entries first, in order."""
    return torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()


def _context_visible(layout: BlockLayout) -> torch.Tensor:
    """Bool [b, N, T]: which context tokens the slots of each block see."""
    tokens, blocks = layout.documents.shape[1], layout.anchors.shape[1]
    device = layout.documents.device
    return visible(
        torch.arange(tokens, device=device),
        layout.documents[:, None, :],
        _CONTEXT,
        torch.arange(blocks, device=device)[:, None],
        layout.anchors[:, :, None],
        layout.anchor_documents[:, :, None],
    )


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)
