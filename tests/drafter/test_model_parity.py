"""The drafter gives the official class's numbers, and the same numbers in training and in decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import random_batch, small_shape

from dflash_mp.drafter.attention import blockwise_mask, dense_mask
from dflash_mp.drafter.model import DraftCache, DraftModel, rotation
from dflash_mp.drafter.shape import DrafterShape

shapes = st.builds(
    lambda layers, kv, group, half, width, block, taps: small_shape(
        layers=layers,
        heads=kv * group,
        kv_heads=kv,
        head_dim=2 * half,
        hidden_size=width,
        block_size=block,
        layer_ids=tuple(range(taps)),
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 8),
    st.integers(8, 40),
    st.integers(2, 8),
    st.integers(1, 4),
)


def model_of(shape: DrafterShape, seed: int = 0) -> DraftModel:
    model = DraftModel(shape)
    model.init_weights(seed)
    with torch.no_grad():  # norms of 1 would hide a norm that is left out or misplaced
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.dim() > 1 else parameter.add_(torch.sin(torch.arange(len(parameter))) * 0.3)
    return model


def official(model: DraftModel) -> tuple[Any, Any]:
    """z-lab's class with the same weights, and its module; skips where that isn't installed."""
    dflash = pytest.importorskip("dflash.model", reason="pip install --no-deps dflash==0.1.0")
    from transformers import Qwen3Config

    shape = model.shape
    config = Qwen3Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=shape.max_positions,
        attention_bias=False,
    )
    config.num_target_layers = shape.num_target_layers
    config.dflash_config = {
        "target_layer_ids": list(shape.layer_ids),
        "mask_token_id": shape.mask_token_id,
        "block_size": shape.block_size,
        "final_logit_softcapping": shape.logit_softcap,
        "output_multiplier": shape.logit_scale,
    }
    theirs = dflash.DFlashDraftModel(config).eval()
    theirs.load_state_dict(model.state_dict(), strict=True)
    for (
        parameter
    ) in theirs.parameters():  # `.to()` would round the RoPE frequencies, which loading a checkpoint doesn't
        parameter.data = parameter.data.to(model.fc.weight.dtype)
    return theirs, dflash


@given(shape=shapes, seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=12, deadline=None)
@torch.no_grad()
def test_training_forward_equals_the_official_class(shape, seed, dtype) -> None:
    batch = random_batch(seed, shape)
    model = model_of(shape, seed).to(dtype)
    theirs, _ = official(model)
    mask, places = dense_mask(batch.blocks.layout(batch.documents)), batch.blocks.positions.flatten(1)
    mine = model(batch.features, batch.noise, batch.positions, places, mask)
    expected = theirs(
        position_ids=torch.cat((batch.positions, places), 1),
        attention_mask=mask,
        noise_embedding=batch.noise.to(dtype),
        target_hidden=batch.features.to(dtype),
    )
    if dtype == torch.bfloat16:
        assert torch.equal(mine, expected)
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


@given(shape=shapes, seed=st.integers(0, 1000))
@settings(max_examples=12, deadline=None)
@torch.no_grad()
def test_decoding_equals_the_official_class_step_by_step(shape, seed) -> None:
    model = model_of(shape, seed)
    theirs, dflash = official(model)
    draw = torch.Generator().manual_seed(seed)
    mine, cache, start = DraftCache(shape.layers, capacity=4), dflash._make_cache(theirs.config), 0
    for new in (7, 1, shape.block_size, 2, 3):
        features = torch.randn(1, new, shape.feature_width, generator=draw)
        noise = torch.randn(1, shape.block_size, shape.hidden_size, generator=draw)
        positions = torch.arange(start, start + new + shape.block_size)[None]
        start += new
        expected = theirs(
            position_ids=positions, noise_embedding=noise, target_hidden=features, past_key_values=cache, use_cache=True
        )
        dflash._crop_to(cache, start)
        out = model.draft_block(features, noise, positions, mine)
        assert mine.length == start
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@given(shape=shapes, seed=st.integers(0, 1000), chunks=st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
@torch.no_grad()
def test_a_training_block_equals_the_decoded_block(shape, seed, chunks) -> None:
    batch = random_batch(seed, shape, rows=1, tokens=30, supervised=0.9)
    model, blocks = model_of(shape, seed), batch.blocks
    mask = blockwise_mask(blocks.layout(batch.documents))
    hidden = model(batch.features, batch.noise, batch.positions, blocks.positions.flatten(1), mask)
    for number in range(int(blocks.keep.sum())):
        anchor, slots = (
            int(blocks.anchors[0, number]),
            slice(number * shape.block_size, (number + 1) * shape.block_size),
        )
        start = int((batch.documents[0] == blocks.documents[0, number]).nonzero()[0])
        cache, at, step = DraftCache(shape.layers, capacity=1), start, 0
        while True:  # the document's features arrive in chunks, with a draft after each, as in decoding
            new = min(chunks[step % len(chunks)], anchor - at)
            at, step = at + new, step + 1
            context = torch.arange(at - new, at)
            positions = torch.cat((batch.positions[0, context], batch.blocks.positions[0, number] - anchor + at))
            out = model.draft_block(batch.features[:, context], batch.noise[:, slots], positions[None], cache)
            if at == anchor:
                break
        torch.testing.assert_close(out, hidden[:, slots], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_logits_equal_the_official_class() -> None:
    model = model_of(small_shape(logit_scale=0.25, logit_softcap=3.0))
    theirs, _ = official(model)
    hidden, head = torch.randn(1, 5, 24), torch.nn.Linear(24, 61, bias=False)
    torch.testing.assert_close(model.compute_logits(hidden, head.weight), theirs.compute_logits(hidden, head))


@torch.no_grad()
def test_rope_angles_stay_fp32_in_a_bf16_module() -> None:
    positions = torch.tensor([[0, 1, 1000, 4097]])
    wide, narrow = (rotation(positions, 64, 1e6, dtype) for dtype in (torch.float32, torch.bfloat16))
    for exact, rounded in zip(wide, narrow, strict=True):
        assert torch.equal(exact.bfloat16(), rounded)
