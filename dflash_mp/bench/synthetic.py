"""Rows without a target: a plan of any size and rows that are a known function of their key.

For measuring the stream alone and for testing it: who receives a row can make the same row and compare.
"""

from __future__ import annotations

import torch

from dflash_mp.data.row import SPLITS, RowKey
from dflash_mp.stream.messages import Expectations
from dflash_mp.stream.plan import DataPlan, StreamPlan, TargetInfo
from dflash_mp.stream.weights import FrozenWeights

RUN = "synthetic"


def synthetic_plan(
    row_tokens: int = 64, hidden_size: int = 32, *, vocab_size: int = 128, seed: int = 0, tied_head: bool = False
) -> StreamPlan:
    """A plan whose rows have two taps of `hidden_size` in bfloat16."""
    data = DataPlan(
        dataset="synthetic",
        seed=seed,
        row_tokens=row_tokens,
        rows=1000,
        held_out_rows=8,
        tokenizer="synthetic",
        chat_template="synthetic",
        thinking="default",
    )
    target = TargetInfo(
        name="synthetic",
        weights="synthetic",
        num_layers=4,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        layer_ids=(1, 2),
        dtype="bfloat16",
        mask_token_id=0,
        bos_token_id=None,
        eos_token_ids=(1,),
        pad_token_id=None,
        tied_head=tied_head,
        intermediate_size=4 * hidden_size,
        heads=1,
        kv_heads=1,
        head_dim=hidden_size,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_positions=4096,
    )
    return StreamPlan(data, target)


def synthetic_expectations(plan: StreamPlan) -> Expectations:
    """What a drafter of this plan's run would say."""
    return Expectations(RUN, plan.data.seed, plan.data.row_tokens, wire_dtype=plan.target.wire_dtype)


def synthetic_row(key: RowKey, buffer: torch.Tensor) -> None:
    """Fill `buffer`, uint8, with random bytes that depend on `key` alone."""
    generator = torch.Generator().manual_seed(key.ordinal * len(SPLITS) + SPLITS.index(key.split))
    buffer.random_(0, 256, generator=generator)


def synthetic_weights(plan: StreamPlan) -> FrozenWeights:
    """Random embedding and head of the plan's shape."""
    generator = torch.Generator().manual_seed(1)
    shape = (plan.target.vocab_size, plan.target.hidden_size)
    embedding = torch.randn(shape, generator=generator).bfloat16()
    return FrozenWeights(
        embedding, embedding if plan.target.tied_head else torch.randn(shape, generator=generator).bfloat16()
    )
