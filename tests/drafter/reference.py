"""Slow, obvious twins of the drafter's parts, and small random material to compare them on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dflash_mp.drafter.anchors import Blocks, make_blocks
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.stream.layout import RowTensors

MASK = 3


def small_shape(**changes: Any) -> DrafterShape:
    """A drafter of a few thousand parameters; `changes` replace fields."""
    fields = {
        "layers": 2,
        "hidden_size": 24,
        "intermediate_size": 40,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "block_size": 4,
        "layer_ids": (1, 3),
        "mask_token_id": MASK,
        "vocab_size": 61,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_positions": 512,
        "num_target_layers": 6,
    }
    return DrafterShape(**{**fields, **changes})


def random_row(rng: np.random.Generator, tokens: int, shape: DrafterShape, supervised: float = 0.7) -> RowTensors:
    """A row of one to four documents and some padding."""
    padding = int(rng.integers(0, tokens // 3))
    cuts = np.sort(rng.choice(np.arange(1, tokens - padding), int(rng.integers(0, 4)), replace=False))
    lengths = np.diff([0, *cuts, tokens - padding])
    documents = np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, padding]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (*lengths, padding)]).astype(np.int32)
    mask = ((rng.random(tokens) < supervised) & (documents > 0)).astype(np.uint8)
    return RowTensors(
        torch.from_numpy(rng.standard_normal((tokens, shape.feature_width), dtype=np.float32)),
        torch.from_numpy(rng.integers(MASK + 1, shape.vocab_size, tokens).astype(np.int32)),
        torch.from_numpy(positions),
        torch.from_numpy(documents),
        torch.from_numpy(mask),
    )


@dataclass
class Batch:
    """Everything that one training forward pass takes."""

    features: torch.Tensor  # [b, T, K·H]
    positions: torch.Tensor  # [b, T]
    documents: torch.Tensor  # [b, T]
    blocks: Blocks
    noise: torch.Tensor  # [b, Q, H]
    embedding: torch.Tensor  # [V, H], the head too


def random_batch(
    seed: int, shape: DrafterShape, *, rows: int = 2, tokens: int = 24, anchors: int = 5, supervised: float = 0.7
) -> Batch:
    rng = np.random.default_rng(seed)
    drawn = [random_row(rng, tokens, shape, supervised) for _ in range(rows)]
    blocks = make_blocks(
        drawn,
        range(rows),
        seed=seed,
        anchors_per_row=anchors,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
    )
    embedding = torch.from_numpy(rng.standard_normal((shape.vocab_size, shape.hidden_size), dtype=np.float32))
    return Batch(
        torch.stack([row.features for row in drawn]),
        torch.stack([row.position_ids for row in drawn]),
        torch.stack([row.document_ids for row in drawn]),
        blocks,
        F.embedding(blocks.input_ids.flatten(1), embedding),
        embedding,
    )


def visible_slow(documents: list[int], anchors: list[int], keep: list[bool], block_size: int) -> torch.Tensor:
    """Bool [Q, T+Q], written from the method's text: one query and one column at a time."""
    tokens, queries = len(documents), len(anchors) * block_size
    seen = torch.zeros(queries, tokens + queries, dtype=torch.bool)
    for query in range(queries):
        block = query // block_size
        for column in range(tokens + queries):
            if column < tokens:
                anchor = anchors[block]
                seen[query, column] = keep[block] and column < anchor and documents[column] == documents[anchor]
            else:
                seen[query, column] = (column - tokens) // block_size == block
    return seen


def visible_of(batch: Batch) -> torch.Tensor:
    """`visible_slow` of each row: [b, 1, Q, T+Q]."""
    blocks = batch.blocks
    rows = zip(batch.documents.tolist(), blocks.anchors.tolist(), blocks.keep.tolist(), strict=True)
    return torch.stack([visible_slow(*row, blocks.block_size) for row in rows]).unsqueeze(1)


def loss_slow(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss sum, differentiable by autograd, and hits [b, N, B]: all logits at once, then one slot at a time."""
    logits = (hidden @ head.t()).float() * logit_scale
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    logits = logits.view(*labels.shape, -1)
    total = logits.sum() * 0.0
    correct = torch.zeros(labels.shape, dtype=torch.bool)
    for row in range(labels.shape[0]):
        for block in range(labels.shape[1]):
            for slot in range(1, labels.shape[2]):
                weight, label = weights[row, block, slot], labels[row, block, slot].long()
                scores = logits[row, block, slot]
                total = total + weight * (torch.logsumexp(scores, 0) - scores[label])
                correct[row, block, slot] = bool(weight > 0) and int(scores.argmax()) == int(label)
    return total, correct


def blocks_slow(row: RowTensors, anchors: list[int], block_size: int) -> list[dict[str, list[int]]]:
    """Inputs, labels, positions and scored flags of each block, a token at a time."""
    ids, positions = row.input_ids.tolist(), row.position_ids.tolist()
    documents, supervised = row.document_ids.tolist(), row.loss_mask.tolist()
    found = []
    for anchor in anchors:
        block: dict[str, list[int]] = {"inputs": [], "labels": [], "positions": [], "scored": []}
        for slot in range(block_size):
            at = anchor + slot
            there = at < len(ids) and documents[at] == documents[anchor]
            block["inputs"].append(ids[anchor] if slot == 0 else MASK)
            block["labels"].append(ids[at] if there else 0)
            block["positions"].append(positions[anchor] + slot)
            block["scored"].append(int(there and slot > 0 and supervised[at] == 1))
        found.append(block)
    return found
