"""The blocks of a row: a pure function of seed and ordinal, equal to their token-by-token definition."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import MASK, blocks_slow, random_row, small_shape

from dflash_mp.drafter.anchors import anchor_candidates, draw_anchors, make_blocks

SHAPE = small_shape()
ALL = np.ones(64, dtype=bool)
ONE_DOCUMENT = np.ones(64, dtype=np.int32)


def draw(count: int, seed: int, ordinal: int) -> list[int]:
    return draw_anchors(ALL, ONE_DOCUMENT, count, seed=seed, ordinal=ordinal).tolist()


def test_anchors_are_pinned_for_ever() -> None:
    assert draw(6, 0, 0) == [0, 2, 21, 38, 43, 54]
    assert draw(6, 0, 1) == [17, 22, 31, 34, 39, 59]
    assert draw(6, 1, 0) == [3, 5, 24, 27, 54, 60]
    assert draw(6, 2**63 - 1, 2**40) == [17, 25, 32, 35, 42, 55]


def test_fewer_anchors_are_a_subset_of_more_and_all_fit() -> None:
    for count in range(1, 70):
        assert set(draw(count, 3, 9)) <= set(draw(count + 1, 3, 9))
    assert draw(100, 3, 9) == list(range(63))


def test_anchors_are_uniform() -> None:
    hits = np.zeros(64)
    for ordinal in range(2000):
        hits[draw(16, 5, ordinal)] += 1
    expected, spread = 2000 * 16 / 63, np.sqrt(2000 * 16 / 63 * (1 - 16 / 63))
    assert hits[63] == 0
    assert np.abs(hits[:63] - expected).max() < 5 * spread


@given(seed=st.integers(0, 10_000), supervised=st.sampled_from([0.2, 0.7, 1.0]))
@settings(max_examples=30, deadline=None)
def test_a_candidate_is_supervised_and_so_is_its_successor_in_the_document(seed, supervised) -> None:
    row = random_row(np.random.default_rng(seed), 40, SHAPE, supervised)
    mask, documents = row.loss_mask.tolist(), row.document_ids.tolist()
    expected = [p for p in range(39) if mask[p] and mask[p + 1] and documents[p] == documents[p + 1] != 0]
    assert anchor_candidates(row.loss_mask.numpy() != 0, row.document_ids.numpy()).tolist() == expected


@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(6, 40),
    count=st.integers(1, 30),
    size=st.integers(2, 9),
    supervised=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_blocks_equal_their_token_by_token_definition(seed, tokens, count, size, supervised) -> None:
    rng = np.random.default_rng(seed)
    rows, ordinals = [random_row(rng, tokens, SHAPE, supervised) for _ in range(3)], (7, 1, 7)
    options = {"seed": seed, "anchors_per_row": count, "block_size": size, "mask_token_id": MASK}
    blocks = make_blocks(rows, ordinals, **options)
    assert blocks.packed.shape == (3, count, 2 + 4 * size)
    labels_seen = 0
    for number, (row, ordinal) in enumerate(zip(rows, ordinals, strict=True)):
        anchors = draw_anchors(
            row.loss_mask.numpy() != 0, row.document_ids.numpy(), count, seed=seed, ordinal=ordinal
        ).tolist()
        used = len(anchors)
        assert blocks.anchors[number].tolist() == anchors + [0] * (count - used)
        assert blocks.keep[number].tolist() == [True] * used + [False] * (count - used)
        assert not blocks.scored[number, used:].any()
        assert (blocks.input_ids[number, used:] == MASK).all()
        seen = set()
        for block, expected in enumerate(blocks_slow(row, anchors, size)):
            assert blocks.input_ids[number, block].tolist() == expected["inputs"]
            assert blocks.labels[number, block].tolist() == expected["labels"]
            assert blocks.positions[number, block].tolist() == expected["positions"]
            assert blocks.scored[number, block].int().tolist() == expected["scored"]
            assert expected["scored"][1] == 1
            seen |= {anchors[block] + slot for slot in range(size) if expected["scored"][slot]}
        labels_seen += len(seen)
    assert blocks.covered == labels_seen
    assert blocks.supervised == sum(int(row.loss_mask.sum()) for row in rows)


def test_blocks_of_a_row_do_not_depend_on_its_company() -> None:
    rng = np.random.default_rng(0)
    rows = [random_row(rng, 30, SHAPE) for _ in range(3)]
    options = {"seed": 4, "anchors_per_row": 8, "block_size": 4, "mask_token_id": MASK}
    together = make_blocks(rows, (5, 6, 7), **options)
    for number, row in enumerate(rows):
        alone = make_blocks([row], (5 + number,), **options)
        assert torch.equal(alone.packed[0], together.packed[number])


def test_padding_is_never_an_anchor_whatever_its_loss_mask() -> None:
    documents = np.array([1, 1, 1, 0, 0, 0], dtype=np.int32)
    assert anchor_candidates(np.ones(6, dtype=bool), documents).tolist() == [0, 1]
