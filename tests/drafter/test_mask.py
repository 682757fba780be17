"""Who sees what: the mask builders against a brute-force mask, and leaks sought in the real forward pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Batch, random_batch, small_shape, visible_of
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from dflash_mp.drafter.attention import NO_DOCUMENT, BlockLayout, attend, blockwise_mask, dense_mask, flex_mask
from dflash_mp.drafter.model import DraftModel

random_shapes = given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(8, 40),
    anchors=st.integers(1, 9),
    block_size=st.integers(2, 6),
    supervised=st.sampled_from([0.0, 0.3, 1.0]),
)
BUILDERS = [dense_mask, blockwise_mask]


def batch_of(seed: int, tokens: int, anchors: int, block_size: int, supervised: float) -> Batch:
    shape = small_shape(block_size=block_size)
    return random_batch(seed, shape, tokens=tokens, anchors=anchors, supervised=supervised)


@random_shapes
@settings(max_examples=25, deadline=None)
def test_every_builder_draws_the_brute_force_mask(seed, tokens, anchors, block_size, supervised) -> None:
    batch = batch_of(seed, tokens, anchors, block_size, supervised)
    layout, expected = batch.blocks.layout(batch.documents), visible_of(batch)
    assert torch.equal(dense_mask(layout), expected)

    context = (blockwise_mask(layout).hidden == 0).repeat_interleave(block_size, 1).unsqueeze(1)
    assert torch.equal(context, expected[..., :tokens])

    flex = flex_mask(layout)
    assert torch.equal(create_mask(flex.mask_mod, 2, 1, *expected.shape[2:], device="cpu"), expected)
    padded = torch.nn.functional.pad(expected, (0, -expected.shape[3] % 128, 0, -expected.shape[2] % 128))
    tiles = padded.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).any(5).any(3)
    assert torch.equal(flex.to_dense().bool(), tiles)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@random_shapes
@settings(max_examples=25, deadline=None)
def test_every_kernel_gives_the_same_attention_and_gradients(seed, tokens, anchors, block_size, supervised) -> None:
    batch = batch_of(seed, tokens, anchors, block_size, supervised)
    layout = batch.blocks.layout(batch.documents)
    queries = anchors * block_size
    query, *rest = material = random_attention_inputs(seed, queries, tokens)
    expected = attend(query, rest[:2], rest[2:], dense_mask(layout))
    assert expected.isfinite().all()

    out = attend(query, rest[:2], rest[2:], blockwise_mask(layout))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    gradients = (torch.autograd.grad(each.square().sum(), material) for each in (out, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)

    with torch.no_grad():
        key, value = (torch.cat(pair, 2) for pair in zip(rest[:2], rest[2:], strict=True))
        out = flex_attention(query.detach(), key, value, block_mask=flex_mask(layout), enable_gqa=True)
    torch.testing.assert_close(out, expected.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_each_query_head_gets_the_keys_of_its_group_in_flex_attention(seed: int) -> None:
    batch = batch_of(seed, 24, 5, 4, 1.0)
    layout = batch.blocks.layout(batch.documents)
    query, *rest = [each.detach() for each in random_attention_inputs(seed, 20, 24)]
    assert query.shape[1] > rest[0].shape[1] > 1
    compiled = torch.compile(attend, backend="eager", dynamic=False, fullgraph=True)
    out = compiled(query, tuple(rest[:2]), tuple(rest[2:]), flex_mask(layout))
    torch.testing.assert_close(out, attend(query, rest[:2], rest[2:], dense_mask(layout)), atol=1e-5, rtol=1e-5)


def random_attention_inputs(seed: int, queries: int, tokens: int) -> list[torch.Tensor]:
    """Query; keys and values of the context; keys and values of the draft: 4 heads share 2 key heads of 8."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [(4, queries), (2, tokens), (2, tokens), (2, queries), (2, queries)]
    return [torch.randn(2, heads, length, 8, generator=draw).requires_grad_() for heads, length in sizes]


@pytest.mark.parametrize("build", BUILDERS)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=8, deadline=None)
def test_nothing_reaches_a_block_but_its_document_before_the_anchor_and_itself(build, seed) -> None:
    shape = small_shape()
    batch = random_batch(seed, shape, rows=1, tokens=30, anchors=6)
    model = DraftModel(shape)
    model.init_weights(seed)
    blocks, size = batch.blocks, shape.block_size
    mask = build(blocks.layout(batch.documents))

    def run(features: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = model(features, noise, batch.positions, blocks.positions.flatten(1), mask)
        return hidden[0].unflatten(0, (-1, size))

    before = run(batch.features, batch.noise)
    assert before.isfinite().all()
    for column in range(30):
        features = batch.features.clone()
        features[0, column] += 10
        changed = (run(features, batch.noise) != before).flatten(1).any(1)
        sees = (blocks.anchors[0] > column) & (blocks.documents[0] == batch.documents[0, column]) & blocks.keep[0]
        assert torch.equal(changed, sees), f"features of token {column}"
    for slot in range(len(before) * size):
        noise = batch.noise.clone()
        noise[0, slot] += 10
        changed = (run(batch.features, noise) != before).flatten(2).any(2)
        assert torch.equal(changed.any(1), torch.arange(len(before)) == slot // size), f"slot {slot}"
        assert changed[slot // size].all(), "slots of a block see each other in both directions"


def test_other_rows_of_a_micro_batch_do_not_matter() -> None:
    shape = small_shape()
    batch = random_batch(5, shape, rows=3)
    model = DraftModel(shape)
    model.init_weights(1)
    inputs = (batch.features, batch.noise, batch.positions, batch.blocks.positions.flatten(1))
    mask = blockwise_mask(batch.blocks.layout(batch.documents))
    together = model(*inputs, mask)
    for row in range(3):
        alone = model(*(part[row : row + 1] for part in inputs), type(mask)(mask.hidden[row : row + 1]))
        torch.testing.assert_close(alone[0], together[row], atol=1e-6, rtol=1e-6)


def test_the_tiles_of_the_flex_mask_are_those_of_the_library() -> None:
    """`create_block_mask` forms the whole matrix and looks at every tile of it; `flex_mask` must find the same."""
    for seed, (tokens, blocks, size) in enumerate([(300, 40, 10), (256, 16, 16), (100, 3, 4), (512, 20, 8)]):
        random = torch.Generator().manual_seed(seed)
        documents = torch.randint(0, 4, (2, tokens), generator=random).sort(1).values.int()
        anchors = torch.randint(0, tokens, (2, blocks), generator=random).sort(1).values.int()
        of_anchors = documents.gather(1, anchors.long())
        unused = (torch.rand(2, blocks, generator=random) < 0.2) | (of_anchors == 0)
        layout = BlockLayout(documents, anchors, of_anchors.masked_fill(unused, NO_DOCUMENT), size)
        ours, queries = flex_mask(layout), blocks * size
        library = create_block_mask(ours.mask_mod, 2, None, queries, tokens + queries, device="cpu", BLOCK_SIZE=128)
        for part in ("kv", "full_kv", "q", "full_q"):
            assert torch.equal(listed_tiles(ours, part), listed_tiles(library, part)), (seed, part)


def listed_tiles(mask: BlockMask, part: str) -> torch.Tensor:
    count, index = getattr(mask, f"{part}_num_blocks"), getattr(mask, f"{part}_indices").long()
    listed = torch.arange(index.shape[-1]) < count[..., None]
    return torch.zeros(index.shape, dtype=torch.bool).scatter_(-1, index, listed)
